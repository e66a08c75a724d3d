"""Length and termination predictors: how long will a request run, and will it finish soon?

`protocol.py` has the contract, `forecast.py` the state machine between calls, `README.md` the map of the
rest.
"""
