"""ServerArgs as a struct, from SGLang 0.5.22 on: flags beside its fields, sealed with them."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from tests.contract.releases import resolved_arguments

from sglang_evicpress import spawn
from sglang_evicpress.patches import install, kv_flags, server_args, unsupported
from sglang_evicpress.patches.compat import arguments_0_5_23
from sglang_evicpress.patches.compat.arguments import ARGUMENTS
from sglang_evicpress.patches.unsupported import UnsupportedError

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.skipif(ARGUMENTS is not arguments_0_5_23, reason="ServerArgs of this SGLang is a dataclass"),
]


@pytest.fixture(autouse=True)
def flags(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The flags, without the HTTP hooks."""
    monkeypatch.setattr(install, "install_frontend", lambda: None)
    monkeypatch.setattr(spawn, "requested", False)
    server_args.add_flags()
    yield


def _given(**values: Any) -> Any:
    from sglang.srt.server_args import ServerArgs

    given = ServerArgs(model_path="dummy", device="cpu")
    for name, value in values.items():
        setattr(given, name, value)
    return given


def test_who_makes_one_sets_attributes() -> None:
    given = _given(kv_policy="lru", kv_sinks=2)
    given.resolve_once()
    assert ARGUMENTS.chosen(given).radix_cache_backend == "evicpress"
    assert kv_flags.config_of(pickle.loads(pickle.dumps(given))).sinks == 2


def test_keywords_are_refused_by_name() -> None:
    from sglang.srt.server_args import ServerArgs

    with pytest.raises(TypeError, match="kv_policy"):
        ServerArgs(model_path="dummy", kv_policy="lru")


def test_flags_are_sealed_as_fields_are() -> None:
    given = _given(kv_policy="lru")
    given.resolve_once()
    with pytest.raises(AttributeError, match="kv_policy"):
        given.kv_policy = "lfu"


def test_what_sglang_chose_is_checked_and_stays_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    given = _given(kv_policy="lru")
    real, calls = unsupported.check, []

    def check(checked: object, config: Any) -> None:
        calls.append(checked)
        if len(calls) == 2:
            raise UnsupportedError("no: do")
        real(checked, config)

    monkeypatch.setattr(unsupported, "check", check)
    with pytest.raises(UnsupportedError, match="no: do"):
        given.resolve_once()
    assert isinstance(calls[1], arguments_0_5_23.Chosen)
    with pytest.raises(RuntimeError, match="resolution already failed"):
        given.resolve_once()


def test_what_is_refused_before_can_be_mended() -> None:
    given = _given(kv_policy="lru", disable_radix_cache=True)
    with pytest.raises(UnsupportedError, match="--disable-radix-cache"):
        given.resolve_once()
    given.disable_radix_cache = False
    given.resolve_once()


def test_a_decision_is_read_and_not_what_was_given() -> None:
    from sglang.srt.arg_groups.overrides import declare_resolution

    given = _given()
    declare_resolution(given, "test", page_size=64)
    assert (given.page_size, ARGUMENTS.chosen(given).page_size) == (None, 64)
    with pytest.raises(AttributeError, match="no_such_argument"):
        _ = ARGUMENTS.chosen(given).no_such_argument


def test_an_engine_imported_before_plugins_are_loaded_takes_flags() -> None:
    code = (
        "from sglang.srt.entrypoints.engine import Engine, load_plugins\n"
        "load_plugins()\n"
        "print(Engine.server_args_class(model_path='dummy', kv_sinks=3).kv_sinks)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert "--kv-sinks does nothing without --kv-policy" in done.stderr.splitlines()[-1], done.stderr


def test_an_engine_without_flags_makes_what_it_made() -> None:
    plain = resolved_arguments(model_path="dummy", device="cpu")
    assert plain.kv_policy is None and plain == _given()
