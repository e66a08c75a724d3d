"""Measures the quality and the speed of the predictors on published traces: `make bench-predictors`."""
