"""The shared secret and the folder of certificates that a process of the wire finds in its environment.

The configuration may name another variable and another folder. The processes that the application starts know no
configuration, so it puts both where they look.
"""

import os

from actors.wire.channel import Identity
from actors.wire.frames import PeerKind
from actors.wire.tls import VARIABLE, WireTls

SECRET = "SLUICE_WIRE_SECRET"


def secret_of_environment(variable: str = SECRET) -> bytes | None:
    """Returns the shared secret, or None without one."""
    return os.environ.get(variable, "").encode() or None


def identity_of_environment(kind: PeerKind, name: str) -> Identity:
    """Returns the identity of this process with secret and certificates of its environment. Raises OSError for
    certificates that cannot be used.
    """
    return Identity(kind, name, secret_of_environment(), tls=WireTls.of_environment())


def hand_down(secret: bytes | None, tls_folder: str | None) -> None:
    """Puts secret and folder into the environment, where processes that this one starts look for them. What is None is
    not there afterwards.
    """
    for variable, value in ((SECRET, None if secret is None else secret.decode()), (VARIABLE, tls_folder)):
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value
