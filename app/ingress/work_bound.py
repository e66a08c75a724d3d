"""The bound on the prompts that one ingress replica has under way: on their sequences, and on the bytes they take.

A request has a sequence for each choice of each of its prompts. Its prompts are kept from their arrival to the end of
its answer, because another engine may have to compute them again. So are its options, which may be larger than they: a
schema, a list of biases, or the whole body where engines parse the answer by it.

Tenants (an API key's, else a user or an address) share the bytes: the last part (`KEPT_PART`) is for a tenant that
holds nothing else, or no more than an equal share of all bytes among the tenants that hold any and one to come. So one
tenant's long prompts, which may wait for long, leave room for the first ones of others.
"""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from app.api.errors import ApiError, bad_request

TOKEN_BYTES = 48
"""Bytes of a token of a prompt: 8 in the list, 32 for the number (28, in steps of 16), and 8 for the messages that take
it to engines, which have 5 bytes a token, and to the router. CPython keeps no objects for numbers above 256."""

SMALL_PART = 2**14
"""The part of the bound on bytes that any request may take, whatever the others hold: 64 KiB of the default 1 GiB. Few
long prompts, which wait in the queue for their turn, would otherwise keep all other requests out. The limit on requests
under way bounds the sum: the 4,096 of `max_in_flight` take a quarter of the bound beside it.
"""

KEPT_PART = 4
"""The part of the bytes, a fourth, that is kept for tenants which hold little. ASSUMPTION: few tenants come at once."""


class Held(NamedTuple):
    """The sequences and bytes that a request has under way."""

    sequences: int = 0
    n_bytes: int = 0


NOTHING = Held()


def held_of(
    prompts: Sequence[str | list[int]], tokens: Sequence[list[int]], n: int, kept_bytes: int = 0
) -> Held:
    """Returns what a request of these prompts holds, each with `n` choices; `tokens` are those that are known, and
    `kept_bytes` what is kept beside them (`Plan.kept_bytes`).
    """
    ids = list(tokens) or [prompt for prompt in prompts if not isinstance(prompt, str)]
    texts = sum([sys.getsizeof(prompt) for prompt in prompts if isinstance(prompt, str)])
    # the prompt of a conversation may not be rendered yet
    return Held(max(1, len(prompts)) * n, texts + TOKEN_BYTES * sum(map(len, ids)) + kept_bytes)


class WorkBound:
    """Counts what all requests hold, and refuses what goes beyond `most_sequences` or `most_bytes`. Small requests
    (`SMALL_PART`) are not refused for the bytes.
    """

    def __init__(self, most_sequences: int, most_bytes: int) -> None:
        self._most_sequences, self._most_bytes = most_sequences, most_bytes
        self.sequences = 0
        """Sequences under way."""
        self.n_bytes = 0
        """Bytes of the prompts under way."""
        self._by_tenant: dict[str, int] = {}

    def check(self, asked: Held, before: Held = NOTHING, tenant: str = "") -> None:
        """Raises ApiError if a request of `tenant` may not hold `asked` instead of `before`: 400 if it never may, else
        429 for the sequences and 503 for the bytes.
        """
        if asked.sequences > self._most_sequences:
            message = (
                f"The request has {asked.sequences} sequences (prompts x n); this server takes"
                f" {self._most_sequences} at once (ingress.options.max_sequences). Send several requests."
            )
            raise bad_request(message, "n", "request_too_costly")
        if asked.n_bytes > self._most_bytes:
            message = (
                f"The request's prompts and options take {asked.n_bytes} bytes; this server has {self._most_bytes} for"
                " all (ingress.options.max_prompt_bytes). Send several requests, or shorter ones."
            )
            raise bad_request(message, "prompt", "request_too_costly")
        if asked.sequences > before.sequences and (
            self.sequences - before.sequences + asked.sequences > self._most_sequences
        ):
            message = f"This replica has {self.sequences} sequences under way already; try again later."
            raise ApiError(429, message, code="too_many_sequences", retry_after_s=1.0)
        large = asked.n_bytes > max(before.n_bytes, self._most_bytes // SMALL_PART)
        if large and not self._fits(asked.n_bytes, before.n_bytes, tenant):
            message = f"The requests under way here take {self.n_bytes} bytes; try again later."
            raise ApiError(503, message, code="prompt_memory", retry_after_s=1.0)

    def _fits(self, asked: int, before: int, tenant: str) -> bool:
        own = self._by_tenant.get(tenant, 0) - before
        total = self.n_bytes - before + asked
        if total <= self._most_bytes - self._most_bytes // KEPT_PART or own <= 0:
            return total <= self._most_bytes
        # itself, the others that hold bytes, and one to come
        sharing = len(self._by_tenant.keys() | {tenant}) + 1
        return total <= self._most_bytes and own + asked <= self._most_bytes // sharing

    def change(self, before: Held, now: Held, tenant: str = "") -> None:
        """Counts that a request of `tenant` holds `now` instead of `before`."""
        self.sequences += now.sequences - before.sequences
        self.n_bytes += now.n_bytes - before.n_bytes
        held = self._by_tenant.pop(tenant, 0) + now.n_bytes - before.n_bytes
        if held:
            self._by_tenant[tenant] = held
