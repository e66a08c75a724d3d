"""DeepFlow 5: where prefill and decode should be apart (PD heatmap), and locality while the load is balanced."""
