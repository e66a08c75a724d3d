"""How good and how fast the predictors are on published traces: `make bench-predictors`."""
