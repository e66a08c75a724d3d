"""An operator's question to the simulator: what would another policy, more engines or other links do to this load?"""
