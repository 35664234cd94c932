"""Compressing what only the SSD has, a node at a time and without the GPU: its entry is read into host memory, made
smaller there and written anew, while no request runs or waits and the disk has nothing else to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tiers.ssd_io import SsdReads
from sglang_evicpress.patches.tiers.types import HostForms, Removals, Tiers
from sglang_evicpress.patches.tree.node import is_reserved
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.cost_model import CostSnapshot
from sglang_evicpress.tiers.entry.copies import SsdEntry

MOST_REMEMBERED = 4096
"""Nodes that could not be made smaller."""


@dataclass(slots=True)
class _Rewrite:
    """A node on its way to ``form``; ``is_read``, ``is_made``: the host has what the SSD had, and is at work on it."""

    node_id: int
    form: Form
    is_read: bool = False
    is_made: bool = False


@dataclass(eq=False, repr=False)
class SsdCompression:
    """Carries one rewrite out at a time. ``busy_s``: when a request last ran or waited; ``room``: free bytes."""

    nodes: Mapping[int, Node]
    storage: Tiers
    ssd: SsdReads
    host: HostForms
    removal: Removals
    _: KW_ONLY
    costs: Callable[[], CostSnapshot]
    busy_s: Callable[[], float]
    room: Callable[[], Mapping[Tier, int]]

    def __post_init__(self) -> None:
        self._rewrite: _Rewrite | None = None
        self._failed: dict[int, SsdEntry] = {}  # by node id

    @property
    def is_busy(self) -> bool:
        return self._rewrite is not None

    def begin(self, node_id: int, form: Form) -> None:
        """Bring a node that only the SSD has to ``form``; nothing where another one is on its way."""
        if self._rewrite is None:
            self._rewrite = _Rewrite(node_id, form)

    def has_failed(self, node: Node) -> bool:
        """True if what the SSD has of the node could not be made smaller."""
        return self._failed.get(node.id) is node.kv.copies[Tier.SSD].entry

    def clear(self) -> None:
        """The tree goes."""
        self._rewrite = None
        self._failed.clear()

    def advance(self) -> None:
        """Go on with what was begun."""
        if self._rewrite is not None and not self._take_step(self._rewrite):
            self._rewrite = None

    def _take_step(self, rewrite: _Rewrite) -> bool:
        """The next step; False when there is none, or a request wants the node."""
        node = self.nodes.get(rewrite.node_id)
        if node is None or node.value is not None or node.lock_ref > 0 or is_reserved(node):
            return False
        copy = node.kv.copies.get(Tier.SSD)
        if copy is None:
            return False
        if node.kv.job is not None:
            return True
        if rewrite.is_made:
            self._end(node, rewrite)
            return False
        if Tier.HOST in node.kv.copies:
            rewrite.is_made = rewrite.is_read and self.host.copy_to_ssd(node, rewrite.form)
            if rewrite.is_read and not rewrite.is_made:
                self._end(node, rewrite)
            return rewrite.is_made
        if copy.entry.read is not None:
            return True
        # Of an entry of which others have pieces all would come to the host, and stay there.
        if rewrite.is_read or len(copy.entry.owners) > 1:
            return False
        load_s = self.costs().load_seconds(Tier.SSD, copy.entry.header.payload_bytes)
        if self.ssd.reads or self.storage.now_s() - self.busy_s() < load_s:
            return True  # a request that comes now would have to wait for it: none came for as long as it takes
        # Only copies of what the GPU has make room for it: what else the host has is of more use than a smaller form.
        is_free = self.room().get(Tier.HOST, 0) >= copy.entry.header.payload_bytes
        rewrite.is_read = is_free and self.ssd.start_read(copy.entry, is_awaited=False) is not None
        return rewrite.is_read

    def _end(self, node: Node, rewrite: _Rewrite) -> None:
        """The SSD alone has the node again; what could not be made of it is not tried again."""
        copy = node.kv.copies.get(Tier.SSD)
        if copy is None:  # it made room there: the host keeps the node
            return
        if copy.form != rewrite.form:
            if len(self._failed) >= MOST_REMEMBERED:
                self._failed.clear()
            self._failed[node.id] = copy.entry
        if Tier.HOST in node.kv.copies:
            self.removal.release(node.id, Tier.SSD)
