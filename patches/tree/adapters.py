"""LoRA adapters: the namespaces their KV is in, and the names it has on the SSD.

SGLang appends an adapter's id to the namespace of a request (``Req.extra_key``). The id of an adapter given on the
command line is made of its name and path alone, so the SSD goes by a digest of its tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_evicpress.tiers.entry.identity import fingerprint

PRUNE_ABOVE = 1024  # known adapters: then those that are neither loaded nor in the tree are forgotten


class SsdScope(NamedTuple):
    """Scope that SSD paths are hashed behind: 16 bytes for the model with its adapter, and the caller's namespace."""

    model: bytes
    namespace: str | None


class Adapters:
    """The part of EvicPressCache that tells the KV of adapters apart. Everything here runs on the scheduler thread."""

    def open_adapters(self: Any) -> None:
        self.digest_adapter: Callable[[str], bytes | None] = lambda lora_id: None
        self.loaded_adapters: Callable[[], set[str]] = set
        self._adapters: dict[str, bytes | None] = {}  # by LoRA id; None: its KV may not be on the SSD
        self._id_lengths: set[int] = set()
        self._prune_above = PRUNE_ABOVE

    def know_adapters(self: Any) -> None:
        """Adapters were loaded: take the digest of those that are new, or came anew under a known id."""
        for lora_id in sorted(self.loaded_adapters()):
            self.know_adapter(lora_id)

    def know_adapter(self: Any, lora_id: str) -> None:
        """An adapter was loaded. One that differs from an earlier one of its id is kept off the SSD: the tree may hold
        KV of both."""
        digest = None if self.host is None else self.digest_adapter(lora_id)
        if lora_id in self._adapters and self._adapters[lora_id] != digest:
            digest = None
        self._note_adapter(lora_id, digest)

    def note_adapter_of(self: Any, req: Any) -> None:
        """A request came: an adapter that nobody saw being loaded is kept off the SSD."""
        if req.lora_id is not None and req.lora_id not in self._adapters:
            self._note_adapter(req.lora_id, None)

    def adapter_of(self: Any, namespace: str | None) -> str | None:
        """The LoRA id in a namespace; None: it is one of the base model."""
        ends = (namespace[-length:] for length in self._id_lengths) if namespace else ()
        return next((end for end in ends if end in self._adapters), None)

    def ssd_scope(self: Any, namespace: str | None) -> SsdScope | None:
        """Scope of a namespace's KV on the SSD; None: it must not be there."""
        lora_id = self.adapter_of(namespace)
        if namespace is None or lora_id is None:
            return SsdScope(self.identity, namespace)
        digest = self._adapters[lora_id]
        if digest is None:
            return None
        both = fingerprint({"model": self.identity.hex(), "adapter": digest.hex()})
        return SsdScope(both, namespace[: -len(lora_id)] or None)

    def may_reach_ssd(self: Any, node: Any) -> bool:
        """Is a node's KV told apart from all other on the SSD: text, of a model and adapter that are known?"""
        return bool(node.kv.is_text) and self.ssd_scope(node.key.extra_key) is not None

    def _note_adapter(self: Any, lora_id: str, digest: bytes | None) -> None:
        self._adapters[lora_id] = digest
        self._id_lengths.add(len(lora_id))
        if len(self._adapters) <= self._prune_above:
            return
        used = {self.adapter_of(node.key.extra_key) for node in self.root_node.children.values()}
        used |= {lora_id, *self.loaded_adapters()}
        self._adapters = {known: digest for known, digest in self._adapters.items() if known in used}
        self._prune_above = max(PRUNE_ABOVE, 2 * len(self._adapters))
