"""Names of tenants as labels of metrics, of which there are at most a configured number."""

from collections.abc import Iterable

OTHER = "other"
"""The label of all tenants beyond the number."""


class TenantLabels:
    """The tenants that have a label of their own: the first `most` that are in the key file, in its order.

    A label that was given stays, because its counters stay; so replicas that saw the same file agree. `admin` (requests
    with an admin key) and `other` are beside the number.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._named: set[str] = set()

    def learn(self, tenants: Iterable[str]) -> None:
        """Gives labels to new tenants as long as there are any."""
        for tenant in tenants:
            if len(self._named) >= self._most:
                return
            self._named.add(tenant)

    def of(self, tenant: str) -> str:
        """Returns the label of a tenant."""
        return tenant if tenant in self._named or tenant == "admin" else OTHER
