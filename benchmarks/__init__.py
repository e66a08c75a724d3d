"""Measurements of a running server (`live`), of predictors, and of simulated clusters.

The server imports nothing from this package.
"""
