"""The composition joins BR-H, NetKV and request classes in one objective, in request-seconds. The static stack is
the baseline for it.
"""
