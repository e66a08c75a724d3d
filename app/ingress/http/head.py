"""The rules for the head of a request that llhttp leaves to its user (RFC 9112), and the head of a refused upgrade."""

import re

from app.api.errors import ApiError

ONCE = frozenset({b"host", b"authorization", b"content-type", b"transfer-encoding", b"x-sluice-priority"})
"""Headers that a request has once at most. A proxy that looks at the first one, and a server that takes the last, would
disagree about such a request. llhttp itself refuses a second `content-length`.
"""

_HOST = re.compile(rb"[\w.~!$&'()*+,;=%:\[\]-]*")


def repeated_header(name: bytes) -> ApiError:
    """Returns the 400 of a request that has a header of `ONCE` more than once."""
    return ApiError(
        400, f"The request has more than one {name.decode()} header.", code="repeated_header", close=True
    )


def check_head(version: str, headers: dict[bytes, bytes]) -> None:
    """Raises `ApiError` 400 or 501 for a head whose host or framing is not valid; `headers` has lower-case names.

    Sources: RFC 9112, 3.2 (a request of HTTP/1.1 names one host) and 6.1 (a transfer coding that is not known is
    answered with 501, and HTTP/1.0 has none).
    """
    host = headers.get(b"host")
    if host is None:
        if version != "1.0":
            raise ApiError(400, "A request of HTTP/1.1 needs a Host header.", code="invalid_host")
    elif not _HOST.fullmatch(host):
        raise ApiError(400, "The Host header is not valid.", code="invalid_host")
    coding = headers.get(b"transfer-encoding")
    if coding is not None:
        if version == "1.0":
            raise ApiError(400, "HTTP/1.0 has no Transfer-Encoding.")
        if coding.strip().lower() != b"chunked":
            message = "The only Transfer-Encoding that this server reads is 'chunked'."
            raise ApiError(501, message, code="unknown_transfer_encoding")


def without_upgrade(method: bytes, url: bytes, version: str, headers: dict[bytes, bytes]) -> bytes:
    """Returns the head of the same request without its wish to change the protocol, which a server may ignore
    (RFC 9110, 7.8).
    """
    lines = [b"%s %s HTTP/%s\r\n" % (method, url, version.encode("ascii"))]
    for name, value in headers.items():
        if name == b"connection":
            options = [one.strip() for one in value.split(b",")]
            value = b", ".join(one for one in options if one.lower() != b"upgrade")
        if name != b"upgrade":
            lines.append(b"%s: %s\r\n" % (name, value))
    return b"".join(lines) + b"\r\n"
