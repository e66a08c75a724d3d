"""`python -m predictors.fit`: see `cli.py`."""

from predictors.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
