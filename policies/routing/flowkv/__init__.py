"""The modules here follow FlowKV's appendix B: the load score, the normal case for prefill (least predicted TTFT),
and the three load regimes.
"""
