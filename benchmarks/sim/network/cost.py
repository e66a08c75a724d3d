"""A measurement of the CPU time that the start or end of a flow takes: `python -m benchmarks.sim.network.cost`.

It runs a closed loop over NetKV's cluster, with `concurrent` flows from prefill to decode instances, each of which is
replaced when it ends. A change is a start or an end. `together` flows start and end at once, as a request's shards do.
The cost of a change must grow far more slowly than the number of flows. The table that it prints is kept nowhere.
"""

import random
import time
from collections.abc import Callable

from benchmarks.sim.kernel import Kernel
from benchmarks.sim.network.clusters import netkv_cluster, netkv_instances, nic_of, prefill_and_decode
from benchmarks.sim.network.flows import Flow
from benchmarks.sim.network.network import Network


def microseconds_per_change(
    gpus: int,
    concurrent: int,
    changes: int,
    together: int = 1,
    levels: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> float:
    """Returns the mean CPU time of a change in microseconds, over `changes` changes after the loop has filled.

    The sizes of flows are exponential with a mean of 1e9 bytes, drawn with seed 1.
    """
    topology, kernel, rng = netkv_cluster(gpus), Kernel(), random.Random(1)
    net = Network(topology, kernel, seed=1)
    prefill, decode = prefill_and_decode(netkv_instances(topology))
    ended = 0

    def start() -> None:
        source, target = rng.choice(prefill), rng.choice(decode)
        n_bytes, level = round(rng.expovariate(1e-9)) + 1, rng.randrange(levels)
        key = f"r{rng.random()}"
        for gpu in range(together):
            nics = {"source_nic": nic_of(topology, source, gpu), "target_nic": nic_of(topology, target, gpu)}
            on_done = replace if gpu == 0 else None
            net.start(source.node, target.node, n_bytes, level, on_done, path_key=key, **nics)

    def replace(_: Flow) -> None:
        nonlocal ended
        ended += together
        if 2 * ended >= changes:
            kernel.stop()
        start()

    for _ in range(concurrent // together):
        start()
    kernel.run(1e-6)
    begin_s = clock()
    kernel.run()
    return (clock() - begin_s) / (2 * ended) * 1e6


def main() -> None:
    print("GPUs  levels  shards together  us per change at 16 / 128 / 512 concurrent flows")
    for gpus, levels, together in (
        (64, 1, 1),
        (64, 1, 4),
        (64, 4, 1),
        (1024, 1, 1),
        (1024, 1, 4),
        (1024, 4, 1),
    ):
        costs = [microseconds_per_change(gpus, n, 4000, together, levels) for n in (16, 128, 512)]
        print(
            f"{gpus:4}  {levels:6}  {together:15}  " + " / ".join(f"{cost:.0f}" for cost in costs), flush=True
        )


if __name__ == "__main__":
    main()
