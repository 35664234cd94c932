"""Hooks of the main process: /evicpress routes and the online profiler start with its HTTP server, and all stops
cleanly behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from sglang.srt.managers.io_struct import hook_custom_types
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_evicpress.introspect.operation import MAX_BODY_BYTES
from sglang_evicpress.patches import last_word
from sglang_evicpress.patches.hook_check import register_once, sglang_version
from sglang_evicpress.patches.hook_points import points_of
from sglang_evicpress.patches.http import answers, salts
from sglang_evicpress.patches.http.access import AccessRules
from sglang_evicpress.patches.http.online_profiler import GeneratingServer, OnlineProfiler
from sglang_evicpress.patches.http.profile_writer import ProfileFile
from sglang_evicpress.patches.http.routes import TOKEN_BYTES, Frontend, add_routes, watch_threads
from sglang_evicpress.patches.kv_flags import config_of
from sglang_evicpress.patches.scheduler import queue_limit, shutdown
from sglang_evicpress.patches.scheduler.messages import EvicPressReqInput, EvicPressReqOutput

_HTTP_SERVER = "sglang.srt.entrypoints.http_server._setup_and_run_http_server"
_SIGQUIT = "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler"
_ENGINE = "sglang.srt.entrypoints.engine.Engine.shutdown"


class ServerArgs(Protocol):
    """SGLang's ServerArgs, with our flags."""

    kv_policy: str | None
    admin_api_key: str | None
    host: str


class HttpFrontend(Frontend, GeneratingServer, shutdown.StoppableServer, Protocol):
    """SGLang's TokenizerManager."""

    context_len: int


class Served(Protocol):
    """Whoever has a tokenizer manager, if any."""

    tokenizer_manager: HttpFrontend | None


def install_frontend(registry: type[HookRegistry], hook_type: type[HookType]) -> None:
    """Serve ``/evicpress/*`` from this process once its HTTP server starts, and stop cleanly after it. Idempotent.

    Called when a ServerArgs is resolved, so after ``apply_hooks()`` ran, which skips every target that
    another plugin's hook marked as patched: these hooks are applied here, alone. It imports the HTTP server
    module, in processes that build ServerArgs; the scheduler gets them pickled.
    """
    hook_custom_types(EvicPressReqInput, EvicPressReqOutput)
    known = {point.path for point in points_of(sglang_version())}  # others are not in this release
    for target, hook, kind in (
        (_HTTP_SERVER, _around_http_server, hook_type.AROUND),
        (_SIGQUIT, _before_sigquit, hook_type.BEFORE),
        (_ENGINE, _before_engine_ends, hook_type.BEFORE),
        (answers.GENERATE_REQUEST, answers.around_generate_request, hook_type.AROUND),
        (salts.COMPUTE_KEY, salts.around_compute_extra_key, hook_type.AROUND),
        (queue_limit.ABORTED, queue_limit.before_abort_is_told, hook_type.BEFORE),
        (last_word.LAUNCH_SUBPROCESSES, last_word.around_launch_subprocesses, hook_type.AROUND),
        (last_word.LAUNCH_SERVER, last_word.around_launch_server, hook_type.AROUND),
    ):
        if target in known and register_once(registry, target, hook, kind):
            registry._apply_target(target, registry._hooks[target][-1:])
            registry._patched.add(target)


def _around_http_server(
    original: Callable[..., object],
    server_args: ServerArgs,
    tokenizer_manager: HttpFrontend,
    *args: object,
    **kwargs: object,
) -> object:
    if server_args.kv_policy is None:  # another server, without a policy, in a process that had one
        return original(server_args, tokenizer_manager, *args, **kwargs)
    from sglang.srt.entrypoints.http_server import app

    config = config_of(server_args)
    profile_file = ProfileFile(config.profiles.path)
    calls = add_routes(
        app,
        tokenizer_manager,
        profile_file,
        rules=AccessRules(bool(server_args.admin_api_key), server_args.host),
        max_context_bytes=TOKEN_BYTES * tokenizer_manager.context_len + MAX_BODY_BYTES,
    )
    answers.add_middleware(app)
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


def _before_sigquit(signals: Served, *_: object, **__: object) -> None:
    """A child died, as the detokenizer does on Ctrl-C: SGLang is about to kill the others."""
    shutdown.stop_schedulers(signals.tokenizer_manager)


def _before_engine_ends(engine: Served) -> None:
    shutdown.stop_schedulers(engine.tokenizer_manager)
