"""Digests are all that leaves the ingress of a client's names. Their salt is shared by all ingress replicas of one
application, so that equal names are equal at router and predictors and in journals, and nobody without the salt can
test a guess against them.

Where the wire has a secret, the salt is derived from that. Without one all processes are on one node, and its replicas
of one port share a random key in a file beside the admin key. The port is part of the salt, so two applications have
different digests also where they share a secret.
"""

import hashlib
import hmac

from app.admin_key import KeyFile
from predictors.text import digest


def salt_of_application(port: int, secret: bytes | None) -> bytes:
    """Returns the salt of the ingress replicas whose public port is `port`, with the wire's `secret` if there is one.

    Raises KeyFileError if there is no secret, and the file cannot be kept.
    """
    shared = secret or KeyFile(port, name="digest salt").take().encode()
    return hmac.new(shared, b"sluice digests %d" % port, hashlib.sha256).digest()


def session_digest(session: str, salt: bytes) -> str:
    """Returns the digest by which a session is known outside the ingress; "" stays "". A user of the same name has
    another one.
    """
    return digest(f"session\0{session}", salt) if session else ""
