"""The autoscaler: it carries a scaling policy's plans out on a running fleet.

    fleet        groups, and the replicas that Ray Serve has, joined with what the router observes
    orders       from a plan to orders to single engines, and counts of replicas
    bounds       the bounds of groups, which an administrator may change
    waits        how long engines have been awaited, and which of them are overdue
    control      the level-triggered controller: policy or administrator, and who else has set a count
    asked        an administrator's questions and orders
    journal      observations and plans on disk
    server       the connection to the router, and the loop

`fleet`, `orders`, `bounds`, `waits`, `control` and `asked` are pure: they do no I/O and read no clock.
"""
