"""The modules here follow DeepFlow, section 5: the PD heatmap says which requests should be disaggregated, and
locality applies while the load is balanced.
"""
