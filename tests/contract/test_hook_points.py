"""Every name of SGLang we rely on exists and takes what we pass: a rename upstream fails here first."""

from __future__ import annotations

from typing import Any

import pytest

from sglang_evicpress.patches import hook_check, install
from sglang_evicpress.patches.hook_points import DEFAULT_SGLANG, SUPPORTED_SGLANG, HookPoint, points_of

pytestmark = [pytest.mark.sglang, pytest.mark.slow]


@pytest.mark.parametrize("point", points_of(hook_check.sglang_version()), ids=lambda point: point.path)
def test_sglang_has_the_hook_point(point: HookPoint) -> None:
    assert hook_check.points_problem([point]) is None


def test_no_hook_point_is_listed_twice() -> None:
    for version in SUPPORTED_SGLANG:
        paths = [point.path for point in points_of(version)]
        assert len(set(paths)) == len(paths)


def test_the_installed_release_is_supported() -> None:
    assert hook_check.sglang_version() in SUPPORTED_SGLANG
    assert hook_check.version_problem() is None


@pytest.mark.parametrize("found", ["0.5.15", "0.5.16", "0.6.0.dev1"])
def test_another_release_is_one_sentence_with_the_way_out(found: str) -> None:
    problem = hook_check.version_problem(found)
    assert problem is not None
    for part in (
        f"found {found}:",
        ", ".join(SUPPORTED_SGLANG),
        f"install sglang=={DEFAULT_SGLANG}",
        "--kv-policy",
    ):
        assert part in problem


@pytest.mark.parametrize(
    ("point", "difference"),
    [
        (HookPoint("sglang.srt.mem_cache.common.evict_for_rent", "hook", "scheduler", None), "is missing"),
        (
            HookPoint("sglang.srt.mem_cache.uncommon.alloc_for_extend", "hook", "scheduler", None),
            "is missing",
        ),
        (
            HookPoint("sglang.srt.mem_cache.common.evict_from_tree_cache", "hook", "scheduler", ("tree",)),
            "takes (tree_cache, num_tokens) instead of (tree)",
        ),
    ],
)
def test_a_changed_hook_point_stops_the_scheduler_before_anything_is_touched(
    monkeypatch: pytest.MonkeyPatch, point: HookPoint, difference: str
) -> None:
    from sglang.srt.mem_cache.registry import registered_radix_cache_backends
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = {target: list(hooks) for target, hooks in HookRegistry._hooks.items()}
    backends = registered_radix_cache_backends()
    monkeypatch.setattr(hook_check, "points_of", lambda version: (*points_of(version), point))
    with pytest.raises(SystemExit) as stopped:
        install.install_scheduler()
    sentence = str(stopped.value.code)
    assert "\n" not in sentence
    for part in (f"{point.path} {difference}", hook_check.sglang_version(), "install sglang==", "--kv-policy"):
        assert part in sentence
    assert before == HookRegistry._hooks
    assert backends == registered_radix_cache_backends()


def test_another_release_stops_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hook_check, "sglang_version", lambda: "0.6.0")
    with pytest.raises(SystemExit, match=r"found 0\.6\.0: install sglang=="):
        install.install_scheduler()


def _hook(*args: object, **kwargs: object) -> None:
    """A hook of ours, for the checks below."""


class _Target:
    def method(self) -> int:
        return 1

    @classmethod
    def made(cls) -> int:
        return 1


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's registry, empty for this test; hooks of this module count as ours."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    class Registry(HookRegistry):
        _hooks = type(HookRegistry._hooks)(list)
        _patched: set[str] = set()

    monkeypatch.setattr(_hook, "__module__", "sglang_evicpress.patches.attention.req_to_token")
    monkeypatch.setattr("sglang_evicpress.patches.hook_points.Target", _Target, raising=False)
    for name in ("method", "made"):
        monkeypatch.setattr(_Target, name, _Target.__dict__[name])  # restored afterwards
    return Registry


TARGET = "sglang_evicpress.patches.hook_points.Target."


@pytest.mark.parametrize("name", ["method", "made"])
def test_an_applied_hook_is_found_also_under_another_plugins(registry: Any, name: str) -> None:
    from sglang.srt.plugins.hook_registry import HookType

    registry.register(TARGET + name, _hook, HookType.AFTER)
    registry.register(TARGET + name, lambda original, *args: original(*args), HookType.AROUND)
    assert hook_check.unapplied_problem(registry) is not None
    registry.apply_hooks()
    hook_check.check_applied(registry)


def test_a_hook_on_a_target_patched_before_is_found_missing(registry: Any) -> None:
    """SGLang skips the target in silence when hooks are applied a second time."""
    from sglang.srt.plugins.hook_registry import HookType

    registry.register(TARGET + "method", lambda result, *args: result, HookType.AFTER)
    registry.apply_hooks()
    registry.register(TARGET + "method", _hook, HookType.AFTER)
    registry.apply_hooks()
    with pytest.raises(SystemExit, match=rf"could not hook {TARGET}method: disable other SGLang plugins"):
        hook_check.check_applied(registry)


def test_a_process_without_our_hooks_is_found(registry: Any) -> None:
    with pytest.raises(SystemExit, match="registered no hook.*SGLANG_PLUGINS"):
        hook_check.check_applied(registry)
