"""API keys over HTTP: a real ingress and router, a key file on disk, and scripted engines."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from actors.wire import messages as wire
from app.ingress.config import IngressConfig
from app.ingress.tenants import key_file
from app.ingress.tenants.key_file import changed
from app.ingress.tenants.keys import Key, new_id, new_secret, now
from tests.app.ingress.rig import ADMIN_KEY, MODEL, Rig, pair, rig, until

PROMPT = {"prompt": "one two three", "max_tokens": 4}
"""A request for at most 7 tokens, of which the scripted engines use all."""


@dataclass
class KeyFile:
    """A key file, and the secrets of the keys that a test has made in it."""

    path: Path

    def add(self, tenant: str = "acme", **given: Any) -> str:
        """Returns the secret of a new key."""
        at, key_id = now(), given.pop("id", new_id())
        secret, held = new_secret(key_id, at)
        key = Key(id=key_id, tenant=tenant, created=at, secrets=(held,), **given)
        with changed(self.path, create=True) as file:
            file[0] = file[0].model_copy(update={"keys": (*file[0].keys, key)})
        return secret

    def remove(self, tenant: str) -> None:
        with changed(self.path) as file:
            kept = tuple(key for key in file[0].keys if key.tenant != tenant)
            file[0] = file[0].model_copy(update={"keys": kept})


@pytest.fixture
def keys(tmp_path: Path) -> KeyFile:
    made = KeyFile(tmp_path / "keys.json")
    made.add("first")
    return made


Opened = Callable[..., AbstractAsyncContextManager[Rig]]


@pytest.fixture
def opened(tmp_path: Path, keys: KeyFile) -> Opened:
    """Makes an ingress whose key file is that of the test."""

    @asynccontextmanager
    async def make(engine: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Rig]:
        config = IngressConfig((MODEL,), sweep_interval_s=0.02, key_file=str(keys.path), **options)
        async with rig(tmp_path, pair(tmp_path, **(engine or {})), config) as made:
            yield made

    return make


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def ask(made: Rig, secret: str, **more: Any) -> httpx.Response:
    return await made.client.post("/v1/completions", json=PROMPT | more, headers=bearer(secret))


def error_of(answer: httpx.Response) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()["error"]
    return found


async def test_without_a_key_file_nobody_needs_a_key(tmp_path: Path) -> None:
    async with rig(tmp_path, pair(tmp_path)) as made:
        answer = await ask(made, "whatever")
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
        assert "api_keys" not in (await made.client.get("/sluice/status")).json()
        (request,) = made.engines["p"].of(wire.Prefill)
        assert "cache_salt" not in request.params


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", "Basic {}", "{}", "Bearer {}x", "Bearer \xff\xfe"]
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/models", "/v1/models/tiny"])
async def test_a_request_without_a_key_of_the_file_gets_openais_401(
    keys: KeyFile, opened: Opened, header: str, path: str
) -> None:
    secret = keys.add()
    async with opened() as made:
        given = header.format(secret).encode("latin-1")
        headers = {b"authorization": given}
        if "models" in path:
            answer = await made.client.get(path, headers=headers)
        else:
            # the key is looked at before the body
            answer = await made.client.post(path, content=b"no JSON", headers=headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        error = error_of(answer)
        assert (error["code"], error["type"]) == ("invalid_api_key", "invalid_request_error")
        assert secret not in answer.text
        assert not made.engines["p"].received


async def test_keys_and_the_admin_key_are_accepted(keys: KeyFile, opened: Opened) -> None:
    secret = keys.add()
    async with opened() as made:
        for key in (secret, ADMIN_KEY):
            assert (await ask(made, key)).status_code == 200
            assert (await made.client.get("/v1/models", headers=bearer(key))).status_code == 200
        # an API key gives no right to administer
        answer = await made.client.get("/sluice/admin/policy", headers=bearer(secret))
        assert (answer.status_code, error_of(answer)["code"]) == (401, "admin_key")
        mode = bearer(secret) | {"x-sluice-mode": "disaggregated"}
        assert (await made.client.post("/v1/completions", json=PROMPT, headers=mode)).status_code == 401
        mode = bearer(ADMIN_KEY) | {"x-sluice-mode": "disaggregated"}
        assert (await made.client.post("/v1/completions", json=PROMPT, headers=mode)).status_code == 200


async def test_an_expired_key_is_refused(keys: KeyFile, opened: Opened) -> None:
    secret = keys.add(expires=now() - timedelta(seconds=1))
    async with opened() as made:
        answer = await ask(made, secret)
        assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
        assert "expired" in error_of(answer)["message"]


async def test_a_change_of_the_file_is_noticed_and_a_broken_file_is_not(
    keys: KeyFile, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_file, "WATCH_S", 0.01)
    secret = keys.add("old")
    async with opened() as made:
        gate = made.app._gate
        assert gate is not None
        gate.start()
        assert (await ask(made, secret)).status_code == 200
        whole = keys.path.read_bytes()
        keys.path.write_bytes(whole[: len(whole) // 2])
        await until(lambda: made.metric("sluice_key_file_loads_total", result="failed"), "a refused file")
        assert (await ask(made, secret)).status_code == 200
        status = (await made.client.get("/sluice/status")).json()["api_keys"]
        assert status["keys"] == 2
        assert "cannot be used" in status["detail"]
        keys.path.write_bytes(whole)
        await until(lambda: made.metric("sluice_key_file_loads_total", result="ok") == 2, "a whole file")
        keys.remove("old")
        new = keys.add("new")
        await until(lambda: gate._book.tenants == ["first", "new"], "the new keys")
        assert (await ask(made, secret)).status_code == 401
        assert (await ask(made, new)).status_code == 200
        assert "detail" not in (await made.client.get("/sluice/status")).json()["api_keys"]


async def test_an_ingress_does_not_start_without_its_file(tmp_path: Path) -> None:
    config = IngressConfig((MODEL,), key_file=str(tmp_path / "none.json"))
    with pytest.raises(key_file.KeyFileError, match="sluice key create"):
        async with rig(tmp_path, [], config):
            pass


# ------------------------------------------------------------------------------------------------------- limits


async def test_headers_tell_of_the_limits_and_the_last_request_is_refused(
    keys: KeyFile, opened: Opened
) -> None:
    secret = keys.add(requests_per_min=2, tokens_per_min=6000)
    async with opened() as made:
        first = await ask(made, secret)
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert first.headers["x-ratelimit-reset-requests"] == "30s"
        assert first.headers["x-ratelimit-limit-tokens"] == "6000"
        assert first.headers["x-ratelimit-remaining-tokens"] == "5993"
        async with made.client.stream(
            "POST", "/v1/completions", json=PROMPT | {"stream": True}, headers=bearer(secret)
        ) as second:
            assert second.headers["x-ratelimit-remaining-requests"] == "0"
            await second.aread()
        third = await ask(made, secret)
        assert third.status_code == 429
        error = error_of(third)
        assert (error["code"], error["type"], error["param"]) == ("rate_limit_exceeded", "requests", None)
        assert "Limit 2" in error["message"]
        # one request in 30 s, less what has passed
        assert 1 <= int(third.headers["retry-after"]) <= 30
        assert third.headers["x-ratelimit-remaining-requests"] == "0"
        assert made.metric("sluice_tenant_limited_total", tenant="acme", limit="requests") == 1
        # others go on
        assert (await ask(made, ADMIN_KEY)).status_code == 200


async def test_the_official_client_understands_the_errors(keys: KeyFile, opened: Opened) -> None:
    secret = keys.add(requests_per_min=1, tokens_per_min=50)
    async with opened() as made:
        client = openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key=secret, max_retries=0)
        with pytest.raises(openai.RateLimitError) as never:
            await client.completions.create(model=MODEL, prompt="one", max_tokens=500)
        assert never.value.code == "rate_limit_exceeded"
        assert never.value.response.headers["x-should-retry"] == "false"
        await client.completions.create(model=MODEL, prompt="one", max_tokens=2)
        with pytest.raises(openai.RateLimitError) as later:
            await client.completions.create(model=MODEL, prompt="one", max_tokens=2)
        assert "retry-after" in later.value.response.headers
        await client.close()
        wrong = openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="sk-no", max_retries=0)
        with pytest.raises(openai.AuthenticationError) as refused:
            await wrong.completions.create(model=MODEL, prompt="one", max_tokens=2)
        assert refused.value.code == "invalid_api_key"
        await wrong.close()


async def test_what_its_key_will_not_admit_is_not_tokenised(
    keys: KeyFile, opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The threads that tokenise are everybody's, and what is refused costs its client nothing."""
    secret, other = keys.add(tokens_per_min=1000), keys.add("umbrella")
    async with opened(engine={"max_model_len": 50_000}, offload_prompt_chars=100) as made:
        prepared: list[int] = []
        intake = made.app._intake
        prepare = intake.prepare

        def counted(plan: Any, context: int) -> Any:
            prepared.append(len(plan.prompts))
            return prepare(plan, context)

        monkeypatch.setattr(intake, "prepare", counted)
        # 1,000 of the prompt and one of the answer at least
        refused = await ask(made, secret, prompt=[1] * 1000)
        assert (refused.status_code, error_of(refused)["type"]) == (429, "tokens")
        assert refused.headers["x-should-retry"] == "false"
        assert prepared == []
        assert (await ask(made, secret, prompt=[1] * 900)).status_code == 200
        later = await ask(made, secret, prompt=[1] * 500)
        assert (later.status_code, error_of(later)["type"]) == (429, "tokens")
        assert "retry-after" in later.headers
        assert prepared == [1]
        assert (await ask(made, other, prompt=[1] * 2000)).status_code == 200
        await made.idle()


def account(made: Rig, key_id: str) -> tuple[int, int, float]:
    """Returns the tokens and the sequences that a key holds, and the tokens that were spent at the last settlement."""
    assert made.app._gate is not None
    found = made.app._gate._ledger.account(key_id)
    assert found is not None
    return found.held, found.running, found.tokens.spent


async def test_what_a_request_holds_is_settled_with_what_it_has_used(keys: KeyFile, opened: Opened) -> None:
    """Two choices may have 40 tokens each, and end with one and two."""
    secret = keys.add(id="k1", tokens_per_min=10**6)
    async with opened({"auto": False}) as made:
        p, d = made.engines["p"], made.engines["d"]
        asked = asyncio.create_task(ask(made, secret, n=2, max_tokens=40))
        await until(lambda: p.of(wire.Prefill), "a prefill")
        # the prompt of 3, and twice 40
        assert account(made, "k1")[:2] == (83, 2)
        (work,) = p.of(wire.Prefill)
        p.finish_prefill(work.attempt_id)
        await until(lambda: d.of(wire.Decode), "a decode")
        d.admit(work.attempt_id)
        d.token(work.attempt_id, finish="stop")
        d.token(work.attempt_id, index=1)
        d.token(work.attempt_id, index=1, finish="stop")
        answer = await asked
        assert answer.json()["usage"]["total_tokens"] == 6
        assert account(made, "k1")[:2] == (0, 0)
        assert made.metric("sluice_tenant_tokens_total", tenant="acme", kind="completion") == 3
        assert made.metric("sluice_tenant_tokens_total", tenant="acme", kind="prompt") == 3
        assert made.metric("sluice_tenant_requests_total", tenant="acme", code="200") == 1


async def test_a_client_that_leaves_pays_for_what_was_begun(keys: KeyFile, opened: Opened) -> None:
    secret = keys.add(id="k1", tokens_per_min=1000)
    async with opened({"auto": False}) as made:
        asked = asyncio.create_task(ask(made, secret))
        await until(lambda: made.engines["p"].of(wire.Prefill), "a prefill")
        asked.cancel()
        await made.idle()
        held, running, spent = account(made, "k1")
        assert (held, running, round(spent)) == (0, 0, 3)
        assert made.metric("sluice_tenant_requests_total", tenant="acme", code="499") == 1


@pytest.mark.parametrize("own_limit", [True, False], ids=["its own limit", "the server's limit"])
async def test_a_client_that_gives_up_by_a_limit_of_its_own_pays_for_what_was_begun(
    keys: KeyFile, opened: Opened, own_limit: bool
) -> None:
    """A limit that ends just before the first token does not have prompts computed for nothing."""
    secret = keys.add(id="k1", tokens_per_min=1000)
    async with opened({"auto": False}, request_timeout_s=60.0 if own_limit else 0.3) as made:
        own = {"x-sluice-timeout-s": "0.3"} if own_limit else {}
        answer = await made.client.post("/v1/completions", json=PROMPT, headers=bearer(secret) | own)
        assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline")
        assert made.engines["p"].of(wire.Prefill)
        await made.idle()
        held, running, spent = account(made, "k1")
        assert (held, running, round(spent)) == (0, 0, 3 if own_limit else 0)


async def test_a_client_whose_own_limit_ends_before_an_engine_has_its_prompt_pays_nothing(
    keys: KeyFile, opened: Opened
) -> None:
    secret = keys.add(id="k1", tokens_per_min=1000)
    async with opened({"auto": False, "slots": 1}) as made:
        first = asyncio.create_task(ask(made, secret))
        await until(lambda: made.engines["p"].of(wire.Prefill), "a prefill")
        own = bearer(secret) | {"x-sluice-timeout-s": "0.3"}
        answer = await made.client.post("/v1/completions", json=PROMPT, headers=own)
        assert answer.status_code == 504
        assert len(made.engines["p"].of(wire.Prefill)) == 1
        assert round(account(made, "k1")[2]) == 0
        first.cancel()
        await made.idle()


async def test_a_key_gives_its_requests_more_time_than_others_have_or_less(
    keys: KeyFile, opened: Opened
) -> None:
    longer, shorter, plain = keys.add(timeout_s=3600.0), keys.add(timeout_s=50.0), keys.add()

    async def left_s(made: Rig, secret: str, own_s: str | None = None) -> float:
        """Returns the time that a request has left when its prompt goes to an engine."""
        headers = bearer(secret) | ({} if own_s is None else {"x-sluice-timeout-s": own_s})
        assert (await made.client.post("/v1/completions", json=PROMPT, headers=headers)).status_code == 200
        return float(made.engines["p"].of(wire.Prefill)[-1].timeout_s)

    async with opened(request_timeout_s=600.0) as made:
        assert 600.0 < await left_s(made, longer) <= 3600.0
        assert 50.0 < await left_s(made, plain) <= 600.0
        assert await left_s(made, shorter) <= 50.0
        # a request asks for less than that, and not for more
        assert 600.0 < await left_s(made, longer, "1000") <= 1000.0
        assert 50.0 < await left_s(made, plain, "1000") <= 600.0
        assert await left_s(made, shorter, "1000") <= 50.0


OWN_LIMIT = {"x-sluice-timeout-s": "4"}


async def test_the_time_of_a_key_is_the_servers_limit_and_no_limit_of_the_clients_own(
    keys: KeyFile, opened: Opened
) -> None:
    # within its own limit the prompt must come to an engine, which takes a busy machine a while
    limits = (("k1", 0.8, {}, "the server allows", 0), ("k2", 60.0, OWN_LIMIT, "'x-sluice-", 3))
    secrets = [keys.add(id=key, tokens_per_min=1000, timeout_s=timeout_s) for key, timeout_s, *_ in limits]
    async with opened({"auto": False}) as made:
        for secret, (key, _, own, told, spent) in zip(secrets, limits, strict=True):
            answer = await made.client.post("/v1/completions", json=PROMPT, headers=bearer(secret) | own)
            assert (answer.status_code, error_of(answer)["code"]) == (504, "deadline")
            assert told in error_of(answer)["message"]
            await made.idle()
            assert account(made, key)[:2] == (0, 0) and round(account(made, key)[2]) == spent


async def test_a_request_that_fails_before_output_costs_no_tokens(keys: KeyFile, opened: Opened) -> None:
    secret = keys.add(id="k1", tokens_per_min=1000)
    async with opened({"auto": False}, max_retries=0) as made:
        asked = asyncio.create_task(ask(made, secret))
        await until(lambda: made.engines["p"].of(wire.Prefill), "a prefill")
        (work,) = made.engines["p"].of(wire.Prefill)
        made.engines["p"].send(wire.Failed(work.attempt_id, "prefill", "internal", "broken", False))
        assert (await asked).status_code >= 500
        assert account(made, "k1") == (0, 0, 0.0)


async def test_a_request_with_a_fault_costs_nothing(keys: KeyFile, opened: Opened) -> None:
    secret = keys.add(id="k1", requests_per_min=1)
    async with opened() as made:
        for body in ({"max_tokens": -1}, {"model": "another"}, {"max_tokens": 10**6}):
            assert (await ask(made, secret, **body)).status_code in (400, 404)
        assert (await ask(made, secret)).status_code == 200


async def test_parallel_sequences_return_to_none(keys: KeyFile, opened: Opened) -> None:
    secret = keys.add(id="k1", parallel=3)
    async with opened({"auto": False}) as made:
        p = made.engines["p"]
        first = asyncio.create_task(ask(made, secret, n=2, stream=True))
        await until(lambda: p.of(wire.Prefill), "a prefill")
        # two of two sequences do not fit beside one another
        refused = [await ask(made, secret, n=2, stream=bool(i % 2)) for i in range(3)]
        assert [(answer.status_code, error_of(answer)["type"]) for answer in refused] == [
            (429, "parallel")
        ] * 3
        second = asyncio.create_task(ask(made, secret))
        await until(lambda: len(p.of(wire.Prefill)) == 2, "another prefill")
        assert account(made, "k1")[1] == 3
        for task in (first, second):
            task.cancel()
        await made.idle()
        assert account(made, "k1")[:2] == (0, 0)
        never = await ask(made, secret, n=4)
        assert (never.status_code, never.headers["x-should-retry"]) == (429, "false")


async def test_long_prompts_are_counted_too(keys: KeyFile, opened: Opened) -> None:
    """A prompt above `offload_prompt_chars` is tokenised in a thread, and then meets the same limits."""
    secret = keys.add(id="k1", tokens_per_min=40)
    async with opened(offload_prompt_chars=20) as made:
        long = " ".join(["word"] * 30)
        assert (await ask(made, secret, prompt=long)).status_code == 200
        refused = await ask(made, secret, prompt=long)
        assert (refused.status_code, error_of(refused)["type"]) == (429, "tokens")
        assert account(made, "k1")[:2] == (0, 0)


async def test_without_max_tokens_an_answer_is_held_to_be_as_long_as_those_before(
    keys: KeyFile, opened: Opened
) -> None:
    secret = keys.add(id="k1", tokens_per_min=10**6)
    async with opened({"auto": False}) as made:
        p, d = made.engines["p"], made.engines["d"]
        chat = {"messages": [{"role": "user", "content": "hello"}]}

        async def held(of: int, output: int) -> int:
            """Returns the tokens that the request holds for its answer, which then has `output` tokens."""
            url = "/v1/chat/completions"
            asked = asyncio.create_task(made.client.post(url, json=chat, headers=bearer(secret)))
            await until(lambda: len(p.of(wire.Prefill)) == of, "a prefill")
            work = p.of(wire.Prefill)[-1]
            tokens = account(made, "k1")[0] - len(work.tokens)
            p.finish_prefill(work.attempt_id)
            await until(lambda: len(d.of(wire.Decode)) == of, "a decode")
            d.admit(work.attempt_id)
            for i in range(output):
                d.token(work.attempt_id, finish="stop" if i == output - 1 else None)
            assert (await asked).status_code == 200
            assert account(made, "k1")[:2] == (0, 0)
            return tokens

        assert await held(1, 12) == 512
        # 512 + 0.1 x (12 - 512)
        assert await held(2, 12) == 462
        keys.add("another")
        assert made.app._gate is not None
        await made.app._gate._watch.look()
        # 462 + 0.1 x (12 - 462): a change of the file forgets nothing
        assert await held(3, 1) == 417


async def test_each_replica_enforces_its_share(keys: KeyFile, opened: Opened) -> None:
    secret = keys.add(requests_per_min=8)
    async with opened(replicas=4) as made:
        codes = [(await ask(made, secret)).status_code for _ in range(3)]
        assert codes == [200, 200, 429]
        status = (await made.client.get("/sluice/status")).json()["api_keys"]
        assert status == {"keys": 2, "tenants": 2, "limits": "share", "ingresses": 4}


# -------------------------------------------------------------------------------------------- terms, salts, usage


async def test_the_ceiling_bounds_what_a_request_may_ask_for(keys: KeyFile, opened: Opened) -> None:
    standard, batch, urgent = keys.add(), keys.add(ceiling="batch"), keys.add(ceiling=-50, weight=3.0)
    async with opened() as made:
        seen: list[tuple[str, int, str, float]] = []
        submit = made.connections.to_router

        def to_router(message: Any) -> None:
            if isinstance(message, wire.Submit):
                terms = message.terms
                seen.append((terms.request_class, terms.priority, terms.tenant, terms.weight))
            submit(message)

        made.connections.to_router = to_router  # type: ignore[method-assign]
        assert (await ask(made, standard)).status_code == 200
        assert (await ask(made, standard, priority=5)).status_code == 200
        # the default of a request lies above this ceiling, and is lowered
        assert (await ask(made, batch)).status_code == 200
        assert (await ask(made, urgent, priority=-50)).status_code == 200
        assert seen == [
            ("standard", 0, "acme", 1.0),
            ("batch", 5, "acme", 1.0),
            ("batch", 1, "acme", 1.0),
            ("interactive", -50, "acme", 3.0),
        ]
        for secret, asked in ((standard, -1), (standard, "interactive"), (batch, 0), (urgent, -51)):
            refused = await ask(made, secret, priority=asked)
            assert (refused.status_code, error_of(refused)["code"]) == (403, "priority_not_allowed")
        header = bearer(standard) | {"x-sluice-priority": "interactive"}
        assert (await made.client.post("/v1/completions", json=PROMPT, headers=header)).status_code == 403


async def test_tenants_have_salts_that_others_cannot_name(keys: KeyFile, opened: Opened) -> None:
    a, again, b = keys.add("a"), keys.add("a"), keys.add("b")
    shared = keys.add("c", shares_cache=True)
    async with opened() as made:

        async def salt(secret: str, **more: Any) -> str | None:
            before = len(made.engines["d"].of(wire.Decode))
            assert (await ask(made, secret, **more)).status_code == 200
            prefill, decode = (
                made.engines["p"].of(wire.Prefill)[-1],
                made.engines["d"].of(wire.Decode)[before],
            )
            assert prefill.params.get("cache_salt") == decode.params.get("cache_salt")
            found: str | None = decode.params.get("cache_salt")
            return found

        of_a = await salt(a)
        assert of_a is not None and of_a == await salt(again)
        assert await salt(shared) is None
        # one tenant names what another has, and gets a salt of its own
        salts = [of_a, await salt(b), await salt(b, cache_salt=of_a), await salt(a, cache_salt="x")]
        salts += [await salt(b, cache_salt="x"), await salt(shared, cache_salt="x")]
        assert len(set(salts)) == len(salts)
        assert await salt(a, cache_salt="x") == salts[3]
        # it can be sent to vLLM, whose server takes 128 characters without @ and slashes
        assert all(s is not None and len(s) == 64 and s.isalnum() for s in salts)


async def test_a_bill_can_be_made_of_the_usage_log(keys: KeyFile, opened: Opened, tmp_path: Path) -> None:
    secret = keys.add(id="k1", requests_per_min=2)
    folder = tmp_path / "usage"
    async with opened(usage_log=str(folder)) as made:
        answers = [await ask(made, secret, n=2), await ask(made, ADMIN_KEY), await ask(made, secret)]
        assert (await ask(made, secret)).status_code == 429
        await until(lambda: made.metric("sluice_usage_lines_total", result="written") == 3, "the lines")
    (file,) = folder.glob("*.jsonl")
    assert file.stat().st_mode & 0o777 == 0o600
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["request_id"] for line in lines] == [answer.json()["id"] for answer in answers]
    first = {
        name: lines[0][name] for name in ("key", "tenant", "status", "choices", "prompt_tokens", "model")
    }
    assert first == {
        "key": "k1", "tenant": "acme", "status": 200, "choices": 2, "prompt_tokens": 3, "model": MODEL,
    }  # fmt: skip
    assert [line["completion_tokens"] for line in lines] == [8, 4, 4]
    assert lines[1]["tenant"] == "admin"
    assert not any(secret in line for line in file.read_text().splitlines())


async def test_only_so_many_tenants_have_names_in_metrics(keys: KeyFile, opened: Opened) -> None:
    secrets = [keys.add(f"t{i}") for i in range(3)]
    async with opened(tenant_labels=2) as made:
        for secret in secrets:
            assert (await ask(made, secret)).status_code == 200
        counted = {
            name: made.metric("sluice_tenant_requests_total", tenant=name, code="200")
            for name in ("first", "t0", "t1", "t2", "other")
        }
        # `first` and `t0` are the first two of the file
        assert counted == {"first": 0, "t0": 1, "t1": 0, "t2": 0, "other": 2}
