"""Totals over the nodes of the tree, kept as they change: reading them costs the same however many there are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from sglang_evicpress.core import Form, Tier


@dataclass(slots=True)
class _Totals:
    nodes: int = 0
    tokens: int = 0
    slots: int = 0


@dataclass(slots=True)
class _Held:
    nodes: int = 0
    tokens: int = 0
    slots: int = 0


@dataclass(frozen=True, slots=True)
class Counted:
    """Counts of a node: its form, logical tokens, slots on the GPU, whether it belongs to a shadow, and what is held of
    it: per tier the form and the slots in it."""

    form: Form
    num_tokens: int
    num_slots: int
    is_shadow: bool
    held: tuple[tuple[Tier, Form, int], ...] = ()


class Census:
    """Every node is counted once, by id. O(1) per change."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Every node is gone."""
        self._counted: dict[int, Counted] = {}
        self._by_form: dict[Form, _Totals] = {}
        self._held: dict[Tier, dict[Form, _Held]] = {}
        self.num_tokens = 0
        self.num_slots = 0
        self.num_shadow_slots = 0

    @property
    def num_nodes(self) -> int:
        return len(self._counted)

    def put(self, node_id: int, counted: Counted) -> None:
        """The node is new, or has changed."""
        before = self._counted.get(node_id)
        if before == counted:
            return
        if before is not None:
            self._add(before, -1)
        self._counted[node_id] = counted
        self._add(counted, 1)

    def remove(self, node_id: int) -> None:
        """The node is gone; one that was never counted is none of the census."""
        before = self._counted.pop(node_id, None)
        if before is not None:
            self._add(before, -1)

    def by_form(self) -> dict[str, dict[str, int]]:
        """Nodes, tokens and slots by the name of the form."""
        return {str(form): asdict(totals) for form, totals in self._by_form.items()}

    def held_on(self, tier: Tier) -> dict[Form, tuple[int, int, int]]:
        """By form, how many nodes a tier holds in it, copies of those on a faster tier too, their tokens and slots."""
        return {form: (held.nodes, held.tokens, held.slots) for form, held in self._held.get(tier, {}).items()}

    def differences(self, node_id: int, counted: Counted) -> Iterator[str]:
        """One sentence where the census has a node as something else than it is."""
        known = self._counted.get(node_id)
        if known != counted:
            yield f"node {node_id}: the census has {known}, the tree {counted}"

    def _add(self, counted: Counted, sign: int) -> None:
        totals = self._by_form.setdefault(counted.form, _Totals())
        totals.nodes += sign
        totals.tokens += sign * counted.num_tokens
        totals.slots += sign * counted.num_slots
        if totals.nodes == 0:
            del self._by_form[counted.form]
        for tier, form, num_slots in counted.held:
            held = self._held.setdefault(tier, {}).setdefault(form, _Held())
            held.nodes += sign
            held.tokens += sign * counted.num_tokens
            held.slots += sign * num_slots
            if held.nodes == 0:
                del self._held[tier][form]
        self.num_tokens += sign * counted.num_tokens
        self.num_slots += sign * counted.num_slots
        self.num_shadow_slots += sign * counted.num_slots * counted.is_shadow
