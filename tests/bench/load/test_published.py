"""The grid as it was published, and when it no longer counts."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
from evicbench.load import measurements
from evicbench.load.grid import GRID
from evicbench.load.published import document, newest, publish, published_lines
from evicbench.load.repetitions import FILE, changed, read, repetitions_of, write
from evicbench.report import Line
from tests.unit.benchmark.loads import OURS, Runs, good_runs, write_load
from tests.unit.benchmark.loads import changed as other

from sglang_evicpress.benchmark.config import load_config
from sglang_evicpress.benchmark.results import Results, read_results

RATE = "requests/s at TTFT p95 <= 2x its own with one client and F1 >= 0.97, beside"
CONFIGS = Path(__file__).parents[3] / "bench" / "configs"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A repository of one commit."""
    root = tmp_path / "root"
    for name in ("python", "patches", "kernels", "bench"):
        (root / name).mkdir(parents=True)
        (root / name / "a.py").write_text("1\n")
    git(root, "init", "-q")
    commit(root)
    return root


def git(root: Path, *words: str) -> str:
    given = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(("git", *given, *words), cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def commit(root: Path) -> str:
    git(root, "add", "-A")
    git(root, "commit", "-q", "--allow-empty", "-m", "all")
    return git(root, "rev-parse", "HEAD")[:12]


def raw_at(folder: Path, sha: str, runs: Runs | None = None, **values: object) -> Results:
    write_load(folder, runs or good_runs(), **values)
    for path in folder.glob("runs/*/*.jsonl"):
        path.write_text(path.read_text().replace("0123456789ab", sha))
    return read_results(folder)


def test_what_is_published_is_read_back(tmp_path: Path, root: Path) -> None:
    sha = git(root, "rev-parse", "HEAD")[:12]
    results_by_name = [raw_at(tmp_path / "a", sha), raw_at(tmp_path / "b", sha, name="b")]
    path = publish(results_by_name, "make bench-load", results=tmp_path, root=root)
    text = path.read_text()
    assert f"`make bench-load` at commit `{sha}`" in text and "24 lines, 0 missed" in text
    for said in ("# b", "sglang 1.2.3", "a machine, 2 CPUs", "## Under load: 4/s, 1 x saturation", "## The knee"):
        assert said in text
    found = newest(tmp_path)
    assert (found.path, found.commit, len(found.lines)) == (path, sha, 24)
    lines = list(published_lines(tmp_path, root))
    assert all(line.ok and line.what.startswith(f"published {sha}: ") for line in lines)
    assert lines[0].figure == found.lines[0].figure and "3.00x" in lines[0].figure


def test_a_line_that_was_missed_stays_missed(tmp_path: Path, root: Path) -> None:
    sha = git(root, "rev-parse", "HEAD")[:12]
    raw_at(tmp_path / "a", sha)
    write_load(tmp_path / "a", other(good_runs(), OURS, 1.0, ttft_s=1.4))
    results = read_results(tmp_path / "a")
    (tmp_path / "load-2026-01-01.md").write_text(document([results], "c").replace("0123456789ab", sha))
    assert [line.ok for line in published_lines(tmp_path, root)].count(False) == 1


@pytest.mark.parametrize("name", ["python", "patches", "kernels"])
def test_published_lines_are_missed_once_the_code_changed(tmp_path: Path, root: Path, name: str) -> None:
    sha = git(root, "rev-parse", "HEAD")[:12]
    publish([raw_at(tmp_path / "a", sha)], "c", results=tmp_path, root=root)
    (root / "bench" / "b.py").write_text("2\n")
    commit(root)
    assert changed(sha, root) is None
    (root / name / "a.py").write_text("2\n")
    assert changed(sha, root) == f"python/, patches/ or kernels/ changed since {sha}"
    commit(root)
    lines = list(published_lines(tmp_path, root))
    assert not any(line.ok for line in lines) and "changed since" in lines[0].figure and "3.00x" in lines[0].figure
    (root / name / "a.py").write_text("1\n")
    assert changed(sha, root) is None
    (root / name / "new.py").write_text("1\n")
    assert changed(sha, root) == f"{name}/new.py is new since {sha}"


def test_a_commit_that_git_does_not_know_counts_as_changed(root: Path) -> None:
    assert changed("0123456789ab", root) == "git cannot compare with 0123456789ab"


def test_nothing_published_is_a_missed_line(tmp_path: Path) -> None:
    (line,) = published_lines(tmp_path)
    assert not line.ok and "none: make bench-load" in line.figure
    (tmp_path / "load-2026-01-01.md").write_text("# something else\n")
    with pytest.raises(ValueError, match="names no commit or has no lines"):
        newest(tmp_path)


def test_only_a_whole_grid_of_one_clean_commit_is_published(tmp_path: Path) -> None:
    results = raw_at(tmp_path / "a", "0123456789ab")
    two = raw_at(tmp_path / "b", "ba9876543210")
    with pytest.raises(ValueError, match="of 0123456789ab, ba9876543210: expected one commit"):
        document([results, two], "c")
    with pytest.raises(ValueError, match="0123456789ab-dirty: expected one commit"):
        document([raw_at(tmp_path / "c", "0123456789ab-dirty")], "c")
    (tmp_path / "a" / "runs" / "tiers-lru" / "1-4.jsonl").unlink()
    with pytest.raises(ValueError, match="lacks 1 runs"):
        document([read_results(tmp_path / "a")], "c")


def test_what_was_not_measured_is_a_missed_line(tmp_path: Path, root: Path) -> None:
    sha = git(root, "rev-parse", "HEAD")[:12]
    results = raw_at(tmp_path / "a", sha, good_runs(1))
    publish([results], "c", ["elsewhere"], results=tmp_path, root=root)
    missed = [line for line in published_lines(tmp_path, root) if not line.ok]
    assert [(line.what.split(": ", 1)[1], line.target, line.figure) for line in missed] == [
        (f"{results.plan['config']['name']}: repetitions", "3", "1"),
        ("elsewhere: repetitions", "3", "not measured"),
    ]


def test_repetitions_of_another_time_count_though_saturation_differs(tmp_path: Path, root: Path) -> None:
    first, slower = commit(root), other(good_runs(1), OURS, 1.0, ttft_s=0.25)
    publish(
        [raw_at(tmp_path / "a", first, good_runs(1)), raw_at(tmp_path / "c", first, good_runs(1), name="c")],
        "c",
        (),
        tmp_path,
        root,
    )
    (root / "bench" / "b.py").write_text("2\n")
    second = commit(root)
    now = raw_at(tmp_path / "b", second, slower, saturation=6.0, begin_s=1.9e9)
    for _ in range(2):  # again is the same
        path = publish([now], "c", ["c", "d"], tmp_path, root)
    found = {line.what.removeprefix("made-up: "): line for line in newest(tmp_path).lines}
    assert [found[name].figure for name in ("repetitions", "c: repetitions", "d: repetitions")] == [
        "2",
        "1",
        "not measured",
    ]
    (mean,) = (line for what, line in found.items() if what.startswith("mean TTFT"))
    assert "4, 6/s, 1 x saturation: 10.50x (15.00, 6.00; keydiff@0.8+lru)" in mean.figure
    (held,) = (line for what, line in found.items() if what.startswith(f"{RATE} the best fixed"))
    assert held.target == ">= 1.3x in 2 of 2 repetitions"
    text = path.read_text()
    assert f"| made-up | 1 | 2027-01-15 08:00 | {first} | 4 | sglang 1.2.3" in text
    assert f"| made-up | 2 | 2030-03-17 17:46 | {second} | 6 | sglang 1.2.3" in text


def test_answers_fall_within_a_repetition(tmp_path: Path, root: Path) -> None:
    """Answers of a repetition with more saturation are not beside those of another."""
    slow = other(good_runs(1), OURS, 2.0, answers_rps=3.7)
    publish([raw_at(tmp_path / "a", commit(root), slow)], "c", (), tmp_path, root)
    (root / "bench" / "b.py").write_text("2\n")
    now = good_runs(2)
    for system in dict.fromkeys(key[0] for key in now):
        now = other(now, system, 2.0, answers_rps=6.0)
    now = other(other(now, OURS, 2.0, 0, answers_rps=5.5), OURS, 2.0, 1, answers_rps=6.0)
    publish([raw_at(tmp_path / "b", commit(root), now, saturation=6.0, begin_s=1.9e9)], "c", (), tmp_path, root)
    (line,) = (each for each in newest(tmp_path).lines if each.what == "made-up: answers/s of evicpress")
    assert f"{OURS} -7.5% (2.0, 4.0, 3.7; 3.0, 6.0, 5.5; 3.0, 6.0, 6.0)" in line.figure and not line.ok


def test_a_repetition_that_was_only_begun_does_not_count(tmp_path: Path, root: Path) -> None:
    results = raw_at(tmp_path / "a", commit(root), good_runs(2))
    results.plan["config"]["repetitions"] = 1
    publish([results], "c", results=tmp_path, root=root)
    assert [line.figure for line in newest(tmp_path).lines if line.what.endswith(": repetitions")] == ["1"]
    assert len(json.loads((tmp_path / FILE).read_text())) == 1


@pytest.mark.parametrize("name", ["python/a.py", "bench/configs/made-up.yaml", "bench/evicbench/testbed/tasks.py"])
def test_a_repetition_of_other_code_or_of_another_config_counts_no_more(
    tmp_path: Path, root: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("3\n")
    first = commit(root)
    results = raw_at(tmp_path / "a", first, good_runs(1))
    publish([results], "c", results=tmp_path, root=root)
    path.write_text("4\n")
    (found,) = read(tmp_path, first, root)
    assert found == next(repetitions_of(results))
    second = commit(root)
    capsys.readouterr()
    assert read(tmp_path, second, root) == []
    said = capsys.readouterr().out
    assert said.startswith(f"made-up: repetition 1 of {first} counts no more: ") and f"changed since {first}" in said
    publish([raw_at(tmp_path / "b", second, good_runs(1), begin_s=1.9e9)], "c", results=tmp_path, root=root)
    assert [line.figure for line in newest(tmp_path).lines if line.what.endswith(": repetitions")] == ["1"]


def test_an_endless_time_is_kept(tmp_path: Path, root: Path) -> None:
    results = raw_at(tmp_path / "a", commit(root), good_runs(1))  # above saturation requests are cut
    write(tmp_path, repetitions_of(results))
    (found,) = read(tmp_path, commit(root), root)
    assert found.at(OURS, 2.0).ttft_p95_of_all_s == math.inf and found.at(OURS, 0.0).rate == 0.0


def test_a_file_of_something_else_is_named(tmp_path: Path, root: Path) -> None:
    assert read(tmp_path, "HEAD", root) == []
    for text in ("[{}]", "no JSON"):
        (tmp_path / FILE).write_text(text)
        with pytest.raises(ValueError, match=f"{FILE} cannot be read: expected what --publish writes"):
            read(tmp_path, "HEAD", root)


def test_one_client_is_compared_with_the_published_ratio() -> None:
    lines = (
        Line("load-mooncake: one client, mean", "reported", "9.000x", True),
        Line("load-outside: one client, mean", "reported", "0.800x", True),
    )
    assert measurements.published_ratio(lines) == 0.8
    assert measurements.published_ratio(lines[:1]) is None
    assert measurements.beside_published(0.91, 0.8).ok
    slower = measurements.beside_published(0.93, 0.8)
    assert not slower.ok and "1.16x: 0.930 against 0.800" in slower.figure
    assert not measurements.beside_published(0.8, None).ok
    assert not measurements.beside_published(None, 0.8).ok


def test_the_settings_are_as_promised() -> None:
    configs = {name: load_config(CONFIGS / f"{name}.yaml") for name in (*GRID, measurements.SHOW)}
    assert measurements.OUTSIDE in configs
    assert len({config.workload.seed for config in configs.values()}) == len(configs)
    for name, config in configs.items():
        assert config.load.reference in {f"evicpress a={alpha:g}" for alpha in config.alphas}
        assert {1.0, 2.0} <= set(config.load.of_saturation) and 0.0 in config.rates
        assert (0.5 in config.load.of_saturation) == (name != "load-refusing")
        assert (config.policy_flags == ("--kv-max-queue-seconds", f"{config.ttft_limit_s:g}")) == (
            name == "load-refusing"
        )
        assert str(config.workload.seed) in config.workload.contexts.command
        assert (config.load.seconds, config.repetitions) == ((30, 2) if name == measurements.SHOW else (60, 3))
