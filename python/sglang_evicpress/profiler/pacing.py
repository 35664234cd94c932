"""How much profiling may happen now without users noticing: arithmetic on counts, no clock."""

from __future__ import annotations


class Pacer:
    """Lets profiling touch at most ``per_step`` of the steps in which users' requests decode.

    Every such step earns ``per_step``, up to a credit of 1; one that profiling took part in costs 1. With users running
    profiling begins something only on a full credit, at most ``max_step_tokens`` tokens of it in one batch. What it
    generates then decodes along with users and may owe up to ``max_debt`` steps, so that one generation of that many
    tokens always ends; beyond, ``is_overdrawn`` asks the caller to stop it. Whatever happens, of n steps of users at
    most ``per_step * n + max_debt + 1`` are touched. Raises ValueError for figures out of range.
    """

    def __init__(self, per_step: float = 1 / 32, max_step_tokens: int = 256, max_debt: int = 256) -> None:
        if not 0.0 < per_step <= 1.0:
            raise ValueError(f"per_step is {per_step!r}: expected above 0 and at most 1")
        if max_step_tokens < 1 or max_debt < 0:
            raise ValueError(
                f"max_step_tokens is {max_step_tokens} and max_debt {max_debt}: expected at least 1 and at least 0"
            )
        self.per_step, self.max_step_tokens, self.max_debt = per_step, max_step_tokens, max_debt
        self.credit = 0.0
        """Steps that profiling may touch now; below 0, those it owes."""

    def user_step(self) -> None:
        """A step begins in which a user's request decodes, profiling in it or not."""
        self.credit = min(1.0, self.credit + self.per_step)

    def took_part(self) -> None:
        """Profiling computed something in a step of users."""
        self.credit -= 1.0

    def allowance(self, num_user_running: int, num_user_waiting: int, max_running: int) -> int:
        """How many tokens of profiling requests the coming batch may compute; at most ``max_running`` requests run.

        None while a user waits or users fill the batch; with no user running, credit does not count.
        """
        if num_user_waiting > 0 or num_user_running >= max_running:
            return 0
        return self.max_step_tokens if num_user_running <= 0 or self.credit >= 1.0 else 0

    @property
    def is_overdrawn(self) -> bool:
        """Whether profiling may touch no further step of users: what it decodes in the coming one is to be retracted
        or aborted. Comes about when it began generations in gaps between users, time and again."""
        return self.credit - 1.0 < -self.max_debt
