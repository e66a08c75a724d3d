"""Measurements: of a running server (`live`), of predictors, of simulated clusters. Nothing here is imported by the
server.
"""
