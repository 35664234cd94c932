"""Hooks of the scheduler process: it answers /evicpress queries between two steps, and closes the cache at the end.

HTTP route -> ``SchedulerCalls`` (main process) -> ``EvicPressReqInput`` -> every rank of the scheduler,
between two steps -> ``EvicPressReqOutput`` from rank 0.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from sglang.srt.managers.io_struct import hook_custom_types
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.utils import TypeBasedDispatcher

from sglang_evicpress.introspect.arguments import Json
from sglang_evicpress.introspect.call_times import CallTimes
from sglang_evicpress.introspect.operations import OPERATIONS, Inspectable, answer_encoded
from sglang_evicpress.patches.hook_check import register_once
from sglang_evicpress.patches.scheduler import shutdown
from sglang_evicpress.patches.scheduler.messages import EvicPressReqInput, EvicPressReqOutput

_DISPATCHER = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
_EVENT_LOOP = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"


def install(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    """Answer questions in this scheduler process, show our cache its scheduler and close it at the end. Idempotent.

    Only registers: call it before ``HookRegistry.apply_hooks()``, which SGLang does after loading plugins.
    """
    hook_custom_types(EvicPressReqInput, EvicPressReqOutput)
    register_once(registry, _DISPATCHER, _after_init_request_dispatcher, hook_type.AFTER)
    register_once(registry, _SCHEDULER, _after_init, hook_type.AFTER)
    register_once(registry, _EVENT_LOOP, shutdown.around_event_loop, hook_type.AROUND)


@runtime_checkable
class Inspected(Protocol):
    """A cache of ours."""

    inspector: Inspectable


class Serving(Protocol):
    """The scheduler, with the cache that it serves from."""

    tree_cache: object


class DispatchingScheduler(Serving, Protocol):
    """The scheduler, with what it does with the messages that come."""

    _request_dispatcher: TypeBasedDispatcher


@runtime_checkable
class AttachableCache(Protocol):
    """A cache that wants to know its scheduler."""

    def attach_scheduler(self, scheduler: Serving) -> None:
        """Called once, when the scheduler is complete."""


def reply(scheduler: Serving, question: EvicPressReqInput, times: CallTimes) -> EvicPressReqOutput:
    """The answer of this scheduler. Never raises.

    Runs on every tensor-parallel rank, so that all trees change alike; only rank 0 has a socket to send on.
    """
    op = question.op if question.op in OPERATIONS else "unknown"
    with times.measure(op):
        more: Json = {"calls": times.to_json()} if op == "stats" else {}
        cache = scheduler.tree_cache
        asked = cache.inspector if isinstance(cache, Inspected) else cache
        status, payload = answer_encoded(asked, question.op, question.payload, more)
    return EvicPressReqOutput(rid=question.rid, status=status, payload=payload)


def _after_init_request_dispatcher(_: None, scheduler: DispatchingScheduler) -> None:
    # Always, whatever the cache: a message without a receiver would end the scheduler.
    times = CallTimes()
    scheduler._request_dispatcher += TypeBasedDispatcher(
        [(EvicPressReqInput, lambda question: reply(scheduler, question, times))]
    )


def _after_init(_: None, scheduler: Serving, *__: object, **___: object) -> None:
    if isinstance(scheduler.tree_cache, AttachableCache):
        scheduler.tree_cache.attach_scheduler(scheduler)
