"""Knowledge of the network between workers: the cost oracle of NetKV III-E, and bandwidths learned from transfers."""
