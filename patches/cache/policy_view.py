"""Nodes as the policy sees them: sizes, quality, and what they may become."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from sglang_evicpress.controller.controller import NOT_MEASURED
from sglang_evicpress.core import DROP, Decision, LowerCopy, NodeStats, Option, Tier
from sglang_evicpress.patches.tiers.placement import exact_tier_of, tier_of
from sglang_evicpress.patches.tiers.types import GpuForms
from sglang_evicpress.patches.tree.node import is_lossy, is_reserved, size_of, start_of
from sglang_evicpress.patches.tree.types import Node
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.planner import Planner
from sglang_evicpress.press import get_press
from sglang_evicpress.tiers.entry.copies import ExternalCopy

if TYPE_CHECKING:
    from sglang_evicpress.quality.expectation import Expectation


class NodeQuality(Protocol):
    """Quality of nodes."""

    def expectation_of(self, node: Node) -> Expectation: ...
    def quality_of(self, node: Node) -> float: ...
    def quality_of_copy(self, node: Node, copy: ExternalCopy) -> float: ...


class PresentPolicy(Protocol):
    """The policy in use."""

    @property
    def planner(self) -> Planner:
        """Another one after a flush."""


@dataclass(eq=False, repr=False)
class PolicyView:
    """``lower_copies_of``: what lower tiers have of nodes, by id; ``least_quality`` of a form of a node: none
    below it is chosen; 1 is exact KV only."""

    menu: Menu
    min_compress_tokens: int
    policy: PresentPolicy
    quality: NodeQuality
    pressed: GpuForms
    lower_copies_of: Mapping[int, Sequence[LowerCopy]]
    least_quality: Callable[[Node], float] = lambda node: 0.0

    def __post_init__(self) -> None:
        self._blind = self.menu.everything  # the forms that can be made without queries
        for index, form in enumerate(self.menu.forms):
            if form.press is not None and get_press(form.press).needs_queries:
                self._blind &= ~(1 << index)

    def stats_of(self, node: Node, *, may_rewrite: bool = False) -> NodeStats:
        """The node as the policy sees it; ``may_rewrite``: what lies on the SSD may be read and written anew."""
        kv, start, num_tokens, tier = node.kv, start_of(node), len(node.key), tier_of(node)
        num_bytes, filled = size_of(node) * self.menu.slot_bytes, 1.0 if kv.layout is None else kv.layout.filled
        expectation, policy = self.quality.expectation_of(node), self.policy.planner.policy
        allowed_forms = 0
        # those that do not weigh quality compress on the GPU only, before anything goes down
        is_open = tier == Tier.GPU or ((tier == Tier.HOST or may_rewrite) and policy.weighs_quality)
        sinks = self.pressed.sinks_of(num_tokens, start)
        if is_open and num_tokens >= self.min_compress_tokens and policy.compresses and not kv.has_failed:
            allowed_forms = self.menu.smaller(kv.form)
            if kv.room_bytes is not None and tier != Tier.GPU:  # there it needs none
                sizes = enumerate(self.menu.sizes(num_tokens, sinks, tier))
                allowed_forms &= sum(1 << index for index, size in sizes if size <= kv.room_bytes)
            if kv.unfit_codec is not None:
                allowed_forms &= ~self.menu.of_codec(kv.unfit_codec)
            if self.pressed.window_of(node) is None:
                allowed_forms &= self._blind
            if policy.weighs_quality:
                allowed_forms &= expectation.known  # what nobody measured is not chosen
                least = self.least_quality(node)
                if least > 0.0:
                    allowed_forms &= self._at_least(expectation.vector, least)
        return NodeStats(
            id=node.id,
            parent_id=None if node.parent.parent is None else node.parent.id,
            tier=tier,
            form=kv.form,
            num_tokens=num_tokens,
            num_bytes=num_bytes if tier == Tier.GPU else self.menu.stored_bytes(kv.form, num_bytes * filled),
            depth_tokens=start,
            quality=self.quality.quality_of(node),
            curve=expectation.vector,
            allowed_forms=allowed_forms,
            weight=kv.weight,
            num_hits=kv.num_hits,
            last_use=kv.last_use,
            sinks=sinks,
            is_locked=node.lock_ref > 0 or is_reserved(node),
            exact_on=exact_tier_of(node),
            lower_copies=tuple(self.lower_copies_of.get(node.id, ())),
            filled=filled,
            external=self._external_copy_of(node),
        )

    def _external_copy_of(self, node: Node) -> LowerCopy | None:
        copy = node.kv.external
        if copy is None:
            return None
        quality = self.quality.quality_of_copy(node, copy)
        return LowerCopy(int(Tier.EXTERNAL), copy.form, copy.num_bytes, quality)

    def _at_least(self, curve: Sequence[float], quality: float) -> int:
        """The forms of such a quality, by their ``curve``; of 1 the exact ones."""
        chosen = (quality < 1.0 and value >= quality for value in curve)
        pairs = enumerate(zip(self.menu.forms, chosen, strict=True))
        return sum(1 << index for index, (form, is_good) in pairs if is_good or form.is_exact)

    def plan_rewrites(self, nodes: Iterable[Node], room: int) -> Sequence[Decision]:
        """Decisions that bring nodes that only the SSD has to smaller forms there, of which ``room`` bytes are free."""
        stats = [self.stats_of(node, may_rewrite=True) for node in nodes]
        return self.policy.planner.plan_rewrites(stats, Tier.SSD, room)

    def options_of(self, node: Node) -> tuple[Option, ...]:
        """What can be done now with a node; nothing while it is locked.

        Whether its children allow a drop is the plan's business.
        """
        if node.lock_ref > 0 or node.value is None:
            return ()
        stats, menu = self.stats_of(node), self.menu
        options, allowed_forms = [], stats.allowed_forms & menu.of_codec(stats.form.codec)
        for index, form in enumerate(menu.forms):
            num_bytes = menu.num_bytes(form, stats.num_tokens, stats.sinks)
            if allowed_forms >> index & 1 and num_bytes < stats.num_bytes:
                options.append(Option(form, Tier.GPU, num_bytes))
        return (*options, DROP)

    def cause_of_drop(self, node: Node) -> str | None:
        """Why a node can become nothing else, where that is that no form of it was measured."""
        policy = self.policy.planner.policy
        could_shrink = policy.compresses and len(node.key) >= self.min_compress_tokens and not is_lossy(node)
        is_unmeasured = policy.weighs_quality and could_shrink and not self.quality.expectation_of(node).known
        return NOT_MEASURED if is_unmeasured else None
