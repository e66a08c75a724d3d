"""The sampling parameters that a sim engine understands.

The sim engine's text is not sampled. Parameters that only shape probabilities (temperature, penalties, ...) are
therefore accepted without effect. Parameters that promise a form of output which the engine cannot produce are refused,
and so are unknown names.
"""

from collections.abc import Mapping
from typing import Any

from policies.engine_model.text import WORDS
from policies.record import record

MAX_CHOICES = 128
MAX_LOGPROBS = 20

_WITHOUT_EFFECT = frozenset({
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "skip_special_tokens",
})  # fmt: skip
_KNOWN = _WITHOUT_EFFECT | {
    "max_tokens", "min_tokens", "temperature", "seed", "stop", "stop_token_ids", "ignore_eos", "n", "logprobs",
    "prompt_logprobs", "response_format", "cache_salt",
}  # fmt: skip


class ParamError(Exception):
    """A parameter that the engine cannot serve; `param` names it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


@record
class SimParams:
    """Checked parameters of a request. With `max_tokens` None the answer may run to the end of the context."""

    max_tokens: int | None = None
    min_tokens: int = 0
    greedy: bool = False
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    cache_salt: str | None = None


def parse_params(params: Mapping[str, Any]) -> SimParams:
    """Returns the checked parameters. Raises ParamError that names the first one that is unknown, wrong or not
    supported.
    """
    for name in params:
        if name not in _KNOWN:
            raise ParamError(name, f"a sim engine does not support {name!r}")
    kind = (params.get("response_format") or {}).get("type", "text")
    if kind != "text":
        raise ParamError("response_format", f"a sim engine cannot produce {kind!r}: its text is synthetic")
    stop = params.get("stop") or ()
    if not (isinstance(stop, (list, tuple)) and all(isinstance(s, str) and s for s in stop)):
        raise ParamError("stop", "stop must be a list of strings that are not empty")
    ids = params.get("stop_token_ids") or ()
    if not (isinstance(ids, (list, tuple)) and all(type(i) is int for i in ids)):
        raise ParamError("stop_token_ids", "stop_token_ids must be a list of integers")
    salt = params.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and salt):
        raise ParamError("cache_salt", "cache_salt must be a text that is not empty")
    return SimParams(
        max_tokens=_integer(params, "max_tokens", None, 1, None),
        min_tokens=_integer(params, "min_tokens", 0, 0, None) or 0,
        greedy=params.get("temperature") == 0,
        seed=_integer(params, "seed", 0, None, None) or 0,
        stop=tuple(stop),
        stop_token_ids=frozenset(i for i in ids if 0 <= i < len(WORDS)),
        ignore_eos=bool(params.get("ignore_eos", False)),
        n=_integer(params, "n", 1, 1, MAX_CHOICES) or 1,
        logprobs=_integer(params, "logprobs", None, 0, MAX_LOGPROBS),
        prompt_logprobs=_integer(params, "prompt_logprobs", None, 0, MAX_LOGPROBS),
        cache_salt=salt,
    )


def _integer(
    params: Mapping[str, Any], name: str, default: int | None, least: int | None, most: int | None
) -> int | None:
    value = params.get(name)
    if value is None:
        return default
    if type(value) is not int:
        raise ParamError(name, f"{name} must be an integer, not {value!r}")
    if (least is not None and value < least) or (most is not None and value > most):
        bounds = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ParamError(name, f"{name} is {value}: it must be {bounds}")
    return value
