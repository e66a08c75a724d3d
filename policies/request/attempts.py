"""The ids of attempts: an attempt's id is its request's id and a number that no other attempt of the ingress has."""


def attempt_id_of(request_id: str, number: int) -> str:
    """Returns the id of an attempt of `request_id`. The caller counts its attempts and passes the `number`."""
    return f"{request_id}-{number:x}"


def request_id_of(attempt_id: str) -> str:
    """Returns the id of the request that an attempt belongs to; an id of no attempt is returned unchanged."""
    return attempt_id.rpartition("-")[0] or attempt_id
