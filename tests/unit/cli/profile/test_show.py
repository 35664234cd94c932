"""``evicpress profile show``: lists, plots, and what is not found."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.profiler.fake_server import IDENTITY, FakeServer, serving

from sglang_evicpress.cli.main import main
from sglang_evicpress.cli.profile.plot import COLUMNS, MARKS, ROWS, plot
from sglang_evicpress.core import PRESSES, Form
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.running_stats import RunningStats

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


def test_one_context_is_plotted_with_its_figures(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "AB", "--url", server.url]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"context {'ab' * 16}, 640 tokens\n")
    assert max(map(len, text.splitlines())) <= COLUMNS
    assert list(figures(text)) == ["keydiff@0.8", "keydiff@0.5", "knorm@0.5", "snapkv@0.2"]
    assert figures(text)["keydiff@0.5"] == ["0.850", f"{math.sqrt(0.005):.3f}", "2", "0.840"]


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
    server: FakeServer, capsys: pytest.CaptureFixture[str], start: str, said: str
) -> None:
    assert main(["profile", "show", start, "--url", server.url]) == 2
    output = capsys.readouterr()
    assert said in output.err
    assert output.err.count("\n") == 1


def test_nothing_there_is_said(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.profiles.clear()
    assert main(["profile", "show", "--url", server.url]) == 0
    assert capsys.readouterr().out == "no profiles\n"


def test_no_server_and_an_odd_one_are_status_2(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show", "--url", "http://127.0.0.1:1"]) == 2
    assert "cannot be reached" in capsys.readouterr().err
    server.profiles["ab" * 16]["num_tokens"] = "many"
    assert main(["profile", "show", "--url", server.url]) == 2
    assert "GET /evicpress/profiles answered {" in capsys.readouterr().err


def test_bad_usage_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "show"]) == 2
    assert capsys.readouterr().err == "evicpress: error: the following arguments are required: --url\n"


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
