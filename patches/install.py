"""Installing the hooks: every hook point is verified before anything is touched, and again once applied.

SGLang only logs what a plugin or a hook raises, so failures here end the scheduler process (``spawn.refusal``)
and are a UnsupportedError in the main one. The scheduler process registers its hooks while SGLang loads plugins;
SGLang applies them right after, in ``HookRegistry.apply_hooks``. The main process installs its own later,
when a ServerArgs asks for a kv policy, and applies them itself: ``apply_hooks`` may be called again, but it
skips every target that is already patched, also when only another plugin's hooks are in it.
"""

from __future__ import annotations

import functools

from sglang_evicpress import spawn
from sglang_evicpress.patches.hook_check import (
    behaviour_problem,
    hook_point_problem,
    unapplied_problem,
    version_problem,
)
from sglang_evicpress.patches.unsupported import UnsupportedError

ENVIRONMENT_FLAG = "SGLANG_EVICPRESS"  # "attention": our CPU attention on a server without kv policy


def install_scheduler() -> None:
    """Register every scheduler-side hook. Raises SystemExit when SGLang does not fit, before touching it."""
    problem = version_problem() or hook_point_problem("scheduler") or behaviour_problem()
    if problem is not None:
        raise spawn.refusal(problem)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_evicpress.patches.cache import scheduler_hooks

    scheduler_hooks.register(HookRegistry, HookType)


def install_attention() -> None:
    """Register our CPU attention alone. Raises SystemExit when SGLang does not fit."""
    problem = version_problem() or hook_point_problem()
    if problem is not None:
        raise SystemExit(problem)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_evicpress.patches.attention import cpu_backend

    cpu_backend.install_on_stock(HookRegistry, HookType)


@functools.cache
def install_frontend() -> None:
    """Install the HTTP side in the main process, once. Raises UnsupportedError when SGLang does not fit."""
    problem = version_problem() or hook_point_problem() or behaviour_problem()
    if problem is not None:
        raise UnsupportedError(problem)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_evicpress.patches.http import start

    start.install_frontend(HookRegistry, HookType)  # also applies them
    problem = unapplied_problem(HookRegistry)
    if problem is not None:
        raise UnsupportedError(problem)
