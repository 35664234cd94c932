"""Commands in docs, README and CONTRIBUTING: their flags and values, make targets, routes; cheap ones are run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from sglang_evicpress import config as settings
from sglang_evicpress.cli.command import COMMANDS, split_name
from sglang_evicpress.cli.main import main
from sglang_evicpress.cli.replay.flags import make_parser as replay_parser
from sglang_evicpress.patches import server_args
from sglang_evicpress.patches.http.dashboard import PATHS
from sglang_evicpress.patches.http.routes import find_route
from sglang_evicpress.patches.kv_flags import config_of
from sglang_evicpress.patches.unsupported import UNSUPPORTED

pytestmark = [pytest.mark.sglang]

ROOT = Path(__file__).parents[2]
PAGES = (*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
OTHERS = {"cd", "git", "pip"}
"""Commands that are not ours: only that they are meant is checked, by this list."""

SGLANG_PATHS = {"/metrics", "/generate", "/v1/completions", "/v1/chat/completions", "/flush_cache", "/health"}
PLACEHOLDERS = {"TRACE": "synthetic:rag", "HASH": "ab" * 16, "NODE": "7", "N": "8", "DIR": "/tmp", "SHELL": "bash"}
CHEAP = {"plan", "replay", "completion"}
FEW = ("--limit", "40")


@dataclass(frozen=True, slots=True)
class Written:
    """A command as a page has it, in words."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)[:70]}"


def blocks(text: str) -> Iterator[str]:
    """Lines of fenced blocks without a language, or of a shell, with those that go on joined."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S):
        if language in ("", "sh", "bash"):
            yield from block.replace("\\\n", " ").splitlines()


def commands(line: str) -> Iterator[tuple[str, ...]]:
    """Commands of a line, without where their output goes."""
    lexer = shlex.shlex(line.removeprefix("$ "), posix=True, punctuation_chars="|&;>")
    lexer.whitespace_split = True
    words = list[str]()
    skip = False
    for word in (*lexer, "&&"):
        if word in ("|", "&&", ";", "&"):
            if words:
                yield tuple(words)
            words = []
        elif not skip and word != ">":
            words.append(PLACEHOLDERS.get(word, word))
        skip = word == ">"


def written() -> list[Written]:
    found = []
    for page in PAGES:
        for line in blocks(page.read_text(encoding="utf-8")):
            if re.match(r"(\$ )?(evicpress|make|python|curl|[a-z-]+) ", line):
                found += [Written(page.name, words) for words in commands(line)]
    return found


def inline(first: str) -> list[Written]:
    """Commands that begin so within a sentence or a table."""
    found = []
    for page in PAGES:
        for text in re.findall(rf"`({first} [^`\n]+)`", page.read_text(encoding="utf-8")):
            found.append(Written(page.name, tuple(text.split())))
    return found


WRITTEN = written()
OURS = [each for each in WRITTEN if each.words[0] == "evicpress"]
SERVERS = [each for each in WRITTEN if each.words[:3] == ("python", "-m", "sglang.launch_server")]
CURLS = [each for each in WRITTEN if each.words[0] == "curl"]


def test_commands_of_every_kind_are_found() -> None:
    assert len(OURS) >= 7 and len(SERVERS) >= 6 and len(CURLS) >= 7
    unknown = [each for each in WRITTEN if each.words[0] not in {"evicpress", "python", "curl", "make", *OTHERS}]
    filters = [each for each in unknown if each.words[0] in ("grep", "jq", "head", "sort")]
    assert unknown == filters, "a command that this test does not know"


def parsed(words: Sequence[str]) -> None:
    name_rest = split_name(words)
    assert name_rest is not None, words
    name, rest = name_rest
    if name == "plan":
        args, others = COMMANDS[name].load_parser().parse_known_args(rest)
        replay_parser().parse_values([args.trace, "--gpu", "1%", *others])
    else:
        COMMANDS[name].load_parser().parse_values(rest)


@pytest.mark.parametrize("each", OURS, ids=str)
def test_a_command_of_ours_is_parsed(each: Written) -> None:
    parsed(each.words[1:])


@pytest.mark.parametrize("each", [each for each in OURS if each.words[1] in CHEAP], ids=str)
def test_a_cheap_one_is_run(each: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # what it writes
    words = list(each.words[1:])
    if words[1].endswith((".jsonl", ".zst")):
        words[1] = "synthetic:rag"
    assert main([*words, *(() if words[0] == "completion" else FEW)]) == 0


@pytest.mark.parametrize("each", inline("evicpress"), ids=str)
def test_a_command_within_a_sentence_has_its_flags(each: Written) -> None:
    found = split_name(each.words[1:])
    assert found is not None, each
    text = COMMANDS[found[0]].load_parser().format_help()
    flags = re.findall(r"--[a-z-]+", " ".join(found[1]))
    assert [flag for flag in flags if not re.search(rf"{flag}\b", text)] == []


@pytest.fixture(scope="module")
def launch_parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    server_args.add_flags()
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    return parser


@pytest.mark.parametrize("each", SERVERS, ids=str)
def test_a_server_takes_its_flags(
    each: Written, launch_parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "memory_bytes", lambda: 2e12)  # of the machine that the page is about
    args = launch_parser.parse_args(each.words[3:])
    config = config_of(args)
    for row in UNSUPPORTED:
        value = getattr(args, row.attribute, None)
        assert value is None or not row.conflicts(value), (row.flag, value)
    assert config.ssd_dir is None or args.tp_size == 1 or config.host_gb != settings.AUTO


@pytest.mark.parametrize("each", CURLS, ids=str)
def test_a_route_takes_what_is_sent_to_it(each: Written) -> None:
    words = each.words[1:]
    url = next(word for word in words if word.startswith("localhost:") or "://" in word)
    url = url.replace("HASH", PLACEHOLDERS["HASH"])
    parts = urlsplit(url if "://" in url else f"http://{url}")
    data = words[words.index("-d") + 1] if "-d" in words else None
    method = words[words.index("-X") + 1] if "-X" in words else "GET" if data is None else "POST"
    if not parts.path.startswith("/evicpress"):
        assert parts.path in SGLANG_PATHS
        return
    if method == "GET" and parts.path in PATHS:  # the page and its events: no operation of the scheduler
        return
    operation, given = find_route(method, parts.path)
    body: dict[str, Any] = {} if data is None else json.loads(data)
    operation.read({**dict(parse_qsl(parts.query)), **body, **given})


def test_every_call_within_a_sentence_is_served() -> None:
    calls = {
        call
        for page in PAGES
        for call in re.findall(r"`(GET|POST) (/evicpress[\w/{}]*)[?`]", page.read_text(encoding="utf-8"))
    }
    unversioned = {path.replace("/v1/", "/") for path in PATHS}
    assert len(calls) >= 5
    for method, path in calls:
        assert (method == "GET" and path.replace("/v1/", "/") in unversioned) or find_route(method, path)


def targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    shows = re.search(r"^SHOWS := \$\(addprefix show-,(.+)\)$", text, re.M)
    assert shows is not None
    return {f"show-{name}" for name in shows[1].split()} | set(re.findall(r"^([a-z-]+):", text, re.M))


def test_every_target_of_make_is_there() -> None:
    asked = [*(each for each in WRITTEN if each.words[0] == "make"), *inline("make")]
    names = {word for each in asked for word in each.words[1:] if re.fullmatch(r"[a-z-]+", word)}
    assert len(names) > 10
    assert names - targets() == set()


def test_every_module_that_is_run_is_there() -> None:
    asked = [*(each for each in WRITTEN if each.words[:2] == ("python", "-m")), *inline("python -m")]
    names = {each.words[2] for each in asked}
    assert [name for name in names if importlib.util.find_spec(name) is None] == []


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_helps(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*name.split(), "--help"])
    assert stopped.value.code == 0 and f"usage: evicpress {name}" in capsys.readouterr().out
