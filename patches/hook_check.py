"""Checks that this SGLang has the hook points we know, and that our hooks are in its functions.

``HookRegistry.apply_hooks`` skips a target that is already patched, also when only another plugin's hooks are in it.
That skip is silent: ``check_applied`` looks for our hook in the function, not for the target in the registry's list.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
import sys
from collections.abc import Iterable
from typing import Any

from sglang_evicpress import spawn
from sglang_evicpress.patches.compat import probes
from sglang_evicpress.patches.hook_points import DEFAULT_SGLANG, SUPPORTED_SGLANG, HookPoint, Process, points_of

_SUPPORTED = f"sglang-evicpress supports SGLang {', '.join(SUPPORTED_SGLANG)}"
_WAY_OUT = f"install sglang=={DEFAULT_SGLANG}, or start without --kv-policy"


def main() -> int:
    """Say in one line whether the installed SGLang is one that we can hook; status 1 where not."""
    problem = version_problem() or hook_point_problem() or behaviour_problem()
    print(problem or f"SGLang {sglang_version()}: all {len(points_of(sglang_version()))} are as we know them")
    return int(problem is not None)


def sglang_version() -> str:
    return importlib.metadata.version("sglang")


def version_problem(version: str | None = None) -> str | None:
    """One sentence when the SGLang release is not one we know, else None."""
    version = sglang_version() if version is None else version
    if version in SUPPORTED_SGLANG:
        return None
    return f"{_SUPPORTED} and found {version}: {_WAY_OUT}"


def hook_point_problem(process: Process | None = None) -> str | None:
    """One sentence naming the first hook point that is missing or takes other parameters, else None. ``process``: only
    those used there."""
    points = points_of(sglang_version())
    return points_problem(point for point in points if process in (None, point.process))


def points_problem(points: Iterable[HookPoint]) -> str | None:
    """One sentence naming the first of these that is missing or takes other parameters, else None."""
    for point in points:
        difference = _difference(point)
        if difference is not None:
            return f"{_SUPPORTED} and found {sglang_version()}, in which {point.path} {difference}: {_WAY_OUT}"
    return None


def behaviour_problem() -> str | None:
    """One sentence naming what this release does unlike the one that we know, else None."""
    difference = probes.behaviour_problem()
    return (
        None if difference is None else f"{_SUPPORTED} and found {sglang_version()}, in which {difference}: {_WAY_OUT}"
    )


def check_applied(registry: Any) -> None:
    """Raise SystemExit when a hook of ours is not in its function. The cache factory calls this."""
    problem = unapplied_problem(registry)
    if problem is not None:
        raise spawn.refusal(problem)


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
    """True if the hook is in the chain of wrappers at the target; HookRegistry keeps it in a closure."""
    function = pkgutil.resolve_name(target)
    while function is not None:
        if any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ()):
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _difference(point: HookPoint) -> str | None:
    try:
        function = pkgutil.resolve_name(point.path)
    except (ImportError, AttributeError):
        return "is missing"
    if point.parameters is None:
        return None
    parameters = tuple(inspect.signature(function).parameters)
    if parameters == point.parameters:
        return None
    return f"takes ({', '.join(parameters)}) instead of ({', '.join(point.parameters)})"


def register_once(registry: Any, target: str, hook: Any, kind: Any) -> bool:
    """Register the hook unless it is there; whether it was not."""
    if any(known is hook for _, known, _ in registry._hooks.get(target, ())):
        return False
    registry.register(target, hook, kind)
    return True


if __name__ == "__main__":
    sys.exit(main())
