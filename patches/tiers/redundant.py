"""Copies that can be given up at once, as they lie on a faster tier too: each is found without a look at the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from itertools import islice

from sglang_evicpress.tiers.entry.copies import SsdEntry


class RedundantHostCopies:
    """Resident nodes with a host copy, by id, the hottest last; those that are planned to leave the GPU by it apart.
    Every call costs the same however many there are, but ``plan``, which costs as much as there are planned."""

    def __init__(self) -> None:
        self._common: OrderedDict[int, None] = OrderedDict()
        self._planned: OrderedDict[int, None] = OrderedDict()  # in the order in which they are to leave

    def __len__(self) -> int:
        return len(self._common) + len(self._planned)

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._common or node_id in self._planned

    def add(self, node_id: int, *, is_coldest: bool = False) -> None:
        """The node has a copy. One that is known stays where it is, unless it ``is_coldest``."""
        nodes = self._planned if node_id in self._planned else self._common
        nodes[node_id] = None
        if is_coldest:
            nodes.move_to_end(node_id, last=False)

    def discard(self, node_id: int) -> None:
        self._common.pop(node_id, None)
        self._planned.pop(node_id, None)

    def plan(self, node_ids: Iterable[int]) -> None:
        """These nodes, and no others, are to leave the GPU, in this order. Those that were to are the coldest now."""
        former, self._planned = self._planned, OrderedDict()
        for node_id in node_ids:
            if node_id in former or node_id in self._common:
                former.pop(node_id, None)
                self._common.pop(node_id, None)
                self._planned[node_id] = None
        for node_id in reversed(former):
            self.add(node_id, is_coldest=True)

    def next(self, keep: Collection[int], *, keeps_planned: bool) -> int | None:
        """The node whose copy is to be given up first: the hottest, it is the last to need it, and a planned one only
        when there is no other. ``keep``: a few nodes that keep theirs."""
        for nodes in (self._common,) if keeps_planned else (self._common, self._planned):
            for node_id in islice(reversed(nodes), len(keep) + 1):
                if node_id not in keep:
                    return node_id
        return None

    def clear(self) -> None:
        self._common.clear()
        self._planned.clear()


class RedundantSsdEntries:
    """SSD entries of which every piece lies on a faster tier too, in the order in which they came to be so."""

    def __init__(self) -> None:
        self._entries: dict[SsdEntry, None] = {}
        self._lowest: dict[int, SsdEntry] = {}  # by node id, what is nowhere else
        self._num_lowest: dict[SsdEntry, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def note(self, entry: SsdEntry, node_id: int, *, is_lowest: bool) -> None:
        """The node holds a piece of the entry; ``is_lowest``: no faster tier has the node."""
        self._uncount(node_id)
        if is_lowest:
            self._lowest[node_id] = entry
            self._num_lowest[entry] = self._num_lowest.get(entry, 0) + 1
        self._sort(entry)

    def leave(self, entry: SsdEntry, node_id: int) -> None:
        """The node has given up its piece, and is no owner of the entry any more."""
        self._uncount(node_id)
        self._sort(entry)

    def first(self, limit: int) -> list[SsdEntry]:
        return list(islice(self._entries, limit))

    def _uncount(self, node_id: int) -> None:
        entry = self._lowest.pop(node_id, None)
        if entry is not None:
            self._num_lowest[entry] -= 1
            if not self._num_lowest[entry]:
                del self._num_lowest[entry]

    def _sort(self, entry: SsdEntry) -> None:
        if entry.owners and entry not in self._num_lowest:
            self._entries.setdefault(entry)
        else:
            self._entries.pop(entry, None)
