"""Simulations that answer an operator's question: what would other policies, engines or links do to this load?"""
