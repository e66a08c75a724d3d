"""Cost of the flow arbiter: the time of a permit among many flows, and what a journal adds."""
