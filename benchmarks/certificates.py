"""The certificates of servers that commands reach by an address, while the certificates are for names.

The dashboard reaches the ingress and itself at an address of this machine. It tells its commands which certificate each
of these servers has: SLUICE_SERVER_CERTS is JSON of the form {URL: FILE}. From such a server this certificate is taken,
whatever name it bears and whoever signed it, and no other one. Every other server is judged as usual.
"""

from __future__ import annotations

import json
import os
import ssl
from urllib.parse import urlsplit

import httpx

from sluice import SluiceError

VARIABLE = "SLUICE_SERVER_CERTS"
_BEGIN, _END = "-----BEGIN CERTIFICATE-----", "-----END CERTIFICATE-----"


def pinned(url: str | None) -> ssl.SSLContext | None:
    """Returns the settings with which the server at `url` is reached over TLS; None where none was told of it.

    Raises SluiceError for what cannot be used.
    """
    given = os.environ.get(VARIABLE)
    if not given or url is None or not url.startswith("https://"):
        return None
    try:
        files = {_server(one): str(file) for one, file in json.loads(given).items()}
    except (ValueError, AttributeError) as error:
        raise SluiceError(f"{VARIABLE} is no JSON of the form {{URL: FILE}}: {error}") from error
    file = files.get(_server(url))
    return None if file is None else _only(file)


def client(url: str | None) -> httpx.Client | None:
    """Returns a client for a server of which a certificate was told; None for one that the SDK reaches by itself."""
    context = pinned(url)
    return None if context is None else httpx.Client(verify=context, trust_env=False)


def _server(url: str) -> tuple[str | None, int]:
    parts = urlsplit(url)
    return parts.hostname, parts.port or 443


def _only(file: str) -> ssl.SSLContext:
    """Returns settings that take the first certificate of `file` alone: the others there have signed more than it."""
    try:
        with open(file, encoding="ascii", errors="replace") as opened:
            text = opened.read()
        start = text.index(_BEGIN)
        leaf = text[start : text.index(_END, start)] + _END
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        # without this flag OpenSSL ends a chain only at a certificate that has signed itself
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        context.load_verify_locations(cadata=leaf)
    except (OSError, ValueError) as error:
        raise SluiceError(f"the certificate {file} cannot be used: {error}") from error
    return context
