"""The dashboard: one process that watches the fleet as an observer, shows it on a page, and asks the router for
changes.

Messages go into `feed`, which is pure: state and one delta a second come out. `observer` holds the connections,
`server` the HTTP routes, `guard` says who may do what, and `changes` carries out what an administrator asks.
"""
