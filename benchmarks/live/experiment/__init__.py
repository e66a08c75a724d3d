"""Experiments on a running application: a YAML file with a load and a timeline, sent, measured, put back, compared."""
