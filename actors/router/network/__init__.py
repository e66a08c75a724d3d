"""The network oracle of the router: its sources, and its estimates from observed transfers."""
