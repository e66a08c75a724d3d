"""Experiments that repeat the papers' figures. `registry.py` lists them; `base.py` says what a module provides."""
