"""A bound on the structure of a large body, before any of it becomes Python objects.

Text costs little however long it is (4 MB are parsed in some 5 ms), but the parser holds the interpreter's lock for as
long as it makes objects, and no stream of the process moves meanwhile. What may come many times is counted first.
"""

from app.api.errors import bad_request

# ASSUMPTION for these: pydantic takes 1.2 us for an object, 0.6 us for a name, 0.2 us for a string and 0.1 us for a
# number (CPU time on the development machine), so that a body at one of these limits takes 0.1 to 0.2 s.
MAX_OBJECTS = 2**16
"""Objects and lists in a body. A conversation of 1,000 messages and 50 tools of 100 properties each has some 12,000."""
MAX_NAMES = 2**17
"""Names of fields in a body."""
MAX_STRINGS = 2**18
"""Strings in a body, names included."""
MAX_VALUES = 2**21
"""Values in a body; a prompt of 1 M token ids has as many."""


def check_structure(body: bytes, what: str = "The body has", param: str | None = None) -> None:
    """Raises `ApiError` 400 for JSON with too many parts. What is no JSON may pass, and the parser refuses it. The
    error's message begins with `what`, and `param` is the field at fault.
    """
    if _within(body, body.count(b'"')):
        return
    # exactly, without the text: first without escapes, of which one may hide a quote
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    quotes = plain.count(b'"')
    if quotes <= 2 * MAX_STRINGS and _within(b" ".join(plain.split(b'"')[::2]), quotes):
        return
    raise bad_request(
        f"{what} too many parts: at most {MAX_OBJECTS} objects and lists, {MAX_NAMES} names of fields, "
        f"{MAX_STRINGS} strings and {MAX_VALUES} values are read.",
        param,
        "body_too_complex",
    )


def _within(structure: bytes, quotes: int) -> bool:
    count = structure.count
    return (
        quotes <= 2 * MAX_STRINGS
        and count(b"{") + count(b"[") <= MAX_OBJECTS
        and count(b":") <= MAX_NAMES
        and count(b",") <= MAX_VALUES
    )
