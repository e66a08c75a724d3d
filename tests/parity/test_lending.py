"""One loan in two bodies: what live sim engines read, hit and compute of a lent prefix, the simulator's engines do too.

The live side is two sim engines over real sockets; the simulated side is the cluster of `lending_cluster`, where the
router has decided the loan. Prompt, prefix and block size are the same.
"""

from pathlib import Path

from actors.engine.sim.config import SimEngineConfig
from actors.engine.sim.engine import SimEngine
from actors.wire.messages import Prefill, PrefillDone
from tests.actors.engine.rig import Node, Rig
from tests.benchmarks.sim import lending_cluster as lending

PROMPT = list(range(10, 10 + 1650))


async def live(folder: Path, lend: bool) -> dict[str, int]:
    """The tokens and bytes of a prefill of PROMPT; before it, the lender computed a prompt with the same head."""
    async with Rig(folder) as rig:

        async def node(name: str) -> Node:
            sim = SimEngineConfig(
                name,
                "prefill",
                block_size_tokens=lending.BLOCK,
                max_model_len=4096,
                timing={"kv_bytes_per_token": lending.PROFILE.kv_bytes_per_token},
            )
            return await rig.node(SimEngine(sim), name)

        lender, reader = await node("l"), await node("p")
        other = [*PROMPT[: lending.HEAD], *range(50_000, 50_016)]
        await lender.prefilled("a", other)
        lender.client.release("a")
        handle = None
        if lend:
            handle = (await lender.prefilled("d", PROMPT[: lending.HEAD + 1])).handle
        reader.client.channel.send(Prefill("d", PROMPT, {}, 60.0, prefix=handle))
        done = await reader.client.wait("d", PrefillDone)
        reader.client.release("d")
        await reader.rests()
        await lender.rests()
        totals = [node.engine.metrics() for node in (lender, reader)]
        return {
            "hit_tokens": done.cached_tokens,
            "moved_bytes": totals[1].transfer_bytes,
            "reads": totals[1].transfers,
            "lender_tokens": totals[0].prefill_tokens - len(other),
            "reader_tokens": totals[1].prefill_tokens,
        }


def simulated(lend: bool) -> dict[str, int]:
    cluster, d, result = lending.run(lending.config(lend))
    tokens = {name: worker.model.prefill_tokens_total for name, worker in cluster.workers.items()}
    return {
        "hit_tokens": d.prefill_hit_tokens,
        "moved_bytes": int(result.peaks["prefix_bytes"]),
        "reads": int(result.peaks["prefixes_read"]),
        # a and c on p-0, b on p-1, of 1,616 tokens each
        "lender_tokens": tokens["p-0"] - 2 * 1616,
        "reader_tokens": tokens["p-1"] - 1616,
    }


async def test_a_loan_moves_and_saves_the_same_in_both_bodies(tmp_path: Path) -> None:
    lent = await live(tmp_path, True)
    assert lent == simulated(True)
    assert lent == {
        "hit_tokens": 1600,
        "moved_bytes": 1_600_000,
        "reads": 1,
        "lender_tokens": 1,
        "reader_tokens": 50,
    }


async def test_without_a_loan_both_compute_the_same(tmp_path: Path) -> None:
    computed = await live(tmp_path, False)
    assert computed == simulated(False)
    assert computed["reader_tokens"] == 1650
