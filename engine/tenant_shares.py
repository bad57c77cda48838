"""Which tenant's turn it is: virtual time, charged in tokens.

The virtual token counter of Sheng et al. ("Fairness in Serving Large Language Models", OSDI 2024): every token computed
for a tenant moves its clock on by one over its weight, and whoever is furthest behind goes first. Two tenants that
both always have work thus get tokens in proportion to their weights. A tenant that comes back from a pause starts at
the clock of the one furthest behind: idle time is not saved up.
"""

from __future__ import annotations


class TenantShares:
    """The clocks of all tenants that have open sequences, and of those that had some since the engine was last idle."""

    def __init__(self) -> None:
        self._clocks: dict[str, float] = {}
        self._weights: dict[str, int] = {}
        self._num_open: dict[str, int] = {}

    def open(self, tenant: str, weight: int) -> None:
        """A sequence of this tenant has come in."""
        if tenant not in self._num_open:
            behind = min((self._clocks[other] for other in self._num_open), default=0.0)
            self._clocks[tenant] = max(self._clocks.get(tenant, 0.0), behind)
        self._num_open[tenant] = self._num_open.get(tenant, 0) + 1
        self._weights[tenant] = weight

    def close(self, tenant: str) -> None:
        """A sequence of this tenant has ended."""
        self._num_open[tenant] -= 1
        if not self._num_open[tenant]:
            del self._num_open[tenant]
        if not self._num_open:  # nobody to be fair to
            self._clocks.clear()
            self._weights.clear()

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Tokens are computed for this tenant, which has an open sequence."""
        self._clocks[tenant] += num_tokens / self._weights[tenant]

    def clock(self, tenant: str) -> float:
        """The tenant's virtual time; the least goes first."""
        return self._clocks[tenant]
