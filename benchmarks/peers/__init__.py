"""Sluice beside other routers of disaggregated serving, in one run on one machine."""
