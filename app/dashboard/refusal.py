"""The one error of the dashboard's HTTP API."""


class Refusal(Exception):
    """A request is not done. The message says why and what to do; `status` is the HTTP status of the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
