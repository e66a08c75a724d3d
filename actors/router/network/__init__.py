"""The network oracle at work in the router: its sources, and what the estimator learns."""
