"""Installing the hooks: every hook point is verified before anything is touched, and again once applied.

SGLang only logs what a plugin or a hook raises, so failures here end the scheduler process (``handover.refusal``)
and are a RefusedError in the main one. The scheduler process registers its hooks while SGLang loads plugins;
SGLang applies them right after, in ``HookRegistry.apply_hooks``. The main process installs its own later,
when a ServerArgs asks for a kv policy, and applies them itself: ``apply_hooks`` may be called again, but it
skips every target that is already patched, also when only another plugin's hooks are in it. That skip is
silent, which is why ``check_applied`` looks for our hook in the function rather than for the target in the
registry's list.
"""

from __future__ import annotations

import functools
import importlib.metadata
import inspect
import pkgutil
from collections.abc import Iterable
from typing import Any

from sglang_evicpress import handover
from sglang_evicpress.patches.hook_points import HOOK_POINTS, SUPPORTED_SGLANG, HookPoint
from sglang_evicpress.patches.refusals import RefusedError

ENVIRONMENT_FLAG = "SGLANG_EVICPRESS"  # "attention": our CPU attention on a server without kv policy

_SUPPORTED = f"sglang-evicpress supports SGLang {', '.join(SUPPORTED_SGLANG)}"
_WAY_OUT = f"install sglang=={SUPPORTED_SGLANG[-1]}, or start without --kv-policy"


def sglang_version() -> str:
    return importlib.metadata.version("sglang")


def version_problem(found: str | None = None) -> str | None:
    """One sentence when the SGLang release is not one we know, else None."""
    found = sglang_version() if found is None else found
    if found in SUPPORTED_SGLANG:
        return None
    return f"{_SUPPORTED} and found {found}: {_WAY_OUT}"


def hook_point_problem(points: Iterable[HookPoint] = HOOK_POINTS) -> str | None:
    """One sentence naming the first hook point that is missing or takes other parameters, else None."""
    for point in points:
        difference = _difference(point)
        if difference is not None:
            return f"{_SUPPORTED} and found {sglang_version()}, in which {point.path} {difference}: {_WAY_OUT}"
    return None


def install_scheduler() -> None:
    """Register every scheduler-side hook. Raises SystemExit when SGLang does not fit, before touching it."""
    points = (point for point in HOOK_POINTS if point.process == "scheduler")
    problem = version_problem() or hook_point_problem(points)
    if problem is not None:
        raise handover.refusal(problem)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_evicpress.patches import (
        attention,
        control,
        decode_intake,
        eviction,
        paged_allocator,
        queue_limit,
        registry,
        rows,
        scheduling,
    )

    registry.install()
    paged_allocator.install(HookRegistry, HookType)
    rows.install(HookRegistry, HookType)
    attention.install(HookRegistry, HookType)
    control.install_scheduler(HookRegistry, HookType)
    scheduling.install(HookRegistry, HookType)
    queue_limit.install(HookRegistry, HookType)
    eviction.install(HookRegistry, HookType)
    decode_intake.install(HookRegistry, HookType)


def install_attention() -> None:
    """Register our CPU attention alone. Raises SystemExit when SGLang does not fit."""
    problem = version_problem() or hook_point_problem()
    if problem is not None:
        raise SystemExit(problem)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_evicpress.patches import attention

    attention.install_on_stock(HookRegistry, HookType)


@functools.cache
def install_frontend() -> None:
    """Install the HTTP side in the main process, once. Raises RefusedError when SGLang does not fit."""
    problem = version_problem() or hook_point_problem()
    if problem is not None:
        raise RefusedError(problem)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_evicpress.patches import control

    control.install_frontend(HookRegistry, HookType)  # also applies them
    problem = unapplied_problem(HookRegistry)
    if problem is not None:
        raise RefusedError(problem)


def check_applied(registry: Any) -> None:
    """Raise SystemExit when a hook of ours is not in its function. The cache factory calls this."""
    problem = unapplied_problem(registry)
    if problem is not None:
        raise handover.refusal(problem)


def unapplied_problem(registry: Any) -> str | None:
    """One sentence naming our hook targets that are not patched (or that none is registered), else None."""
    ours = [
        (target, hook)
        for target, hooks in registry._hooks.items()
        for _, hook, _ in hooks
        if _module_of(hook).startswith("sglang_evicpress.")
    ]
    if not ours:
        return "sglang-evicpress has registered no hook in this process: is SGLANG_PLUGINS leaving it out?"
    missing = sorted({target for target, hook in ours if not _is_applied(target, hook)})
    if not missing:
        return None
    return (
        f"sglang-evicpress could not hook {', '.join(missing)}: disable other SGLang plugins "
        "(SGLANG_PLUGINS=evicpress), or start without --kv-policy"
    )


def _module_of(hook: Any) -> str:
    return getattr(hook, "__module__", None) or _module_of(hook.func)  # functools.partial has no module


def _is_applied(target: str, hook: Any) -> bool:
    """Whether the hook is in the chain of wrappers at the target; HookRegistry keeps it in a closure."""
    function = pkgutil.resolve_name(target)
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _difference(point: HookPoint) -> str | None:
    try:
        found = pkgutil.resolve_name(point.path)
    except (ImportError, AttributeError):
        return "is missing"
    if point.parameters is None:
        return None
    parameters = tuple(inspect.signature(found).parameters)
    if parameters == point.parameters:
        return None
    return f"takes ({', '.join(parameters)}) instead of ({', '.join(point.parameters)})"
