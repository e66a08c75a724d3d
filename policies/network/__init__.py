"""What is known of the network between workers: the cost oracle of NetKV III-E, and what is learnt from transfers."""
