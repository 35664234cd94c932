"""Floors of quality: the least that a request may be served of the tree, by what it asks for and whose it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_evicpress.asked_quality import least_quality
from sglang_evicpress.patches.tree.namespaces import salt_of
from sglang_evicpress.patches.tree.types import SamplingParams
from sglang_evicpress.tenants import Tenant


class Asking(Protocol):
    """A request, as far as it says what it may be served."""

    extra_key: str | None
    sampling_params: SamplingParams


class QualityFloors:
    """Floors of requests and of namespaces; 0 is none, 1 is exact KV only."""

    def __init__(self, tenants: Sequence[Tenant]) -> None:
        self._by_salt = {tenant.cache_salt: tenant.least_quality for tenant in tenants}
        self.has_fractions = any(0.0 < quality < 1.0 for quality in self._by_salt.values())

    def of_namespace(self, extra_key: str | None) -> float:
        """The floor of the tenant whose requests have this key."""
        return self._by_salt.get(salt_of(extra_key), 0.0) if self._by_salt else 0.0

    def of_request(self, req: Asking) -> float:
        """The higher one of what it asks for and of its tenant's."""
        return max(least_quality(req.sampling_params.custom_params), self.of_namespace(req.extra_key))
