"""`python -m predictors.fit` runs the command of `cli.py`."""

from predictors.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
