"""The id of an attempt: the id of its request, and a number that no other attempt of the same ingress has."""


def attempt_id_of(request_id: str, number: int) -> str:
    """The id of attempt `number`, counted by whoever makes it, of the request `request_id`."""
    return f"{request_id}-{number:x}"


def request_id_of(attempt_id: str) -> str:
    """The id of the request that an attempt belongs to; an id that names no attempt is returned as it is."""
    return attempt_id.rpartition("-")[0] or attempt_id
