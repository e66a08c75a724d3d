"""One HTTP exchange of an ingress whose router and engines a test plays, without sockets and with a clock of its own.

The engines detokenise as vLLM does: a `DecodeStream` for each choice, which keeps back what is no whole character yet,
and the last characters while they could be the beginning of a stop string.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import orjson
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.decoders import DecodeStream

from actors.wire import messages as wire
from actors.wire.channel import Identity
from app.api.extensions import Defaults
from app.api.plan import plan_completion
from app.ingress.config import IngressConfig
from app.ingress.connections import IngressConnections
from app.ingress.exchange import HttpExchange
from app.ingress.http.reply import Headers
from app.ingress.intake import Prompts
from app.ingress.metrics import IngressMetrics
from app.ingress.open_requests import OpenRequests
from app.ingress.request import IngressRequest
from policies.request import events as ev
from policies.request.ended import RequestEnd
from policies.request.stage import Stage
from policies.request.troubles import SUSPECT_S

FLEET = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode"}
PROMPT = [1, 2, 3, 4, 5]

TEXTS = (
    "Naïve cafés serve crème brûlée; 日本語 and 한국어 follow. The END is near, but not the END.",
    "Emoji 👩‍👩‍👧 and 🇪🇺 flags are many bytes: ¡olé! Then ENDless plain text goes on and on.",
    "Short ✓",
)


def byte_tokenizer() -> Tokenizer:
    """Returns a byte-level BPE tokenizer, as SmolLM2's is. It is so small that most characters beyond ASCII are several
    tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


TOKENIZER = byte_tokenizer()
IDS = tuple(TOKENIZER.encode(text).ids for text in TEXTS)


class Generation:
    """The output of one choice at one engine; with `resume` it goes on where another engine stopped."""

    def __init__(self, index: int, stop: list[str], resume: wire.Resume | None) -> None:
        self.index, self._stop, self._ids = index, stop, IDS[index]
        self._stream = DecodeStream(skip_special_tokens=False)
        self._text, self._tokens, self._sent = "", 0, 0
        self.finish: str | None = None
        if resume is not None:
            assert resume.choice == index
            assert resume.token_ids == self._ids[: resume.n_tokens]
            self._push(resume.n_tokens)
            assert self.finish is None
            assert resume.chars <= len(self._text)
            self._sent = resume.chars

    def _push(self, count: int) -> None:
        for token in self._ids[self._tokens : self._tokens + count]:
            self._text += self._stream.step(TOKENIZER, token) or ""
            self._tokens += 1
            found = [at for stop in self._stop if (at := self._text.find(stop)) >= 0]
            if found:
                self._text, self.finish = self._text[: min(found)], "stop"
                return
        if self._tokens == len(self._ids):
            self.finish = "length"

    def step(self, attempt_id: str, count: int) -> wire.Out:
        """Generates up to `count` more tokens and returns the piece for them."""
        before = self._tokens
        self._push(count)
        held_back = 0 if self.finish else max((len(stop) - 1 for stop in self._stop), default=0)
        until = max(self._sent, len(self._text) - held_back)
        text, self._sent = self._text[self._sent : until], until
        ids = list(self._ids[before : self._tokens])
        return wire.Out(attempt_id, text, len(ids), self.index, self.finish, token_ids=ids)


def undisturbed(index: int, stop: list[str]) -> tuple[str, int]:
    """Returns the text of a choice that one engine generates alone, and its number of tokens."""
    made = Generation(index, stop, None)
    made.step("", len(IDS[index]))
    return made._text, made._tokens


class HeardReply:
    """Keeps what an exchange answers."""

    def __init__(self) -> None:
        self.on_gone: Any = None
        self.gone = self.started = False
        self.status: int | None = None
        self.body = b""
        self.ended = False

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        assert not self.started
        self.started = self.ended = True
        self.status, self.body = status, body

    def start(self, headers: Headers) -> None:
        assert not self.started
        self.started, self.status = True, 200

    def write(self, data: bytes) -> None:
        assert self.started and not self.ended
        self.body += data

    def end(self, data: bytes = b"") -> None:
        self.write(data)
        self.ended = True


class CheckedExchange(HttpExchange):
    """An exchange that asserts at every moment: the text sent is the beginning of the text of the ids."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.delivered: dict[int, str] = {}

    def output(self, request: IngressRequest, out: wire.Out) -> None:
        super().output(request, out)
        choice = self._choices[out.index]
        # a choice that begins anew drops what it had
        before = "" if choice.tokens == out.n_tokens else self.delivered[out.index]
        self.delivered[out.index] = before + out.text
        assert TOKENIZER.decode(choice.ids.tolist())[: choice.chars] == self.delivered[out.index]


@dataclass
class PlayedLink:
    """One engine as the ingress's connections see it."""

    info: wire.EngineInfo
    play: "Play"
    live: dict[str, Any] = field(default_factory=dict)
    connected: bool = True
    retired: bool = False
    silent_s: float = 0.0

    def send(self, message: wire.Message) -> bool:
        self.play.heard.append((self.info.id, message))
        if isinstance(message, wire.Decode):
            stop = message.params.get("stop", [])
            if message.resume is None:
                indices = range(message.params.get("n", 1))
            else:
                assert "n" not in message.params
                indices = range(message.resume.choice, message.resume.choice + 1)
            made = [Generation(index, stop, message.resume) for index in indices]
            self.play.generations[message.attempt_id] = made
        return True


class Play:
    """A playing ingress. `heard` is what engines were sent, with their names, and `told` what the router was."""

    def __init__(self, engines: dict[str, str], traces: Any = None, **body: Any) -> None:
        # nothing but the end of a story ends its request
        config = IngressConfig(("m",), max_migrations=100, max_retries=100, idle_limit_s=1e9)
        self.now_s = 1000.0
        self.heard: list[tuple[str, wire.Message]] = []
        self.told: list[wire.Message] = []
        self.generations: dict[str, list[Generation]] = {}
        self.metrics = IngressMetrics("m")

        async def nowhere() -> tuple[str, ...]:
            return ()

        made = IngressConnections(config, Identity("ingress", "i"), nowhere, self.metrics)
        self.connections = made
        made.now_s = self._read_clock  # type: ignore[method-assign]
        made._router.send = self._tell  # type: ignore[method-assign, assignment]
        self.links = {
            name: PlayedLink(
                wire.EngineInfo(name, role, "vllm", "m", "g", (), 8, 512, 16, 1024, "n", 1, 30.0),  # type: ignore[arg-type]
                self,
            )
            for name, role in engines.items()
        }
        made._engines.attached = lambda engine_id, _: self.links[engine_id]  # type: ignore[method-assign, assignment, return-value]
        made._engines.get = lambda engine_id: self.links[engine_id]  # type: ignore[method-assign, assignment, return-value]
        made._engines.all = lambda: list(self.links.values())  # type: ignore[method-assign, assignment, return-value]
        self.reply = HeardReply()
        requests = OpenRequests(made, traces)
        headers = body.pop("headers", {})
        plan = plan_completion(orjson.dumps({"prompt": PROMPT} | body), headers, Defaults())
        self.exchange = CheckedExchange(requests, plan, self.reply, requests.new_id(None), self.now_s)
        requests.opened(self.exchange)
        self.exchange.begin(Prompts([PROMPT], [plan.max_tokens or 16], [("", "")]))

    def _read_clock(self) -> float:
        # as a real clock it shows a later time whenever it is read
        self.now_s += 1e-8
        return self.now_s

    def _tell(self, message: wire.Message) -> bool:
        self.told.append(message)
        return True

    @property
    def live(self) -> dict[str, Any]:
        return self.connections.live  # type: ignore[return-value]

    def advance(self, attempt_id: str, prefill: str, decode: str, tokens: int = 1) -> None:
        """Takes an attempt one step on: to its next stage, or by `tokens` tokens of each unfinished choice."""
        happens = self.connections._happens
        match self.live[attempt_id].stage:
            case Stage.QUEUED:
                happens(attempt_id, ev.RoutePrefill(prefill, colocated=False))
            case Stage.PREFILLING:
                happens(attempt_id, ev.PrefillDone(30.0, 1, 0, b"h"))
            case Stage.POOLED:
                happens(attempt_id, ev.RouteDecode(decode))
            case Stage.TRANSFERRING:
                happens(attempt_id, ev.Admitted())
            case _:
                made = self.generations[attempt_id]
                self.generate(attempt_id, [one.index for one in made if one.finish is None], tokens)

    def generate(self, attempt_id: str, choices: list[int], tokens: int) -> None:
        """Has the engine send `tokens` more tokens of each of `choices`, in one message."""
        made = {one.index: one for one in self.generations[attempt_id]}
        items = [made[index].step(attempt_id, tokens) for index in choices]
        self.connections._tokens(wire.Tokens(items))

    def lose(self, engine_id: str) -> None:
        """Has the connection to an engine end; it is up again at once."""
        self.connections._engine_lost(self.links[engine_id], "killed")  # type: ignore[arg-type]

    def fail(self, attempt_id: str, code: str) -> None:
        """Has the engine that works on an attempt answer a failure."""
        life = self.live[attempt_id]
        engine_id = life.decode_engine or life.prefill_engine
        task = "decode" if life.decode_engine else "prefill"
        message = wire.Failed(attempt_id, task, code, "as ordered", True)
        self.connections._from_engine(self.links[engine_id], message)  # type: ignore[arg-type]

    def unfit(self, engine_id: str, state: wire.EngineState) -> None:
        """Has the router call an engine unfit, and fit again."""
        link = self.links[engine_id]
        infos = [msgspec.structs.replace(link.info, state=state)]
        for info in self.connections._newly_unfit(infos):
            self.connections._engine_unfit(info)

    async def written(self) -> None:
        """Lets the loop write what is to be written."""
        await asyncio.sleep(0)

    def nothing_held(self) -> None:
        """Asserts that nothing is left of the exchange."""
        assert not self.live
        assert not any(link.live for link in self.links.values())
        assert self.connections.budgeted == 0
        assert len(self.connections.alarms) == 0

    @property
    def ended(self) -> list[RequestEnd]:
        """The ends of whole requests that the router was told of."""
        return [m.ended for m in self.told if isinstance(m, wire.Closed) and m.ended is not None]

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


async def story(data: st.DataObject, traces: Any = None) -> tuple[Play, dict[str, Any]]:
    """Returns one request after random failures in every stage, and its body. Between two failures its engines make
    some progress. It may have ended.
    """
    draw = data.draw
    n = draw(st.integers(1, 3), "n")
    stop = draw(st.sampled_from([[], ["END"], ["END", "crème brûlée; 日"], ["👩‍👧 and"]]), "stop")
    body = {"n": n, "stream": draw(st.booleans(), "stream"), "max_tokens": 500} | (
        {"stop": stop} if stop else {}
    )
    play = Play(FLEET, traces, **body)
    for _ in range(draw(st.integers(0, 60), "steps")):
        if not play.live:
            break
        attempt_id = draw(st.sampled_from(sorted(play.live)), "attempt")
        engines = draw(st.sampled_from([("p", "d"), ("q", "e")]), "engines")
        life = play.live[attempt_id]
        match draw(
            st.sampled_from(["go", "go", "go", "go", "lose", "fail", "unfit", "overdue", "write"]), "what"
        ):
            case "go":
                play.advance(attempt_id, *engines, tokens=draw(st.integers(1, 25), "tokens"))
            case "lose":
                play.lose(draw(st.sampled_from(sorted(FLEET)), "lost"))
            case "fail" if life.decode_engine or life.prefill_engine:
                play.fail(attempt_id, draw(st.sampled_from(["internal", "kv_load", "draining"]), "code"))
            case "unfit":
                state = draw(st.sampled_from(["stalled", "quarantined", "down", "draining"]), "state")
                play.unfit(draw(st.sampled_from(sorted(FLEET)), "engine"), state)  # type: ignore[arg-type]
            case "overdue" if life.stage is not Stage.QUEUED:
                play.now_s += 130.0
                life.wake(play.now_s)
            case _:
                await play.written()
        # an engine that dies is not laid at the request's door
        play.now_s += SUSPECT_S + 1
    return play, body


def finish(play: Play) -> None:
    """Brings everything that is open to its end, without another failure."""
    for _ in range(10):
        for attempt_id in list(play.live):
            play.advance(attempt_id, "q", "e", tokens=1000)
            play.now_s += 1.0
