"""Turns the policy's decisions into moves and keeps count of what was done."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from sglang_evicpress.controller.journal import Journal
from sglang_evicpress.core import Decision, Form, LowerCopy, Tier
from sglang_evicpress.error_text import code_path
from sglang_evicpress.policy.planner import Planner

logger = logging.getLogger(__name__)

BY_UTILITY, NO_COPY, NOT_MEASURED, FORCED = "best_by_utility", "no_copy_in_time", "nothing_measured", "forced"
"""Why a node is dropped: that lost least; nothing below had it, and there was no room or time to copy it; no form of it
has a known quality, so that it could not shrink; what is above it had to go."""

PRESSURE, AHEAD, IDLE, ASKED = "pressure", "ahead_of_need", "idle", "asked"
"""Occasions on which a node moves or shrinks: its room is wanted now, or soon; the server is idle; somebody asked."""

OVER_LIMIT = "over_limit"
"""Occasion and, of a drop, cause: the tenant holds more than it may."""

LOG_PAUSE_S = 10.0
"""Between two lines in the log about moves that failed."""


class NodeOps(Protocol):
    """Operations of the radix tree for the controller; only the scheduler thread calls them. Each tells the policy."""

    def compress(self, node_id: int, form: Form) -> int | None:
        """Bring a node to a smaller form in place; returns the slots freed, None where it could not be begun."""

    def drop(self, node_id: int, cause: str = "", number: int | None = None) -> int:
        """Forget a childless node; returns the slots freed. ``cause`` and ``number``: why, and the decision's number in
        the journal."""

    def demote(self, node_id: int, tier: Tier, form: Form, *, at_once: bool = False) -> int | None:
        """Bring a node to a lower tier, ``at_once`` or, where it has to be copied, in the background; returns the slots
        freed now, None where it could not be begun."""

    def promote(self, node_id: int) -> bool:
        """Begin to bring a node onto the GPU, or to give it its exact KV if it is there; False where that is not
        tried."""

    def cause_of_drop(self, node_id: int) -> str | None:
        """Why a node that is to be dropped could not become anything else, if so."""

    def set_aside(self, node_id: int) -> None:
        """Keep a node, if it is still there, out of the plans of the next seconds."""

    def together(self, decisions: Sequence[Decision]) -> AbstractContextManager[None]:
        """While these are carried out, with other ranks: what all must agree on is agreed on at once."""

    @property
    def is_alone(self) -> bool:
        """True if no other rank must do as this one does."""


class PolicyInUse(Protocol):
    """Policy, which is replaced when the cache is flushed."""

    @property
    def planner(self) -> Planner:
        """The present one."""


class Terms(Protocol):
    """Logical time and what a hit is worth at it, for the journal."""

    now_s: float

    def value_of_hit(self) -> float:
        """Worth of a hit now."""


class Controller:
    """The only one that compresses or drops because memory is short. ``num_failed`` counts moves by their errors,
    ``num_decisions`` what was carried out, by kind and by reason: of a drop its cause, else its
    occasion."""

    def __init__(self, ops: NodeOps, policy: PolicyInUse, terms: Terms, num_failed: Counter[str]) -> None:
        self.ops = ops
        self._policy = policy
        self._terms = terms
        self.num_failed = num_failed
        self.journal = Journal()
        self.num_decisions: Counter[tuple[str, str]] = Counter()
        self.num_compressed: Counter[str] = Counter()
        self.num_demoted: Counter[str] = Counter()
        self.num_dropped = 0
        self.freed_slots = 0
        self.dropped_tokens = 0
        self._next_log_s = 0.0

    @property
    def planner(self) -> Planner:
        return self._policy.planner

    @property
    def num_moves(self) -> int:
        """Decisions carried out."""
        return self.num_decisions.total()

    @property
    def now_s(self) -> float:
        return self._terms.now_s

    @property
    def value_of_hit(self) -> float:
        return self._terms.value_of_hit()

    def free_bytes(
        self,
        tier: Tier,
        num_bytes: int,
        *,
        room: Mapping[Tier, int] | None = None,
        lower_copies_of: Mapping[int, Sequence[LowerCopy]] | None = None,
    ) -> int:
        """Free ``num_bytes`` on ``tier`` if the unlocked nodes hold that many; returns the slots freed at once.

        See ``Planner.plan`` for ``room`` and ``lower_copies_of``: with ``lower_copies_of`` nothing is left to be freed
        later.
        """
        cause = NO_COPY if lower_copies_of is not None else BY_UTILITY
        return self.execute(self.planner.plan(tier, num_bytes, room, lower_copies_of=lower_copies_of), cause)

    def execute(
        self,
        decisions: Iterable[Decision],
        cause: str = BY_UTILITY,
        *,
        at_once: bool = False,
        occasion: str = PRESSURE,
    ) -> int:
        """Make the moves of a plan, which must be of the tree as it is; returns the slots freed at once. ``cause``: why
        what is dropped is; ``occasion``: why the others move. ``at_once``: what leaves a tier leaves it now.

        A move that fails is skipped and counted, and its node is set aside, so that the next plan makes room of
        others. Not where there are other ranks: they have made the move, and to go on would be to go on with other
        trees, so the exception ends the server.
        """
        decisions, is_alone, freed = list(decisions), self.ops.is_alone, 0
        with nullcontext() if is_alone else self.ops.together(decisions):
            for decision in decisions:
                if decision.node_id not in self.planner.index.candidates:
                    continue  # a move before it made room below, which cost it
                try:
                    freed += self._execute(decision, cause, occasion, at_once)
                except Exception as error:
                    if not is_alone:
                        raise
                    self._skip(decision, error)
        self.freed_slots += freed
        return freed

    def execute_asked(self, decision: Decision) -> int:
        """Make a move that somebody asked for, of a node that is set aside as well; returns the slots freed at once.
        What fails is raised: who asked is told."""
        freed = self._execute(decision, BY_UTILITY, ASKED, False)
        self.freed_slots += freed
        return freed

    def _execute(self, decision: Decision, cause: str, occasion: str, at_once: bool) -> int:
        option, node_id = decision.option, decision.node_id
        freed: int | None = 0
        if option.is_drop:
            num_tokens = self.planner.index.candidates[node_id].num_tokens
            cause = FORCED if decision.is_forced else self.ops.cause_of_drop(node_id) or cause
            freed = self.ops.drop(node_id, cause, self.journal.next_number)
            self.num_dropped += 1
            self.dropped_tokens += num_tokens
        elif decision.is_promotion:
            freed = 0 if self.ops.promote(node_id) else None
        elif option.tier == decision.source.tier and option.form is not None:
            freed = self.ops.compress(node_id, option.form)
            self.num_compressed[str(option.form)] += freed is not None
        elif option.tier is not None and option.form is not None:
            freed = self.ops.demote(node_id, option.tier, option.form, at_once=at_once)
            self.num_demoted[option.tier.label] += freed is not None
        if freed is None:
            return 0
        cause = cause if option.is_drop else ""
        self.num_decisions[decision.kind, cause or occasion] += 1
        self.journal.add(decision, self.now_s, self.value_of_hit, cause, self.planner.alpha, occasion)
        return freed

    def _skip(self, decision: Decision, error: Exception) -> None:
        self.num_failed[f"{decision.kind} {type(error).__name__}"] += 1
        self.ops.set_aside(decision.node_id)
        if self.now_s >= self._next_log_s:
            self._next_log_s = self.now_s + LOG_PAUSE_S
            option = decision.option
            logger.error("evicpress: node %d could not become %s: %s", decision.node_id, option, code_path(error))
