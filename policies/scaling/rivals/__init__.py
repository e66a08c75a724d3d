"""Published scaling rules behind the interface of `policies.scaling.base`: what Sluice's own policy is compared
with.
"""
