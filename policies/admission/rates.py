"""Service rates of the workers, measured from what they have done, never from what they were expected to do.

`Rates.look` is called at the dispatcher's ticks. It compares the totals of each worker's work (`Work`) with those of
the look before. A rate is a sum of seconds over a sum of work; both fade with a half-life of `HALF_LIFE_S`, and only
while there is work, so that an idle worker keeps the rates that it had.

    prompt_token_s    seconds with a prompt in work / tokens of the prompts computed; cached tokens count as computed,
                      so that hits make a worker faster
    token_s           seconds of all sequences that decode / tokens generated
    start_s           seconds from the choice of a decode worker to its slot and the KV / sequences
    first_s           seconds from there to the first token / sequences; on a colocated worker from the choice of the
                      worker, and for each token of the prompt

The time of a token grows with the sequences that a worker decodes at once: token_s = a + b * sequences, a line through
the looks at all decode workers of a kind (least squares, b >= 0). Where that gives a <= 0, token_s is in proportion to
the sequences below their mean, because no token takes no time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from policies.state.standing import Work
from policies.state.views import Role, WorkerId

HALF_LIFE_S = 10.0  # ASSUMPTION: several answers end in it, and a change of the load shows within it
LEAST_SPREAD = 0.25
"""Least variance of the sequences of a worker over the looks for which a line is fitted. ASSUMPTION."""


@dataclass(slots=True)
class Rate:
    """Seconds for each unit of work, both as sums that fade."""

    seconds: float = 0.0
    work: float = 0.0

    def add(self, seconds: float, work: float, kept: float) -> None:
        """Adds what one look has found, after both sums have faded to the share `kept`."""
        if seconds > 0 or work > 0:
            self.seconds = kept * self.seconds + max(0.0, seconds)
            self.work = kept * self.work + max(0.0, work)

    @property
    def value(self) -> float | None:
        """Seconds for each unit of work; None before any work was done."""
        return self.seconds / self.work if self.work > 0 else None


@dataclass(slots=True)
class Line:
    """A line through points (x, y) of weights w, by sums that fade."""

    w: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float, w: float, kept: float) -> None:
        """Adds one point, after the sums have faded to the share `kept`."""
        self.w = kept * self.w + w
        self.x = kept * self.x + w * x
        self.y = kept * self.y + w * y
        self.xx = kept * self.xx + w * x * x
        self.xy = kept * self.xy + w * x * y

    @property
    def slope(self) -> float:
        """The slope, at least 0; 0 where the points lie too close together to tell."""
        if not self.w:
            return 0.0
        spread = self.xx / self.w - (self.x / self.w) ** 2
        if spread < LEAST_SPREAD:
            return 0.0
        return max(0.0, (self.xy / self.w - self.x * self.y / self.w**2) / spread)

    def at(self, x: float) -> float | None:
        """Returns y at x; None without a point. A line that would reach 0 before x does is left below the mean of the
        points: there y is in proportion to x, and at x < 1 the same as at 1, so that it is above 0.
        """
        if not self.w:
            return None
        mean_x, mean_y, slope = self.x / self.w, self.y / self.w, self.slope
        if x < mean_x and mean_y <= slope * mean_x:
            return mean_y * max(1.0, x) / max(1.0, mean_x)
        return mean_y + slope * (x - mean_x)


@dataclass(slots=True)
class WorkerRates:
    """The rates of one worker."""

    prompt_token: Rate = field(default_factory=Rate)
    token: Rate = field(default_factory=Rate)
    start: Rate = field(default_factory=Rate)
    first: Rate = field(default_factory=Rate)


class Rates:
    """The rates of all workers, and for each role that decodes the time of a token by the sequences of a worker."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, WorkerRates] = {}
        self.lines: dict[Role, Line] = {}
        self._seen: dict[WorkerId, Work] = {}
        self._at_s: float | None = None

    def look(self, works: Mapping[WorkerId, tuple[Role, Work]], now_s: float) -> None:
        """Takes in the totals of all workers at `now_s`. Workers that are gone are forgotten."""
        passed_s = 0.0 if self._at_s is None else now_s - self._at_s
        self._at_s = now_s
        for worker in [worker for worker in self.workers if worker not in works]:
            del self.workers[worker]
        if passed_s > 0:
            kept = 0.5 ** (passed_s / HALF_LIFE_S)
            # the line has a point of each worker at each look, and fades once a look
            fresh = dict.fromkeys(self.lines, kept)
            for worker, (role, work) in works.items():
                before = self._seen.get(worker)
                # fewer than before: the worker has gone and come back
                if before is not None and before.generated_tokens <= work.generated_tokens:
                    self._add(worker, role, work.since(before), passed_s, kept, fresh)
        self._seen = {worker: work for worker, (_, work) in works.items()}

    def _add(
        self, worker: WorkerId, role: Role, done: Work, passed_s: float, kept: float, fresh: dict[Role, float]
    ) -> None:
        rates = self.workers.setdefault(worker, WorkerRates())
        rates.prompt_token.add(done.prompt_s, done.prompt_tokens, kept)
        rates.token.add(done.decoding_s, done.generated_tokens, kept)
        rates.start.add(done.start_s, done.starts, kept)
        rates.first.add(done.first_s, done.firsts, kept)
        if done.generated_tokens > 0 and done.decoding_s > 0 and role is not Role.PREFILL:
            line = self.lines.setdefault(role, Line())
            sequences = done.decoding_s / passed_s
            each_s = done.decoding_s / done.generated_tokens
            line.add(sequences, each_s, float(done.generated_tokens), fresh.pop(role, 1.0))
