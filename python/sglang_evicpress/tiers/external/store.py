"""The external store as one server uses it."""

from __future__ import annotations

from collections.abc import Callable

from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.external.circuit import Circuit
from sglang_evicpress.tiers.external.entries import SharedEntries
from sglang_evicpress.tiers.external.gain import LookupGain
from sglang_evicpress.tiers.external.values import Values
from sglang_evicpress.tiers.ssd.deadline import within
from sglang_evicpress.tiers.ssd.folder import StoreError

OPEN_S = 60.0
"""An engine is waited for so long at the start; some look for their peers first."""
CLOSE_S = 2.0


class ExternalStore:
    """Its entries, how it is, and what lookups have brought. ``is_paused``: nothing goes there or comes from it, as
    the tree may hold KV of several models. ``published_bytes`` and ``read_bytes`` count payloads."""

    def __init__(self, values: Values, key: Key | None = None) -> None:
        self.name = values.name
        self.circuit = Circuit(values.name)
        self.entries = SharedEntries(values, self.circuit, key)
        self.gain = LookupGain()
        self.is_paused = False
        self.published_bytes = self.read_bytes = 0

    @classmethod
    def open(cls, open_values: Callable[[], Values], key: Key | None) -> ExternalStore:
        """The store of an engine. Raises ValueError, one sentence, when that cannot be used."""
        try:
            return cls(within(OPEN_S, "the external store", open_values, undo=lambda values: values.close()), key)
        except StoreError as error:
            raise ValueError(f"{error}: expected an engine that runs") from None

    @property
    def may_read(self) -> bool:
        return not self.is_paused and self.circuit.may_read

    @property
    def may_write(self) -> bool:
        return not self.is_paused and self.circuit.may_write

    def close(self) -> bool:
        """False when the engine does not let go in time; it is not waited for."""
        try:
            within(CLOSE_S, "the external store", self.entries.close)
        except (StoreError, OSError):
            return False
        return True
