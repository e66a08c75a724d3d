"""The papers' figures re-run, one module each; `registry.py` names them, `base.py` says what a module provides."""
