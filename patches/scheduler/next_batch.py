"""One round of the scheduler: what comes before its next batch is made, and after. One hook, as each costs a wrapper.

Touches ``Scheduler.get_next_batch_to_run``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.scheduler import garbage, hooks, queue_limit
from sglang_evicpress.patches.scheduler.hooks import HookedScheduler
from sglang_evicpress.patches.scheduler.queue_limit import LimitedScheduler

TARGET = "sglang.srt.managers.scheduler.Scheduler.get_next_batch_to_run"


class RoundScheduler(HookedScheduler, LimitedScheduler, Protocol):
    """The scheduler, as far as a round looks at it."""


def _around_get_next_batch_to_run(
    original: Callable[..., object], scheduler: RoundScheduler, *args: object, **kwargs: object
) -> object:
    """AROUND ``get_next_batch_to_run``. The queue is counted while all of it is visible."""
    is_full = garbage.begin_round(scheduler)
    queued = queue_limit.begin_round(scheduler)
    hooks.begin_round(scheduler, is_full=is_full)
    plan = original(scheduler, *args, **kwargs)
    batch = RELEASE.batch_of(plan)
    hooks.end_round(scheduler, batch)
    queue_limit.end_round(scheduler, queued, batch)
    return plan


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    registry.register(TARGET, _around_get_next_batch_to_run, hook_type.AROUND)
