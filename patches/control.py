"""The way of a question through SGLang, and of the wish to stop: messages, the scheduler's side, and where both sides
are hooked in.

HTTP route -> ``SchedulerCalls`` (main process) -> ``EvicPressReqInput`` -> every rank of the scheduler,
between two steps -> ``EvicPressReqOutput`` from rank 0. SGLang's IPC is a closed msgspec union: both types
are added to it in both processes; arguments and answers travel as JSON bytes because the union has no room
for open dicts.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types
from sglang.utils import TypeBasedDispatcher

from sglang_evicpress.arguments import Json
from sglang_evicpress.call_times import CallTimes
from sglang_evicpress.introspect import OPERATIONS, answer_encoded
from sglang_evicpress.patches import last_word, queue_limit, shutdown

_HTTP_SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
_DISPATCHER = "sglang.srt.managers.scheduler.Scheduler.init_request_dispatcher"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
_EVENT_LOOP = "sglang.srt.managers.scheduler.Scheduler.run_event_loop"
_SIGQUIT = "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler"
_ENGINE = "sglang.srt.entrypoints.engine.Engine.shutdown"


class EvicPressReqInput(BaseReq):
    """The question ``rid``; ``payload`` is a JSON object of arguments."""

    op: str
    payload: bytes = b"{}"


class EvicPressReqOutput(BaseReq):
    """The answer to the question ``rid``: an HTTP status and a JSON body."""

    status: int
    payload: bytes


def install_frontend(registry: Any, hook_type: Any) -> None:
    """Serve ``/evicpress/*`` from this process once its HTTP server starts, and stop cleanly after it. Idempotent.

    Called from ``ServerArgs.__post_init__``, so after ``apply_hooks()`` ran, which skips every target that
    another plugin's hook marked as patched: these hooks are applied here, alone. It imports the HTTP server
    module, in processes that build ServerArgs; the scheduler gets them pickled.
    """
    hook_custom_types(EvicPressReqInput, EvicPressReqOutput)
    for target, hook, kind in (
        (_HTTP_SERVER, _around_http_server, hook_type.AROUND),
        (_SIGQUIT, _before_sigquit, hook_type.BEFORE),
        (_ENGINE, _before_engine_ends, hook_type.BEFORE),
        (queue_limit.ABORTED, queue_limit.before_abort_is_told, hook_type.BEFORE),
        (last_word.LAUNCH_SUBPROCESSES, last_word.around_launch_subprocesses, hook_type.AROUND),
        (last_word.LAUNCH_SERVER, last_word.around_launch_server, hook_type.AROUND),
    ):
        if _register(registry, target, hook, kind):
            registry._apply_target(target, registry._hooks[target][-1:])
            registry._patched.add(target)


def install_scheduler(registry: Any, hook_type: Any) -> None:
    """Answer questions in this scheduler process, show our cache its scheduler and close it at the end. Idempotent.

    Only registers: call it before ``HookRegistry.apply_hooks()``, which SGLang does after loading plugins.
    """
    hook_custom_types(EvicPressReqInput, EvicPressReqOutput)
    _register(registry, _DISPATCHER, _after_init_request_dispatcher, hook_type.AFTER)
    _register(registry, _SCHEDULER, _after_init, hook_type.AFTER)
    _register(registry, _EVENT_LOOP, shutdown.around_event_loop, hook_type.AROUND)


def reply(scheduler: Any, question: EvicPressReqInput, times: CallTimes) -> EvicPressReqOutput:
    """The answer of this scheduler. Never raises.

    Runs on every tensor-parallel rank, so that all trees change alike; only rank 0 has a socket to send on.
    """
    op = question.op if question.op in OPERATIONS else "unknown"
    with times.measure(op):
        more: Json = {"calls": times.to_json()} if op == "stats" else {}
        status, payload = answer_encoded(scheduler.tree_cache, question.op, question.payload, more)
    return EvicPressReqOutput(rid=question.rid, status=status, payload=payload)


def _register(registry: Any, target: str, hook: Any, kind: Any) -> bool:
    """Whether the hook was not there yet."""
    if any(known is hook for _, known, _ in registry._hooks.get(target, ())):
        return False
    registry.register(target, hook, kind)
    return True


def _around_http_server(original: Any, server_args: Any, tokenizer_manager: Any, *args: Any, **kwargs: Any) -> Any:
    if server_args.kv_policy is None:  # another server, without a policy, in a process that had one
        return original(server_args, tokenizer_manager, *args, **kwargs)
    from sglang.srt.entrypoints.http_server import app

    # Here: schedulers need no web framework.
    from sglang_evicpress.patches.access import AccessRules
    from sglang_evicpress.patches.http_server import MAX_BODY_BYTES, TOKEN_BYTES, add_routes, watch_threads
    from sglang_evicpress.patches.online_profiler import OnlineProfiler
    from sglang_evicpress.patches.profile_file import ProfileFile
    from sglang_evicpress.patches.server_args import config_of

    config = config_of(server_args)
    profile_file = ProfileFile(config.profiles)
    calls = add_routes(
        app,
        tokenizer_manager,
        profile_file,
        rules=AccessRules(bool(server_args.admin_api_key), server_args.host),
        max_context_bytes=TOKEN_BYTES * tokenizer_manager.context_len + MAX_BODY_BYTES,
    )
    if config.max_queue_s is not None:
        queue_limit.add_middleware(app)
    profiler = OnlineProfiler(tokenizer_manager, calls, profile_file) if config.profiles_online else None
    if profiler is not None:
        profiler.start()
        watch_threads(app, (profiler.thread,))
    if shutdown.has_tiers(server_args):
        shutdown.exit_on_sigterm()
    try:
        return original(server_args, tokenizer_manager, *args, **kwargs)
    finally:
        if profiler is not None:
            profiler.stop()
        shutdown.stop_schedulers(tokenizer_manager)


def _before_sigquit(signals: Any, *_: Any, **__: Any) -> None:
    """A child died, as the detokenizer does on Ctrl-C: SGLang is about to kill the others."""
    shutdown.stop_schedulers(signals.tokenizer_manager)


def _before_engine_ends(engine: Any) -> None:
    shutdown.stop_schedulers(engine.tokenizer_manager)


def _after_init_request_dispatcher(_: None, scheduler: Any) -> None:
    # Always, whatever the cache: a message without a receiver would end the scheduler.
    times = CallTimes()
    scheduler._request_dispatcher += TypeBasedDispatcher(
        [(EvicPressReqInput, lambda question: reply(scheduler, question, times))]
    )


def _after_init(_: None, scheduler: Any, *__: Any, **___: Any) -> None:
    attach = getattr(scheduler.tree_cache, "attach_scheduler", None)
    if attach is not None:
        attach(scheduler)
