"""Workloads generated from distributions, for use without traces and in place of traces that are not published.

A `Synthetic` says when requests (or sessions) start, how long prompts and outputs are, and what recurs or is shared.
Times, lengths and contents come from three separate random generators, so a change of the rate changes no length
(unless there are sessions). Requests are streamed, and the same seed gives the same requests. Clients and recurring
prompts do not depend on the seed, so a length predictor that was fitted on one seed also fits every other seed.

A length is made from a uniform number in [0, 1) by the inverse of its distribution (`lengths`). Some parts of a
`Synthetic` choose that uniform; "moved by `spread`" means that a normal number of that deviation is added and the sum
is reflected at 0 and 1.

- clients: each client owns an interval of [0, 1) as wide as its share of the requests. An output's uniform names the
  client, and is then moved by `spread`. The distribution over all requests stays exact, and the client is a hint at the
  output length, as in ServeGen.
- recurrence: a share of the requests sends one of a set of fixed prompts. A prompt's outputs lie near one quantile in
  the same way, so a predictor by exact match can learn them, as on BalanceRoute's proprietary data.
- sessions: turns of one conversation repeat and extend its prompt. Their prompt lengths lie near one quantile
  (`spread`) and are sorted within the session, which keeps the distribution over all requests.
- sharing: prompts begin with one of a set of shared texts (`prefixes.Sharing`).
- corpus: a prompt is a system text, then documents drawn by popularity, the most popular first, then a question (RAG).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

import numpy as np

from benchmarks.workloads.arrivals import Arrivals, Diurnal
from benchmarks.workloads.lengths import Lengths
from benchmarks.workloads.prefixes import Segment, Sharing, block_hashes, mix, zipf_weights
from benchmarks.workloads.record import WorkloadError, WorkloadRequest
from predictors.protocol import FloatArray

# One number for each kind of content, which goes into its hashes: texts of two kinds are never equal.
_SESSION, _PROMPT, _GROUP, _OWN, _DOCUMENT = (
    11,
    12,
    13,
    14,
    15,
)
# Seed of the draw that says which clients and which recurring prompts have long outputs.
_POPULATION = 1


@dataclass(frozen=True, slots=True)
class Clients:
    """A population of `clients` clients with Zipf popularity.

    `spread` is the standard deviation by which an output's uniform is moved after it has chosen the client.
    """

    clients: int
    zipf: float = 1.0
    spread: float = 0.25


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Recurring prompts: a share `p_recur` of the requests sends one of `prompts` fixed prompts of Zipf popularity.

    `spread` is the standard deviation between an output's uniform and the uniform that chose its prompt.
    """

    p_recur: float
    prompts: int
    zipf: float = 0.5
    spread: float = 0.02


@dataclass(frozen=True, slots=True)
class Sessions:
    """Conversations: a share `follow_up` (< 1) of all requests are second or later turns of a session.

    The gap between two turns is lognormal with median `gap_median_s` and deviation `gap_sigma` of its logarithm.
    `spread` is the standard deviation between the quantile of a turn's prompt length and the quantile of its session.
    """

    follow_up: float
    gap_median_s: float
    gap_sigma: float = 1.0
    spread: float = 0.15


@dataclass(frozen=True, slots=True)
class Corpus:
    """A document collection for retrieval: a prompt has a shared system text, documents, then a question.

    For each request `per_request` of the `documents` are drawn by Zipf popularity; a document drawn twice appears once.
    """

    documents: int
    per_request: int
    document_tokens: int
    system_tokens: int = 512
    zipf: float = 1.0


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A generated workload. `arrivals.rate_per_s` is the rate of requests, also where they form sessions."""

    name: str
    arrivals: Arrivals
    prompt: Lengths
    output: Lengths
    clients: Clients | None = None
    recurrence: Recurrence | None = None
    sessions: Sessions | None = None
    sharing: Sharing | None = None
    corpus: Corpus | None = None
    block_tokens: int = 512

    def __post_init__(self) -> None:
        if self.sessions is not None and not 0.0 <= self.sessions.follow_up < 1.0:
            raise WorkloadError(f"follow_up {self.sessions.follow_up} must lie in [0, 1)")
        if self.recurrence is not None and not 0.0 <= self.recurrence.p_recur <= 1.0:
            raise WorkloadError(f"p_recur {self.recurrence.p_recur} must lie in [0, 1]")
        if self.sessions is not None and (self.recurrence or self.corpus):
            raise WorkloadError("sessions do not go with recurring prompts or with a corpus; choose one")

    def stream(self, seed: int) -> Iterator[WorkloadRequest]:
        """Yields requests without end, in order of time."""
        times, lengths, content = (np.random.default_rng((seed, i)) for i in range(3))
        maker = _Maker(self, lengths, content)
        moments = self._moments(times) if self.sessions else ((t, None) for t in self.arrivals.times(times))
        for number, (at_s, turn) in enumerate(moments):
            yield maker.request(number, at_s, turn)

    def _moments(self, rng: np.random.Generator) -> Iterator[tuple[float, tuple[int, int, int]]]:
        """Yields (time in seconds, (session, turn from 0, number of turns)) of all turns from time 0 on.

        Sessions begin some time before 0, so that the mix of turns is in its steady state at 0.
        """
        sessions = self.sessions
        assert sessions is not None
        # Each arrival starts a session with probability 1 - follow_up, and a session has 1 / (1 - follow_up) turns on
        # average, so the rate of requests is the rate of `arrivals`. Sessions start to arrive 20 mean gaps before 0.
        lead_s = 20.0 * sessions.gap_median_s * math.exp(sessions.gap_sigma**2 / 2.0)
        # A lead of a whole number of periods keeps the phase of a periodic rate at time 0.
        if isinstance(self.arrivals, Diurnal):
            lead_s = math.ceil(lead_s / self.arrivals.period_s) * self.arrivals.period_s
        waiting: list[tuple[float, int, int, int]] = []
        session = count()
        for raw_s in self.arrivals.times(rng):
            at_s = raw_s - lead_s
            while waiting and waiting[0][0] <= at_s:
                due_s, which, turn, turns = heapq.heappop(waiting)
                if due_s >= 0.0:
                    yield due_s, (which, turn, turns)
            if rng.random() < sessions.follow_up:
                continue
            which, turns = next(session), int(rng.geometric(1.0 - sessions.follow_up))
            gaps_s = sessions.gap_median_s * np.exp(sessions.gap_sigma * rng.standard_normal(turns - 1))
            for turn, offset_s in enumerate((0.0, *np.cumsum(gaps_s).tolist())):
                heapq.heappush(waiting, (at_s + offset_s, which, turn, turns))


class _Maker:
    """Draws the client, the lengths and the content of each request, in the order of arrival."""

    def __init__(self, model: Synthetic, lengths: np.random.Generator, content: np.random.Generator) -> None:
        self._model = model
        self._lengths = lengths
        self._content = content
        self._sessions: dict[int, list[int]] = {}
        self._spread = model.sessions.spread if model.sessions else 0.0
        clients, recurrence = model.clients, model.recurrence
        population = np.random.default_rng(_POPULATION)
        self._clients = None if clients is None else _Owners(clients.clients, clients.zipf, population)
        self._prompts = (
            None if recurrence is None else _Owners(recurrence.prompts, recurrence.zipf, population)
        )
        self._prompt_u = (
            None if recurrence is None else _Owners(recurrence.prompts, recurrence.zipf, population).middle
        )
        self._group_ends = (
            None if model.sharing is None else zipf_weights(model.sharing.groups, model.sharing.zipf)
        )
        corpus = model.corpus
        self._document_ends = None if corpus is None else zipf_weights(corpus.documents, corpus.zipf)

    def request(self, number: int, at_s: float, turn: tuple[int, int, int] | None) -> WorkloadRequest:
        model = self._model
        prompt_u, output_u, near = (
            self._lengths.random(),
            self._lengths.random(),
            self._lengths.standard_normal(),
        )
        client = recurring = None
        if self._clients is not None and model.clients is not None:
            client = self._clients.of(output_u)
            output_u = _reflected(output_u + model.clients.spread * near)
        if self._prompts is not None and model.recurrence is not None and self._prompt_u is not None:
            again, recurring_u = self._content.random(2).tolist()
            if again < model.recurrence.p_recur:
                recurring = self._prompts.of(recurring_u)
                prompt_u = float(self._prompt_u[recurring])
                output_u = _reflected(recurring_u + model.recurrence.spread * near)
        prompt = self._turn_tokens(turn) if turn is not None else _one(model.prompt, prompt_u)
        segments = self._segments(number, prompt, turn, recurring)
        prompt = sum(tokens for _, tokens in segments)
        if turn is not None and turn[1] == turn[2] - 1:
            del self._sessions[turn[0]]
        return WorkloadRequest(
            request_id=f"{model.name}:{number}",
            at_s=at_s,
            prompt_tokens=prompt,
            output_tokens=_one(model.output, output_u),
            block_hashes=block_hashes(segments, model.block_tokens),
            block_tokens=model.block_tokens,
            client="" if client is None else f"client-{client}",
            session="" if turn is None else f"session-{turn[0]}",
            prompt_key="" if recurring is None else f"prompt-{recurring}",
        )

    def _segments(
        self, number: int, prompt: int, turn: tuple[int, int, int] | None, recurring: int | None
    ) -> list[Segment]:
        model = self._model
        if recurring is not None:
            return [(mix(_PROMPT, recurring), prompt)]
        if model.corpus is not None:
            return self._retrieved(model.corpus, number, prompt)
        own = mix(_OWN, number) if turn is None else mix(_SESSION, turn[0])
        head = self._head(model.sharing, prompt, turn)
        return [*head, (own, prompt - sum(tokens for _, tokens in head))]

    def _head(self, sharing: Sharing | None, prompt: int, turn: tuple[int, int, int] | None) -> list[Segment]:
        """Returns the segment of the shared text that begins the prompt, or an empty list where none does.

        All turns of a session begin with the same text, whose length is a share of the first turn's prompt.
        """
        if sharing is None:
            return []
        rng = self._content if turn is None else np.random.default_rng((_SESSION, turn[0]))
        shares, cover = rng.random(2).tolist()
        group = self._pick(self._group_ends, rng)
        if shares >= sharing.p_share or group is None:
            return []
        low, high = sharing.covered
        base = prompt if turn is None else self._sessions[turn[0]][0]
        return [(mix(_GROUP, group), int(base * (low + (high - low) * cover)))]

    def _retrieved(self, corpus: Corpus, number: int, question: int) -> list[Segment]:
        picks = self._content.random(corpus.per_request)
        assert self._document_ends is not None
        documents = sorted(set(np.searchsorted(self._document_ends, picks, side="right").tolist()))
        found = [(mix(_DOCUMENT, document), corpus.document_tokens) for document in documents]
        return [(mix(_GROUP, 0), corpus.system_tokens), *found, (mix(_OWN, number), question)]

    def _turn_tokens(self, turn: tuple[int, int, int]) -> int:
        """Returns the prompt length of a turn in tokens.

        The lengths of all turns of a session are drawn when its first turn is seen, and are kept until `request` has
        made the last.
        """
        session, at, turns = turn
        if session not in self._sessions:
            rng = np.random.default_rng((int(self._lengths.integers(1 << 62)), session))
            u = rng.random() + self._spread * rng.standard_normal(turns)
            drawn = self._model.prompt.quantile(np.array([_reflected(one) for one in u.tolist()]))
            self._sessions[session] = np.sort(drawn).tolist()
        return self._sessions[session][at]

    def _pick(self, ends: FloatArray | None, rng: np.random.Generator | None = None) -> int | None:
        if ends is None:
            return None
        return int(np.searchsorted(ends, (rng or self._content).random(), side="right"))


def _one(lengths: Lengths, u: float) -> int:
    return int(lengths.quantile(np.array([u]))[0])


class _Owners:
    """A division of [0, 1) among `size` owners, numbered by rank.

    The owners lie in random order, and each has an interval as wide as its Zipf share. `middle` (size,) holds the
    middle of each owner's interval.
    """

    def __init__(self, size: int, zipf: float, rng: np.random.Generator) -> None:
        shares = np.diff(zipf_weights(size, zipf), prepend=0.0)
        self._order = rng.permutation(size)
        self._ends = np.cumsum(shares[self._order])
        self.middle = np.empty(size)
        self.middle[self._order] = self._ends - shares[self._order] / 2.0

    def of(self, u: float) -> int:
        """Returns the number of the owner whose interval contains `u`."""
        return int(self._order[min(int(np.searchsorted(self._ends, u, side="right")), self._order.size - 1)])


def _reflected(u: float) -> float:
    """Returns `u` reflected at 0 and 1 until it lies in [0, 1)."""
    folded = u % 2.0
    return min(folded if folded < 1.0 else 2.0 - folded, math.nextafter(1.0, 0.0))
