"""``evicpress profile show``: what is listed and drawn, from a server and from a file, and what is not found."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.profiler.fake_server import IDENTITY, FakeServer, serving

from sglang_evicpress.cli.main import main
from sglang_evicpress.cli.profile.plot import COLUMNS, MARKS, ROWS, plot
from sglang_evicpress.core import PRESSES, Form
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.quality.store import ProfileStore

QUALITIES = {"keydiff@0.8": [1.0, 0.98], "keydiff@0.5": [0.9, 0.8], "knorm@0.5": [0.5, 0.5], "snapkv@0.2": [0.25]}
OTHER = bytes(16)


def profile_of(key: bytes, qualities: dict[str, list[float]] = QUALITIES) -> Profile:
    forms = {Form.parse(form): RunningStats.of(values) for form, values in qualities.items()}
    return Profile(key, 640, forms, "logprob", "0" * 16, 2, 1.7e9)


FIRST, SECOND = profile_of(bytes.fromhex("ab" * 16)), profile_of(bytes.fromhex("acab" * 8))


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as server:
        server.profiles = {profile.key.hex(): profile.to_json() for profile in (FIRST, SECOND)}
        yield server


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "profiles"
    for identity, profile in ((IDENTITY, FIRST), (OTHER, SECOND)):
        store = ProfileStore(path, identity)
        store.put(profile)
    return path


def figures(text: str) -> dict[str, list[str]]:
    """The rows of the table by form."""
    rows = [line.split() for line in text.splitlines() if re.match(r"\w+@", line)]
    return {row[0]: row[1:] for row in rows}


def test_a_server_lists_its_profiles(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "--url", server.url]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0][:5] == ["context", "tokens", "forms", "scorer", "queries"]
    assert [line[:5] for line in lines[1:]] == [
        ["abababababab", "640", "4", "logprob", "2"],
        ["acabacabacab", "640", "4", "logprob", "2"],
    ]
    assert lines[1][-1] == IDENTITY.hex()[:8]


def test_a_file_lists_those_of_every_model_and_is_not_changed(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = file.read_bytes()
    assert main(["profile", "show", "--store", str(file)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [(line[0], line[-1]) for line in lines[1:]] == [
        ("abababababab", IDENTITY.hex()[:8]),
        ("acabacabacab", OTHER.hex()[:8]),
    ]
    assert file.read_bytes() == before


def test_one_context_is_plotted_with_its_figures(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "AB", "--url", server.url]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"context {'ab' * 16}, 640 tokens\n")
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert list(figures(text)) == ["keydiff@0.8", "keydiff@0.5", "knorm@0.5", "snapkv@0.2"]
    assert figures(text)["keydiff@0.5"] == ["0.850", f"{math.sqrt(0.005):.3f}", "2", "0.840"]


def test_a_file_knows_what_quality_is_hardly_below(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "abab", "--store", str(file)]) == 0
    mean, _, _, bound = figures(capsys.readouterr().out)["keydiff@0.5"]
    assert 0.0 < float(bound) < float(mean) == 0.85


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("a", f"2 contexts begin with a: expected one of {'ab' * 16}, {'acab' * 8}"),
        ("ff", "no context of 2 begins with ff"),
        ("xyz", "'xyz' is no hash"),
        ("ab" * 17, "is no hash"),
    ],
)
def test_a_hash_that_names_no_one_context_is_an_error(
    file: Path, capsys: pytest.CaptureFixture[str], start: str, said: str
) -> None:
    assert main(["profile", "show", start, "--store", str(file)]) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.err.count("\n") == 1


def test_nothing_there_is_said(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.profiles.clear()
    assert main(["profile", "show", "--url", server.url]) == 0
    assert capsys.readouterr().out == "no profiles\n"


def test_a_damaged_file_and_none_at_all_are_status_2(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_bytes(b"noise" + file.read_bytes())
    assert main(["profile", "show", "--store", str(file)]) == 2
    assert f"profile store {file} cannot be read (no database)" in capsys.readouterr().err
    assert main(["profile", "show", "--store", f"{file}-none"]) == 2
    assert main(["profile", "show", "--url", "http://127.0.0.1:1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["show"],
        ["show", "ab", "--url", "http://a", "--store", "b"],
        ["show", "--store", "b", "--png", "c.png"],
        ["show", "ab", "--store", "b", "--png", "c.svg"],
        ["show", "ab", "--store", "b", "--png", "/none/c.png"],
    ],
)
def test_bad_usage_is_one_line_and_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_picture_is_drawn(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "curve.png"
    assert main(["profile", "show", "ab", "--store", str(file), "--png", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out == ""
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".evicpress")] == []


def grid_of(profile: Profile) -> list[str]:
    return [line[8:].ljust(COLUMNS - 8) for line in plot(profile)[1 : ROWS + 1]]


def test_marks_stand_where_the_qualities_are() -> None:
    grid = grid_of(FIRST)
    assert grid[0][-1] == "="
    assert [(row, line.index("S")) for row, line in enumerate(grid) if "S" in line] == [(ROWS - 1, round(0.2 * 71))]
    (knorm,) = [row for row, line in enumerate(grid) if "N" in line]
    assert knorm == round(0.5 / 0.75 * (ROWS - 1))
    assert sum(line.count("K") for line in grid) == 2


def test_presses_that_meet_are_a_star() -> None:
    grid = grid_of(profile_of(bytes(16), {"keydiff@0.5": [0.9], "knorm@0.5": [0.9]}))
    assert sum(line.count("*") for line in grid) == 1
    assert not any(mark in line for mark in "KN" for line in grid)


QUALITY = st.floats(0.0, 1.0)
FORMS = st.builds(Form, st.sampled_from(sorted(PRESSES)), st.floats(0.01, 0.99))


@given(st.dictionaries(FORMS, st.lists(QUALITY, min_size=1, max_size=3), min_size=1, max_size=12))
def test_any_profile_fits_the_terminal_with_every_form_on_it(qualities: dict[Form, list[float]]) -> None:
    forms = {form: RunningStats.of(values) for form, values in qualities.items()}
    forms = {
        form: RunningStats(seen.count, min(max(seen.mean, 0.0), 1.0), seen.squares) for form, seen in forms.items()
    }
    lines = plot(Profile(bytes(16), 64, forms, "logprob", "0" * 16, 1, 0.0))
    assert max(map(len, lines)) <= COLUMNS
    grid = "".join(line[8:] for line in lines[1 : ROWS + 1])
    for press in {form.press for form in forms}:
        assert MARKS[str(press)] in grid or "*" in grid


def test_every_press_has_a_mark_of_its_own() -> None:
    assert set(MARKS) == set(PRESSES)
    assert len(set(MARKS.values())) == len(MARKS)


def test_the_command_line_loads_nothing_of_the_profiler_before_it_is_asked_for() -> None:
    program = (
        "import sys, sglang_evicpress.cli.main; "
        "print([m for m in sys.modules if 'sglang_evicpress.' in m and 'profile' in m or m == 'orjson'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
