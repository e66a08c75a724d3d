"""Aims of experiments: whose they are, which were missed and why, and what was aimed at before a run.

No experiment imports this package, so that a word here changes no digest of the code that made a result
(`benchmarks.runner.code_of`).
"""
