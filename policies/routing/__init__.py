"""Policies that choose the worker of each task: one a file, named as its paper names it; `registry` lists them."""
