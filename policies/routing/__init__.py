"""Routing policies choose the worker of each task. Each has its own file and the name that its paper gives it;
`registry` lists them.
"""
