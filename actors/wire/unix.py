"""The user at the other end of a unix socket: the kernel names it, so no other user can pass for a process of ours."""

import os
import socket
import struct

_CREDENTIALS = struct.Struct("3i")
"""Process, user and group, as Linux gives them (`struct ucred` of unix(7))."""


def stranger(connection: socket.socket) -> int | None:
    """Returns the user id of the process at the other end of a connected unix socket if it is not this process's own,
    else None: also for another kind of socket, and where the platform does not tell.
    """
    if connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return None
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    user = int(_CREDENTIALS.unpack(found)[1])
    return None if user == os.geteuid() else user
