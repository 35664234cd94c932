"""What a policy is: statistics in, decisions out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_evicpress.core import Decision, NodeStats


class Policy(Protocol):
    """Chooses what to do with resident nodes when slots are short (EvicPress section 4.4).

    A policy is pure: it reads no clock, file, tensor or metric, keeps nothing between calls and decides ties
    by values of the nodes. The same nodes, in any order and in any process, give the same plan.
    """

    @property
    def name(self) -> str:
        """The name it is chosen by, a key of ``POLICIES``."""
        ...

    @property
    def compresses(self) -> bool:
        """Whether it ever takes an option that compresses; one that does not is spared their making."""
        ...

    def plan(self, nodes: Sequence[NodeStats], demand_slots: int) -> list[Decision]:
        """Decisions in order of execution that free ``demand_slots``, or all they can if that is less.

        ``nodes`` have distinct ids; locked ones may be left out or come without options. Every decision takes
        one of its node's options; a node is decided at most once. A node is dropped only when none of its
        ``num_children`` resident children is left, those dropped earlier in the plan being gone. Without the
        last decision the plan would fall short of the demand. A demand of 0 or less needs nothing: an empty
        plan.

        A plan changes nothing by itself; every decision can be carried out as long as they are taken in order.
        """
        ...
