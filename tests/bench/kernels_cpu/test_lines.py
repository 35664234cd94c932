"""Each line of `make show-kernels` is MISSED when what it promises does not hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from evicbench import pytest_runs
from evicbench.kernels_cpu import compiled, interpreter

from sglang_evicpress.kernels import aot
from sglang_evicpress.kernels.aot import Report


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        (Counter(passed=3), True),
        (Counter(passed=3, failed=1), False),
        (Counter(passed=3, skipped=1), False),
        (Counter(passed=3, other=1), True),
        (Counter(other=1), False),
        (Counter(), False),
    ],
)
def test_what_failed_was_skipped_or_never_ran_is_missed(found: Counter[str], ok: bool) -> None:
    assert pytest_runs.verdict("x", "y", found).ok is ok


def test_outcomes_are_those_of_pytest(tmp_path: Path) -> None:
    path = tmp_path / "test_three.py"
    path.write_text(
        "import os, pytest\ndef test_a(): assert os.environ['TRITON_INTERPRET'] == '1'\n"
        "def test_b(): assert 0\ndef test_c(): pytest.skip('no')\n"
        "def test_d(): pytest.skip('this SGLang has none of it')\n"
    )
    found = pytest_runs.run_tests(str(path), interpreted=True)
    assert list(found.values()) == [Counter(passed=1, failed=1, skipped=1, other=1)]
    assert pytest_runs.together(found, "") == found.popitem()[1]


def test_a_file_whose_tests_do_not_start_is_not_silent(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="pytest .* ended with"):
        pytest_runs.run_tests(str(tmp_path / "test_none.py"), "--no-such-option")


def test_a_launcher_is_what_has_a_torch_reference_beside_it() -> None:
    def move() -> None: ...

    module = ModuleType("m")
    vars(module).update(_move_kernel=None, move=move, move_torch=move, lost_torch=move, other=move)
    assert interpreter.parts(module) == (["_move_kernel"], ["move"])
    assert interpreter.structure().ok


@pytest.mark.parametrize(
    ("ptx", "order"),
    [
        ("ld.global.v4.b32 a; bar.sync 0; st.global.v4.b32 b; st.global.v4.b32 c;", "ld bar st"),
        ("ld.global.L1::evict_last.v4.b32 a; st.global.v4.b32 b; bar.sync 0;", "ld st bar"),
        ("ld.global.b32 a; bar.sync 0;", "bar"),
    ],
)
def test_the_order_of_wide_accesses_is_read_from_the_assembly(ptx: str, order: str) -> None:
    assert aot._order(ptx) == order


def report(**fields: Any) -> Report:
    found: dict[str, Any] = {"kernel": "compact", "arch": "sm_90a", "head_dim": 64, "dtype": "bf16", "registers": 40}
    found |= {"order": "ld bar st", "arithmetic": ""}
    found |= {"spill_bytes": 0, "shared_bytes": 0, "load_bits": 128, "store_bits": 128}
    return Report(**{**found, **fields})


def every(**fields: Any) -> list[Report]:
    return [
        report(**{"arch": f"sm_{arch}a", "head_dim": dim, "dtype": dtype, **fields})
        for arch in compiled.ARCHS
        for dim in compiled.HEAD_DIMS
        for dtype in ("bf16", "fp16")
    ]


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({}, []),
        ({"order": "bar ld bar st bar"}, []),
        ({"order": "ld bar st ld st"}, [4]),
        ({"spill_bytes": 8}, [0, 1, 2]),
        ({"store_bits": 32}, [3]),
        ({"load_bits": 16}, [3]),
        ({"order": "ld st bar"}, [4]),
    ],
)
def test_spills_narrow_accesses_and_a_missing_barrier_are_missed(change: dict[str, Any], missed: list[int]) -> None:
    lines = list(compiled.lines(every(**change), ["compact"]))
    assert [number for number, line in enumerate(lines) if not line.ok] == missed


def test_a_kernel_that_was_not_compiled_for_a_target_is_missed() -> None:
    assert not all(line.ok for line in compiled.lines(every()[:-1], ["compact"]))
    assert not any(line.ok for line in list(compiled.lines(every(), ["compact", "gather"]))[:3])
    assert {"compact", "gather", "scatter", "select_survivors", "window_normalizer"} <= set(compiled.device_kernels())
