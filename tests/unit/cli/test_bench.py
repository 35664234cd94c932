"""``evicpress bench serve`` up to the first server: what it refuses, what it chooses, and Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sglang_evicpress.benchmark.config import Config, load_config
from sglang_evicpress.benchmark.contexts import Context
from sglang_evicpress.benchmark.systems import expand, sizes_of
from sglang_evicpress.cli import bench
from sglang_evicpress.cli.bench import check_pool, choose
from sglang_evicpress.cli.main import main
from sglang_evicpress.profiler.contexts import GivenQuestion as Question

INTERRUPTING = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(0.2)"


def write(folder: Path, **values: object) -> Path:
    (folder / "in.jsonl").write_text(json.dumps({"context": "a", "questions": ["q"], "tokens": 1000}) + "\n")
    given = {
        "model": "org/name",
        "server": "--device cpu",
        "kv_bytes_per_token": 10,
        "contexts": {"file": "in.jsonl"},
        "requests": 1,
        "memory": {"gpu": 2},
        **values,
    }
    (folder / "c.yaml").write_text(yaml.safe_dump(given))
    return folder / "c.yaml"


def serve(folder: Path, config: Path, *words: str) -> int:
    return main(["bench", "serve", "--config", str(config), "--out", str(folder / "out"), *words])


def make(folder: Path, **values: object) -> Config:
    return load_config(write(folder, **values))


def test_systems_are_chosen_by_name_or_kind_in_the_order_they_have(tmp_path: Path) -> None:
    config = make(tmp_path, alphas=[1, 3], presses=["keydiff"], kept=[0.5, 0.2])
    systems = expand(config, sizes_of(config, 1000, 10), tmp_path)
    assert [system.name for system in choose(systems, "evicpress, lru")] == ["lru", "evicpress a=1", "evicpress a=3"]
    assert [system.name for system in choose(systems, "evicpress a=3,keydiff@0.2+lru")] == [
        "keydiff@0.2+lru",
        "evicpress a=3",
    ]
    with pytest.raises(ValueError, match="--systems 'evicpress a=2': expected some of full-cache, .*evicpress a=1"):
        choose(systems, "evicpress a=2")


def test_the_longest_context_must_fit_in_the_pool(tmp_path: Path) -> None:
    contexts = [Context("a", (Question("q", None),), "all", tokens) for tokens in (400, 1000)]
    enough = make(tmp_path, memory={"gpu": 0.91}, max_new_tokens=16)
    check_pool(enough, sizes_of(enough, 1400, 10), contexts)
    short = make(tmp_path, memory={"gpu": 0.9}, max_new_tokens=16)
    with pytest.raises(ValueError, match="is a pool of 1260: expected at least 1272"):
        check_pool(short, sizes_of(short, 1400, 10), contexts)


@pytest.mark.parametrize(
    ("values", "words", "said"),
    [
        ({"requests": 0}, (), "c.yaml: requests is 0"),
        ({}, ("--repetitions", "0"), "--repetitions 0: expected at least 1"),
        ({}, ("--repetitions", "x"), "invalid int value: 'x'"),
        ({}, ("--systems", "lur"), "--systems 'lur': expected some of full-cache"),
        ({"memory": {"gpu": 0.5}}, (), "is a pool of 500: expected at least"),
        ({"contexts": {"command": "false"}}, (), "'false' in .* ended with 1"),
        ({"memory": {"gpu": 2, "host": 1}}, (), "memory host of 1000 tokens, in GB, is 1e-05"),
    ],
)
def test_bad_input_is_one_line_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], values: dict[str, object], words: tuple[str, ...], said: str
) -> None:

    assert serve(tmp_path, write(tmp_path, **values), *words) == 2
    printed = capsys.readouterr()
    assert re.search(said, printed.err) and printed.err.count("\n") == 1 and not printed.out
    assert not (tmp_path / "out" / "plan.json").exists()


def test_sigterm_has_the_status_of_that_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt(int(signal.SIGTERM))

    monkeypatch.setattr(bench, "load_contexts", interrupted)
    assert serve(tmp_path, write(tmp_path)) == 143


def test_ctrl_c_is_one_line_that_says_that_the_same_command_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write(tmp_path, contexts={"command": ["python", "-c", INTERRUPTING]})
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        assert serve(tmp_path, config) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    err = capsys.readouterr().err
    assert "interrupted" in err and "the same command goes on" in err and err.count("\n") == 1


def test_what_goes_on_after_a_fresh_run_is_the_command_without_fresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    config = write(tmp_path)
    for name, words, said in (
        ("run_all", (), "and the same command goes on"),
        ("run_all", ("--fresh",), "and the same command without --fresh goes on"),
        ("load_contexts", ("--fresh",), "and the same command goes on"),  # nothing was moved away yet
    ):
        monkeypatch.setattr(bench, name, interrupted)
        assert serve(tmp_path, config, *words) == 130
        assert said in capsys.readouterr().err


def test_the_example_of_the_help_names_systems_that_there_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--help"])
    names = re.search(r"--systems (\S+)\n", capsys.readouterr().out.partition("example:")[2])
    config = make(tmp_path)
    assert names is not None and len(choose(expand(config, sizes_of(config, 1000, 10), tmp_path), names[1])) >= 3


def test_a_server_that_does_not_start_is_status_1_and_its_log_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another package of the name stands before SGLang."""
    (tmp_path / "before" / "sglang").mkdir(parents=True)
    (tmp_path / "before" / "sglang" / "__init__.py").touch()
    (tmp_path / "before" / "sglang" / "launch_server.py").write_text("import sys; sys.exit('no weights')\n")
    config = write(tmp_path, systems=["lru"], env={"PYTHONPATH": str(tmp_path / "before")})
    assert serve(tmp_path, config) == 1
    err = capsys.readouterr().err
    assert "its log is" in err and "no weights" in err
    assert (tmp_path / "out" / "plan.json").exists() and not list((tmp_path / "out").glob("runs/*/*.jsonl"))


def test_help_imports_nothing_of_the_benchmark() -> None:
    code = (
        "import sys; from sglang_evicpress.cli.main import main\n"
        "try: main(['bench', 'serve', '--help'])\n"
        "except SystemExit: pass\n"
        "found = [name for name in sys.modules if name in ('numpy', 'yaml', 'aiohttp') or '.benchmark' in name]\n"
        "sys.exit(f'imported {found}' if found else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0 and "--repetitions N" in done.stdout, done.stderr
