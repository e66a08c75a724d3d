"""What is wrong with a workload."""


class WorkloadError(Exception):
    """A workload that cannot be built as asked; the message says what to change."""
