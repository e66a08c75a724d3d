"""Processes that wait for the next start of an engine on their node, with its imports done and without a model.

A start of a vLLM engine spends most of its time on the imports of two processes: the replica's, and the engine core's.
Here both exist before they are wanted: a pre-warmed process has imported what a replica imports, and has a child that
has imported what a core imports, for a share of the node's cores (`actors.engine.vllm.early_core`). It knows neither
the model's weights nor the engine's role.

- `keeper`: an actor on each node that has engines keeps some of these processes (`pool`) ready.
- `process`: the program of such a process. It waits at a unix socket until it is taken.
- `launcher`: what Ray starts as the Python of an engine replica's process. It hands Ray's command to a process that
  waits, which becomes Ray's worker; without one it runs the command itself, so an ordinary start follows.

Life: until it is taken, a process dies with the keeper that made it (the kernel's parent-death signal). From then on it
is Ray's worker: it ends when its raylet does, and its core dies with it.

Other ways were judged. Ray starts idle workers ahead by itself, but offers no way to prepare those of one kind. An
engine in a process beside its replica could be forked from a prepared server, but would need a second process an
engine, and all that Serve asks of a replica would have to cross between the two. A replica that has not loaded its
weights yet would hold a place of the fleet, and on a GPU machine a GPU.
"""
