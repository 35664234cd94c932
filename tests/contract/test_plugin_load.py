"""``load_plugins()`` in a fresh process: nothing without the flag, every hook with it."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_evicpress import plugin, spawn
from sglang_evicpress.patches import install, server_args
from sglang_evicpress.patches.hook_check import sglang_version
from sglang_evicpress.patches.hook_points import points_of

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

LOAD = """
import json, pkgutil
from sglang.srt.plugins import load_plugins

def is_wrapped(function):
    while function is not None:  # SGLang decorates some of its own
        if function.__code__.co_filename.endswith("hook_registry.py") or "evicpress" in function.__module__:
            return True
        function = getattr(function, "__wrapped__", None)
    return False

def report():
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.managers import tokenizer_control_mixin as control
    from sglang.srt.mem_cache.radix_cache import RadixCache
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang_evicpress.patches import hook_check
    from sglang_evicpress.patches.hook_points import points_of

    points = points_of(hook_check.sglang_version())
    ours = {
        target
        for target, hooks in HookRegistry._hooks.items()
        for _, hook, _ in hooks
        if hook.__module__.startswith("sglang_evicpress")
    }
    others = HookRegistry._hooks.keys() - ours  # by plugins that SGLang itself depends on
    functions = {
        point.path: pkgutil.resolve_name(point.path)
        for point in points
        if point.parameters and point.path not in others
    }
    methods = [value for value in vars(RadixCache).values() if callable(value)]
    print("REPORT", json.dumps({
        "ours": sorted(ours),
        "wrapped": sorted(path for path, function in functions.items() if is_wrapped(function)),
        "methods": [str(method) for method in methods if "evicpress" in method.__module__],
        "backends": registered_radix_cache_backends(),
        "routes": [route.path for route in app.routes if "evicpress" in getattr(route, "path", "")],
        "messages": [spec[0] for spec in control._COMMUNICATOR_SPECS if "evicpress" in spec[0]],
        "problem": hook_check.unapplied_problem(HookRegistry),
    }))

load_plugins()
"""
AS_CHILD = "from sglang_evicpress import spawn\nspawn.requested = True\n"
MAIN = """
from tests.contract.releases import resolved_arguments
resolved_arguments(model_path="dummy", device="cpu")
report()
resolved_arguments(model_path="dummy", device="cpu", kv_policy="lru")
report()
"""


def _python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != install.ENVIRONMENT_FLAG}
    return subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def _reports(code: str, **environment: str) -> list[dict[str, Any]]:
    done = _python("-c", code, **environment)
    assert done.returncode == 0, done.stderr
    prefix = "REPORT "
    return [json.loads(line.removeprefix(prefix)) for line in done.stdout.splitlines() if line.startswith(prefix)]


def _hooked_in(process: str) -> list[str]:
    points = points_of(sglang_version())
    return sorted(point.path for point in points if point.kind == "hook" and point.process == process)


def test_the_main_process_hooks_nothing_without_the_flag_and_the_http_server_with_it() -> None:
    off, on = _reports(LOAD + MAIN)
    assert "registered no hook" in off.pop("problem")
    assert off == dict.fromkeys(("ours", "wrapped", "methods", "backends", "routes", "messages"), [])
    assert on["problem"] is None
    assert on["ours"] == on["wrapped"] == _hooked_in("frontend")
    assert on["methods"] == on["backends"] == on["routes"] == []


def test_a_scheduler_of_a_server_with_the_flag_has_every_hook() -> None:
    (report,) = _reports(AS_CHILD + LOAD + "report()")
    assert report["problem"] is None
    assert report["ours"] == report["wrapped"] == _hooked_in("scheduler")
    assert report["backends"] == ["evicpress"]
    assert report["methods"] == report["routes"] == []


@pytest.mark.parametrize(
    ("requested", "flag", "called"),
    [
        (False, None, ["flags"]),
        (False, "1", ["flags"]),
        (False, "attention", ["flags", "attention"]),
        (True, None, ["flags", "hooks"]),
        (True, "attention", ["flags", "hooks"]),
    ],
)
def test_load_does_what_the_process_needs(
    monkeypatch: pytest.MonkeyPatch, requested: bool, flag: str | None, called: list[str]
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(spawn, "requested", requested)
    monkeypatch.setattr(server_args, "add_flags", lambda: calls.append("flags"))
    monkeypatch.setattr(install, "install_scheduler", lambda: calls.append("hooks"))
    monkeypatch.setattr(install, "install_attention", lambda: calls.append("attention"))
    monkeypatch.delenv(install.ENVIRONMENT_FLAG, raising=False)
    if flag is not None:
        monkeypatch.setenv(install.ENVIRONMENT_FLAG, flag)
    plugin.load()
    assert calls == called


@pytest.mark.parametrize("name", spawn.OTHER_PROCESSES)
def test_processes_without_kv_are_left_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Later releases load plugins in the detokenizer too, which is handed the same ServerArgs."""
    calls: list[str] = []
    process = SimpleNamespace(_target=SimpleNamespace(__name__=name))
    monkeypatch.setattr(multiprocessing, "current_process", lambda: process)
    monkeypatch.setattr(spawn, "requested", True)
    monkeypatch.setattr(server_args, "add_flags", lambda: calls.append("flags"))
    monkeypatch.setattr(install, "install_scheduler", lambda: calls.append("hooks"))
    plugin.load()
    assert calls == ["flags"]


def test_a_mistake_of_ours_ends_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang only logs what other exceptions a plugin raises, and would serve on without the plugin."""

    def fail() -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(spawn, "requested", True)
    monkeypatch.setattr(server_args, "add_flags", lambda: None)
    monkeypatch.setattr(install, "install_scheduler", fail)
    with pytest.raises(SystemExit, match="could not install its hooks.*a mistake.*start without --kv-policy"):
        plugin.load()


def test_a_scheduler_that_cannot_be_hooked_ends_with_one_sentence() -> None:
    """Through SGLang's own ``load_plugins``."""
    other = "from sglang_evicpress.patches import hook_check\nhook_check.sglang_version = lambda: '0.6.0'\n"
    done = _python("-c", other + AS_CHILD + LOAD + "print('served on')")
    assert done.returncode == 1
    assert "served on" not in done.stdout
    assert "found 0.6.0: install sglang==" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_mistake_on_the_command_line_is_one_line_and_status_2(tmp_path: Path) -> None:
    flags = (
        "--model-path",
        str(tmp_path),
        "--device",
        "cpu",
        "--kv-policy",
        "evicpress",
        "--kv-forms",
        "lz4@0.5",
    )
    done = _python("-m", "sglang.launch_server", *flags)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("sglang: error: form 'lz4@0.5' is not known: expected")
    assert "Traceback" not in done.stderr
