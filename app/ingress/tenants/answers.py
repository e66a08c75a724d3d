"""Answers about a client's key: OpenAI's errors and its `x-ratelimit-*` headers."""

import math

from app.api.errors import NOT_AGAIN, ApiError
from app.ingress.tenants.ledger import Meter, Meters, Refusal

Headers = list[tuple[bytes, bytes]]

_WORDS = {
    "requests": "requests per min (RPM)",
    "tokens": "tokens per min (TPM)",
    "parallel": "parallel sequences",
}


def no_key() -> ApiError:
    """Returns the 401 of a request without a key."""
    message = (
        "You didn't provide an API key. Send it in an Authorization header with Bearer auth "
        "(Authorization: Bearer YOUR_KEY)."
    )
    return ApiError(401, message, code="invalid_api_key")


def wrong_key(expired: bool = False) -> ApiError:
    """Returns the 401 of a request whose key is unknown or revoked, or `expired`."""
    message = (
        "This API key has expired: ask the operator for another one."
        if expired
        else "Incorrect API key provided: it is unknown or revoked. Ask the operator for another one."
    )
    return ApiError(401, message, code="invalid_api_key")


def limited(refusal: Refusal, meters: Meters) -> ApiError:
    """Returns the 429 of a request beyond a limit. One that will never fit tells OpenAI's clients not to try again."""
    limit, most, used, asked, wait_s = refusal
    if wait_s is None:
        message = f"Request too large for this API key on {_WORDS[limit]}: Limit {most}, Requested {asked}."
        headers = [*headers_of(meters), NOT_AGAIN]
    else:
        message = (
            f"Rate limit reached for this API key on {_WORDS[limit]}: Limit {most}, Used {used}, Requested {asked}. "
            f"Please try again in {duration(wait_s)}."
        )
        headers = headers_of(meters)
    return ApiError(
        429, message, code="rate_limit_exceeded", kind=limit, retry_after_s=wait_s, headers=headers
    )


def headers_of(meters: Meters) -> Headers:
    """Returns OpenAI's headers of the limits that there are."""
    return [*_of(b"requests", meters.requests), *_of(b"tokens", meters.tokens)]


def duration(seconds: float) -> str:
    """Returns a time as OpenAI writes it, rounded up: 20ms, 1s, 6m0s, 1h2m3s."""
    if seconds < 1:
        return f"{math.ceil(seconds * 1000)}ms"
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    shown = f"{hours}h" if hours else ""
    return shown + (f"{minutes}m" if hours or minutes else "") + f"{rest}s"


def _of(name: bytes, meter: Meter | None) -> Headers:
    if meter is None:
        return []
    return [
        (b"x-ratelimit-limit-" + name, b"%d" % meter.limit),
        (b"x-ratelimit-remaining-" + name, b"%d" % meter.left),
        (b"x-ratelimit-reset-" + name, duration(meter.reset_s).encode()),
    ]
