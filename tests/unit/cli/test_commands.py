"""All commands alike: bad input is one line and status 2, ``--json`` is there, and a shell completes them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from sglang_evicpress.cli.command import COMMANDS, make_parser, split_name
from sglang_evicpress.cli.main import main

ROOT = Path(__file__).parents[3]
COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_shtab_evicpress
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.parametrize("name", COMMANDS)
def test_a_flag_that_is_not_known_is_one_line_and_status_2(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    COMMANDS[name].load_run()  # torch may warn while it is imported
    capsys.readouterr()
    assert main([*name.split(), "--no-such-flag"]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("evicpress: error: ") and output.err.count("\n") == 1


@pytest.mark.parametrize("words", [[], ["nothing"], ["bench"], ["bench", "nothing"], ["calibrate"], ["--nothing"]])
def test_no_command_is_one_line_and_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1


def test_every_command_that_prints_a_result_takes_json() -> None:
    without = {name for name, command in COMMANDS.items() if "--json" not in command.load_parser().format_help()}
    assert without == {"completion"}, "it prints a script"


def test_every_help_names_the_exit_status() -> None:
    parsers = {name: command.load_parser().format_help() for name, command in COMMANDS.items()}
    assert [name for name, text in parsers.items() if "Exit status: 0" not in text] == []


def test_the_longest_name_is_the_command() -> None:
    assert split_name(["search", "expand", "x"]) == ("search expand", ["x"])
    assert split_name(["search", "--out", "x"]) == ("search", ["--out", "x"])
    assert split_name(["bench"]) is None and split_name([]) is None


def test_the_page_lists_every_command() -> None:
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    listed = {
        " ".join(re.sub(r"[A-Z|\[\]]+", " ", name).split())
        for name in re.findall(r"^\| `evicpress ([^`]+)`", text, re.M)
    }
    assert listed == set(COMMANDS)


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import shtab

    path = tmp_path_factory.mktemp("completion") / "evicpress.bash"
    path.write_text(shtab.complete(make_parser(with_flags=True), shell="bash"))
    return path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["pl"], {"plan"}),
        ([""], {name.split()[0] for name in COMMANDS}),
        (["profile", "sh"], {"show"}),
        (["calibrate", ""], {"geometry"}),
        (["plan", "--gp"], {"--gpu"}),
        (["tree", "--j"], {"--json"}),
        (["bench", "serve", "--conf"], {"--config"}),
        (["search", "expand", "--t"], {"--target"}),
        (["search", "--press", "key"], {"keydiff"}),
        (["completion", ""], {"bash", "zsh", "tcsh"}),
        (["tree", "--no"], set()),
    ],
)  # fmt: skip
def test_bash_completes(script: Path, words: list[str], expected: set[str]) -> None:
    command = ["bash", "-c", COMPLETE, "bash", str(script), "evicpress", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert set(done.stdout.split()) == expected


def test_the_script_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef evicpress")
    assert main(["completion", "fish"]) == 2
    assert "'fish'" in capsys.readouterr().err
