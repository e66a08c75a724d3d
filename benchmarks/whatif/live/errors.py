"""Why a running application cannot be described."""


class FromLiveError(Exception):
    """The application cannot be described; the message says why, and what to do."""
