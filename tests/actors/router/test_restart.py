"""A router that has restarted, over real sockets: whoever reconnects first, the work that goes on is charged and
decided as if the router had always been there.
"""

import itertools

import pytest

from actors.router.server import RouterServer
from actors.wire import messages as wire
from policies.request.stage import Stage
from tests.actors.router.test_server import Peer, engine, peer, until

SUBMIT = wire.Submit("x", prompt_tokens=10, max_tokens=4)
ADOPTED = {
    "prefilling": wire.Adopt(SUBMIT, "prefilling", "p"),
    "pooled": wire.Adopt(SUBMIT, "pooled", "p", lease_s=30.0, kv_bytes=7),
    "transferring": wire.Adopt(SUBMIT, "transferring", "p", "d"),
    "decoding": wire.Adopt(SUBMIT, "decoding", "d", "d", tokens=2),
}
CHARGED = {
    "prefilling": {"p": (0, 10, 1), "d": (0, 0, 0)},
    "pooled": {"p": (0, 10, 0), "d": (1, 10, 0)},  # it is sent to d at once
    "transferring": {"p": (0, 10, 0), "d": (1, 10, 0)},
    "decoding": {"p": (0, 0, 0), "d": (1, 12, 0)},
}
"""(slots, KV tokens, prompts in work) of both engines once all have reconnected."""


def charged(router: RouterServer) -> dict[str, tuple[int, int, int]]:
    workers = router.dispatcher.state.snapshot(0).workers.values()
    return {w.id: (w.slots_used, w.kv_tokens, w.prefilling) for w in workers}


async def reconnected(router: RouterServer, order: tuple[str, ...], adopt: wire.Adopt) -> Peer:
    """Reconnects ingress ("i") and engines ("p", "d") in an order, one after the other; returns the ingress."""
    state = router.dispatcher.state
    for who in order:
        if who == "i":
            ingress = await peer(router, "ingress", "i")
            ingress.channel.send(adopt)
            await until(lambda: state.stage("x") is not None)
        else:
            await engine(router, who, "prefill" if who == "p" else "decode")
            await until(lambda who=who: state.status_at_s(who) is not None)  # type: ignore[misc]
    return ingress


@pytest.mark.parametrize("order", list(itertools.permutations("ipd")), ids="".join)
@pytest.mark.parametrize("stage", sorted(ADOPTED))
async def test_work_is_charged_whoever_reconnects_first(
    router: RouterServer, order: tuple[str, ...], stage: str
) -> None:
    ingress = await reconnected(router, order, ADOPTED[stage])
    if stage == "pooled":
        assert (await ingress.get(wire.RouteDecode)).engine_id == "d"  # type: ignore[attr-defined]
    assert charged(router) == CHARGED[stage]
    ingress.channel.send(wire.Closed("x", "finished", 4))
    await until(lambda: router.status().in_flight == 0)
    assert charged(router) == {"p": (0, 0, 0), "d": (0, 0, 0)}


@pytest.mark.parametrize("renewed_ago_s", [None, 2.0])
async def test_a_pooled_attempt_keeps_its_age_and_its_lease_over_a_restart(
    router: RouterServer, renewed_ago_s: float | None
) -> None:
    """The attempt has waited for 300 s, and 25 of its last 30 s are left: it is not overdue, but its age counts."""
    waited: dict[str, float | None] = {
        "pooled_ago_s": 300.0,
        "granted_s": 30.0,
        "renewed_ago_s": renewed_ago_s,
    }
    submit = wire.Submit("x", prompt_tokens=10, max_tokens=4, age_s=303.0)
    adopt = wire.Adopt(submit, "pooled", "p", lease_s=25.0, kv_bytes=7, **waited)  # type: ignore[arg-type]
    await reconnected(router, ("i", "p"), adopt)
    state = router.dispatcher.state
    (entry,) = state.waiting()
    left_s = entry.lease_until_s - entry.entered_s
    assert left_s == pytest.approx(325.0)
    assert entry.entered_s - entry.request.arrived_s == pytest.approx(3.0)
    assert entry.lease_s == 30.0
    assert entry.starves_from_s - entry.entered_s == pytest.approx(20.0)
    since_s = 0.0 if renewed_ago_s is None else 298.0
    assert entry.overdue_from_s - entry.entered_s == pytest.approx(since_s + (325.0 - since_s) * 2 / 3)


@pytest.mark.parametrize("order", list(itertools.permutations("ipd")), ids="".join)
async def test_an_adopted_prefill_that_ends_is_routed_on_at_once(
    router: RouterServer, order: tuple[str, ...]
) -> None:
    ingress = await reconnected(router, order, ADOPTED["prefilling"])
    ingress.channel.send(wire.PrefillReported("x", 30.0, 1, 0, "p"))
    assert (await ingress.get(wire.RouteDecode)).engine_id == "d"  # type: ignore[attr-defined]
    assert charged(router) == {"p": (0, 10, 0), "d": (1, 10, 0)}
    assert not [message for message in ingress.inbox if isinstance(message, wire.Unknown)]


async def test_a_prefill_that_ends_before_its_engine_is_back_is_routed_on_when_it_comes(
    router: RouterServer,
) -> None:
    ingress = await reconnected(router, ("i",), wire.Adopt(SUBMIT, "prefilling", "p"))
    ingress.channel.send(wire.PrefillReported("x", 30.0, 1, 0, "p"))
    await until(lambda: router.dispatcher.state.stage("x") is Stage.POOLED)
    await engine(router, "d", "decode")
    await engine(router, "p", "prefill")
    assert (await ingress.get(wire.RouteDecode)).engine_id == "d"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "message",
    [
        wire.PrefillReported("x", 30.0, 1, 0, "p"),
        wire.Progress(["x"], []),
        wire.Progress([], [wire.Grown("x", 3)]),
        wire.Progress(["x"], [wire.Grown("x", 3)]),
    ],
)
async def test_news_of_an_attempt_that_the_router_does_not_know_is_answered_and_the_answer_heals(
    router: RouterServer, message: wire.PrefillReported | wire.Progress
) -> None:
    await engine(router, "p", "prefill")
    await engine(router, "d", "decode")
    ingress = await peer(router, "ingress", "i")
    ingress.channel.send(message)
    assert (await ingress.get(wire.Unknown)).attempt_id == "x"  # type: ignore[attr-defined]
    if isinstance(message, wire.PrefillReported):
        ingress.channel.send(ADOPTED["pooled"])
        assert (await ingress.get(wire.RouteDecode)).engine_id == "d"  # type: ignore[attr-defined]
    else:
        ingress.channel.send(wire.Adopt(SUBMIT, "decoding", "d", "d", tokens=3))
        ingress.channel.send(wire.Progress(["x"], [wire.Grown("x", 4)]))
        await until(lambda: charged(router).get("d") == (1, 14, 0))
    assert not [message for message in ingress.inbox if isinstance(message, wire.Unknown)]


async def test_news_that_contradict_the_router_are_answered_and_adopted_in_the_true_stage(
    router: RouterServer,
) -> None:
    ingress = await reconnected(router, ("p", "d", "i"), ADOPTED["pooled"])
    await ingress.get(wire.RouteDecode)
    # the ingress has the attempt at its prefill engine once more, and this prefill ends
    ingress.channel.send(wire.PrefillReported("x", 30.0, 1, 0, "p"))
    await ingress.get(wire.Unknown)
    ingress.channel.send(ADOPTED["prefilling"])
    await until(lambda: charged(router) == CHARGED["prefilling"])


@pytest.mark.parametrize("stage", sorted(ADOPTED))
@pytest.mark.parametrize("away", ["p", "d"])
async def test_an_engine_whose_link_was_away_longer_than_the_grace_is_charged_again(
    router: RouterServer, stage: str, away: str
) -> None:
    ingress = await peer(router, "ingress", "i")
    engines = {name: await engine(router, name, role) for name, role in (("p", "prefill"), ("d", "decode"))}
    await until(lambda: len(router.status().statuses) == 2)
    ingress.channel.send(ADOPTED[stage])
    await until(lambda: charged(router) == CHARGED[stage])
    engines[away].channel.abort("link lost")
    await until(lambda: set(charged(router)) == {"p", "d"} - {away})
    await engine(router, away, "prefill" if away == "p" else "decode")
    await until(lambda: charged(router) == CHARGED[stage])


async def test_a_pool_entry_outlives_the_loss_of_its_engine_s_link(router: RouterServer) -> None:
    prefill = await engine(router, "p", "prefill")
    ingress = await peer(router, "ingress", "i")
    ingress.channel.send(ADOPTED["pooled"])
    await until(lambda: router.status().pool == 1)  # there is no decode engine yet
    prefill.channel.abort("link lost")
    await until(lambda: router.status().pool == 0)
    await engine(router, "d", "decode")
    await engine(router, "p", "prefill")
    assert (await ingress.get(wire.RouteDecode)).engine_id == "d"  # type: ignore[attr-defined]


async def test_an_adopted_attempt_keeps_the_time_since_which_its_client_waits(router: RouterServer) -> None:
    """The request came 303 s ago and had its last token 2 s ago, at another router."""
    submit = wire.Submit("x", prompt_tokens=10, max_tokens=4, age_s=303.0, resumed_tokens=3, waits_s=2.0)
    adopt = wire.Adopt(submit, "pooled", "p", lease_s=25.0, kv_bytes=7, pooled_ago_s=1.0)
    await reconnected(router, ("i", "p"), adopt)
    (entry,) = router.dispatcher.state.waiting()
    assert entry.request.ttft_from_s - entry.request.arrived_s == pytest.approx(301.0)
