"""Length and termination predictors: how long will a request run, and will it finish soon?

`protocol.py` defines the contract, `forecast.py` the state machine that runs between calls, and `README.md` lists
the other modules.
"""
