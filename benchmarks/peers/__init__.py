"""Measures Sluice beside other routers, on engines that tick alike, in one run."""
