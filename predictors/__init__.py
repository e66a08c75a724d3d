"""The predictors estimate how long a request will run, and whether it will finish soon.

`protocol.py` defines the contract, `forecast.py` the state machine that runs between calls, and `README.md` lists
the other modules.
"""
