"""Cost of the flow arbiter: the time of a permit among many flows, what a journal adds, and how many reads go without
permits because a living agent comes late.
"""
