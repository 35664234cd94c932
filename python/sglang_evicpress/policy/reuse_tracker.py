"""Reuse of every node of a tree, followed over time: each event costs O(log n), and so does each bucket of ages that a
node grows into."""

from __future__ import annotations

import heapq
from collections import deque

from sglang_evicpress.policy.reuse import BORDERS_S, NUM_AGES, History, ReuseModel, kind_of

MOST_GROWN = 32
"""Nodes, at most, that grow older in one call of ``advance``; the others do in the next."""

MOST_LOOKED = 512
"""Entries, at most, of which a call finds out whether they still count."""

MOST_REVISED, MOST_FORGOTTEN = 4, 64
"""Nodes, at most, of which a call reads the rate anew after the model has learned, and ids at which it looks for that:
those of nodes that are gone are forgotten."""


class ReuseTracker:
    """Histories of nodes, by id, and what is due for them.

    ``now_s`` never goes back and is, like every call, the same on all ranks. Whoever keeps weights by these rates asks
    ``rate`` after its own calls, and for the nodes that ``advance`` returns.
    """

    def __init__(self) -> None:
        self.model = ReuseModel()
        self._histories: dict[int, History] = {}
        self._due: list[tuple[float, int, int]] = []  # (when a node is of its next age, entry, id), a heap
        self._num_entries = 0
        self._ring: deque[int] = deque()
        self._num_to_revise = 0
        self._has_to_learn = False
        self._now_s = 0.0

    def __len__(self) -> int:
        return len(self._histories)

    def rate(self, node_id: int) -> float:
        """Uses per second expected of the node. KeyError for a node that is not known."""
        return self.model.rate(self._histories[node_id])

    def add(self, node_id: int, now_s: float, num_tokens: int, num_siblings: int, *, counts: bool = True) -> None:
        """A node is used for the first time; ``num_siblings`` with itself, 0 below the root. ``counts``: it tells of
        others like it."""
        history = History(kind_of(num_tokens, num_siblings), now_s, counts)
        self.model.begin(history)
        self._take(node_id, history)

    def split(self, upper_id: int, lower_id: int) -> None:
        """A new upper node takes the first tokens of a lower one: both have been used alike."""
        history = self._histories[lower_id]
        self._grow(history)
        self._take(upper_id, self.model.copy(history))

    def use(self, node_id: int, now_s: float) -> None:
        """A request uses the node."""
        self._now_s = max(self._now_s, now_s)
        history = self._histories[node_id]
        self._grow(history)  # its turn may not have come: it would count as used sooner than it was
        self._has_to_learn |= self.model.use(history, now_s)
        self._schedule(node_id, history)

    def observe_request(self, last_node_id: int, now_s: float) -> None:
        """A request is about to use a prefix that ends in this node."""
        self.model.observe_gap(now_s - self._histories[last_node_id].last_use_s)

    def remove(self, node_id: int) -> None:
        """The node is gone."""
        history = self._histories.pop(node_id)
        self._grow(history)
        self.model.end(history)

    def clear(self) -> None:
        """All nodes are gone; what was learned stays."""
        for history in self._histories.values():
            self.model.end(history)
        self._histories.clear()
        self._due.clear()
        self._ring.clear()
        self._num_to_revise = 0

    def describe(self) -> dict[str, object]:
        """JSON: uses seen, the typical seconds between two uses, and the seconds for which a weight is told."""
        model = self.model
        return {"num_uses": model.num_uses, "typical_gap_s": model.typical_gap_s, "horizon_s": model.horizon_s}

    def is_behind(self, now_s: float) -> bool:
        """True if another call of ``advance`` has more to do."""
        return self._num_to_revise > 0 or self._has_to_learn or bool(self._due and self._due[0][0] <= now_s)

    def advance(self, now_s: float, most_grown: int = MOST_GROWN, most_beside: int = MOST_GROWN) -> list[int]:
        """Let nodes grow older, at most ``most_grown``, and ``most_beside`` in a call that learns; returns a
        bounded number, each once: those whose rate may have changed."""
        has_to_forget = len(self._ring) > len(self._histories) + MOST_REVISED
        self._now_s = max(self._now_s, now_s)
        is_due = bool(self._due) and self._due[0][0] <= now_s
        if not (is_due or self._has_to_learn or self._num_to_revise or has_to_forget):
            return []
        if self._has_to_learn:
            most_grown = min(most_grown, most_beside)
        changed = dict[int, None]()
        for _ in range(MOST_LOOKED):
            if not self._due or self._due[0][0] > now_s or len(changed) >= most_grown:
                break
            _, entry, node_id = heapq.heappop(self._due)
            history = self._histories.get(node_id)
            if history is not None and history.entry == entry:
                self._grow(history)
                self._schedule(node_id, history)
                changed[node_id] = None
        if self._has_to_learn:
            self._has_to_learn = False
            self.model.learn()
            self._num_to_revise = len(self._ring)
        num_revised = 0
        for _ in range(min(MOST_FORGOTTEN, len(self._ring)) if self._num_to_revise or has_to_forget else 0):
            if num_revised == MOST_REVISED:
                break
            node_id = self._ring.popleft()
            if node_id in self._histories:
                num_revised += 1
                self._ring.append(node_id)
                if self._num_to_revise:
                    changed[node_id] = None
            self._num_to_revise = max(0, self._num_to_revise - 1)
        return list(changed)

    def _grow(self, history: History) -> None:
        """Count the node at every age that it has reached by now."""
        while history.age + 1 < NUM_AGES and history.last_use_s + BORDERS_S[history.age + 1] <= self._now_s:
            self.model.grow(history)

    def _take(self, node_id: int, history: History) -> None:
        self._histories[node_id] = history
        self._ring.append(node_id)
        self._schedule(node_id, history)

    def _schedule(self, node_id: int, history: History) -> None:
        """An entry for the node's next age; the one before, if any, counts no more and goes when its time comes."""
        self._num_entries += 1
        history.entry = self._num_entries
        if history.age + 1 < NUM_AGES:
            due_s = history.last_use_s + BORDERS_S[history.age + 1]
            heapq.heappush(self._due, (due_s, history.entry, node_id))
