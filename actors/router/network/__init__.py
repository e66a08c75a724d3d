"""The network oracle at work in the router: its sources, and its estimates from transfers."""
