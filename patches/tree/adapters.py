"""LoRA adapters: the namespaces their KV is in, and the names it has on the SSD.

SGLang appends an adapter's id to the namespace of a request (``Req.extra_key``). The id of an adapter given on the
command line is made of its name and path alone, so the SSD goes by a digest of its tensors instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.tiers.entry.identity import fingerprint

PRUNE_ABOVE = 1024  # known adapters: then those that are neither loaded nor in the tree are forgotten


class SsdScope(NamedTuple):
    """Scope that SSD paths are hashed behind: 16 bytes for the model with its adapter, and the caller's namespace."""

    model: bytes
    namespace: str | None


class Adapters:
    """Tells the KV of adapters apart. ``identity``: of the model now. ``namespaces``: those at the top of the tree;
    ``has_tiers``: whether KV can be on the SSD at all."""

    def __init__(self, identity: bytes, namespaces: Callable[[], Iterable[str | None]], *, has_tiers: bool) -> None:
        self.identity = identity
        self._namespaces = namespaces
        self._has_tiers = has_tiers
        self._digest: Callable[[str], bytes | None] = lambda lora_id: None
        self._loaded: Callable[[], Iterable[str]] = tuple
        self._known: dict[str, bytes | None] = {}  # by LoRA id; None: its KV may not be on the SSD
        self._id_lengths: set[int] = set()
        self._prune_above = PRUNE_ABOVE

    def use_identity(self, identity: bytes) -> None:
        """The model has other weights now."""
        self.identity = identity

    def attach(self, digest: Callable[[str], bytes | None], loaded: Callable[[], Iterable[str]]) -> None:
        """The server has adapters: ``loaded`` ones now, by LoRA id, and the ``digest`` of one."""
        self._digest, self._loaded = digest, loaded
        self.know_adapters()

    def know_adapters(self) -> None:
        """Adapters were loaded: take the digest of those that are new, or came anew under a known id. One that differs
        from an earlier one of its id is kept off the SSD: the tree may hold KV of both."""
        for lora_id in sorted(self._loaded()):
            digest = self._digest(lora_id) if self._has_tiers else None
            if lora_id in self._known and self._known[lora_id] != digest:
                digest = None
            self._note(lora_id, digest)

    def note_adapter(self, lora_id: str | None) -> None:
        """A request came: an adapter that nobody saw being loaded is kept off the SSD."""
        if lora_id is not None and lora_id not in self._known:
            self._note(lora_id, None)

    def adapter_of(self, namespace: str | None) -> str | None:
        """The LoRA id in a namespace; None: it is one of the base model."""
        ends = (namespace[-length:] for length in self._id_lengths) if namespace else ()
        return next((end for end in ends if end in self._known), None)

    def ssd_scope(self, namespace: str | None) -> SsdScope | None:
        """Scope of a namespace's KV on the SSD; None: it must not be there."""
        lora_id = self.adapter_of(namespace)
        if namespace is None or lora_id is None:
            return SsdScope(self.identity, namespace)
        digest = self._known[lora_id]
        if digest is None:
            return None
        both = fingerprint({"model": self.identity.hex(), "adapter": digest.hex()})
        return SsdScope(both, namespace[: -len(lora_id)] or None)

    def may_reach_ssd(self, node: Node) -> bool:
        """Is a node's KV told apart from all other on the SSD: text, of a model and adapter that are known?"""
        return node.kv.is_text and self.ssd_scope(node.key.extra_key) is not None

    def _note(self, lora_id: str, digest: bytes | None) -> None:
        self._known[lora_id] = digest
        self._id_lengths.add(len(lora_id))
        if len(self._known) <= self._prune_above:
            return
        used = {self.adapter_of(namespace) for namespace in self._namespaces()}
        used |= {lora_id, *self._loaded()}
        self._known = {known: digest for known, digest in self._known.items() if known in used}
        self._prune_above = max(PRUNE_ABOVE, 2 * len(self._known))
