"""Throttle of profiling, so that users notice nothing: arithmetic on counts, no clock."""

from __future__ import annotations


class Throttle:
    """Lets profiling touch at most ``per_step`` of the steps in which users' requests decode.

    Every such step earns ``per_step``, up to a credit of 1; one that profiling took part in costs 1. With users running
    profiling begins something only on a full credit, and in one batch no request behind the first ``max_step_tokens``
    tokens: a request is not parted, so that the last one may bring more. What it generates then decodes along with
    users, and more of it may join from step to step, until ``max_debt`` steps are owed. Users always decode between two
    batches of profiling's own. What began when no user ran is to be interrupted when one comes: see ``may_go_on``. Of n
    steps of users at most ``per_step * n + max_debt + 1`` are touched. Raises ValueError for figures out of range.
    """

    def __init__(self, per_step: float = 1 / 128, max_step_tokens: int = 256, max_debt: int = 80) -> None:
        if not 0.0 < per_step <= 1.0:
            raise ValueError(f"per_step is {per_step!r}: expected above 0 and at most 1")
        if max_step_tokens < 1 or max_debt < 0:
            raise ValueError(
                f"max_step_tokens is {max_step_tokens} and max_debt {max_debt}: expected at least 1 and at least 0"
            )
        self.per_step, self.max_step_tokens, self.max_debt = per_step, max_step_tokens, max_debt
        self.credit = 0.0
        """Steps that profiling may touch now; below 0, those it owes."""
        self._num_clean = 2  # steps of users since profiling last took part, as far as it matters
        self._is_users_turn = False

    def user_step(self) -> None:
        """A step begins in which a user's request decodes, profiling in it or not."""
        self.credit = min(1.0, self.credit + self.per_step)
        self._num_clean = min(2, self._num_clean + 1)
        self._is_users_turn = False

    def took_part(self, *, in_own_batch: bool = False) -> None:
        """Profiling computed something in a step of users; ``in_own_batch``: they had to wait for it."""
        self.credit -= 1.0
        self._num_clean = 0
        self._is_users_turn = in_own_batch

    def allowance(self, num_user_running: int, num_user_waiting: int, max_running: int) -> int:
        """Tokens of profiling requests that the coming batch may compute; at most ``max_running`` requests run.

        None while a user waits or users fill the batch; with no user running, credit does not count.
        """
        if num_user_waiting > 0 or num_user_running >= max_running:
            return 0
        may_begin = num_user_running <= 0 or (self.may_go_on and not self._is_users_turn)
        return self.max_step_tokens if may_begin else 0

    @property
    def may_go_on(self) -> bool:
        """True if what profiling generates may decode in the coming step of users; if not, it is to wait. On a full
        credit, or while what began on one goes on."""
        is_overdrawn = self.credit - 1.0 < -self.max_debt
        return self.credit >= 1.0 or (self._num_clean <= 1 and not is_overdrawn)
