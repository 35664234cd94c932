"""`evicpress replay` as it is typed: figures computed by hand, every bad flag, Ctrl-C, files, and what is imported."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.unit.traces.written import write_trace

from sglang_evicpress import __version__
from sglang_evicpress.cli.main import main
from sglang_evicpress.files import WholeFile
from sglang_evicpress.simulator.replay import Outcome, Replay
from sglang_evicpress.traces import Request, Trace

# Blocks of 10 tokens; the prefix (1, 2) is used at once again, and once more after (3, 4) has taken its place.
REQUESTS = (
    Request(0.0, (1, 2), 20),
    Request(1.0, (1, 2), 25),
    Request(10.0, (3, 4), 20),
    Request(20.0, (1, 2), 20),
)
# A slot is a byte, a token takes 0.1 s to prefill, and 20 tokens fit.
TRANSFER_COSTS = (
    "--min-compress-tokens",
    "1",
    "--slot-bytes",
    "1",
    "--prefill",
    "0,0.1,0",
    "--host-bandwidth",
    "20B/s",
    "--gpu",
    "20",
)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "four.jsonl"
    write_trace(Trace("four", 10, REQUESTS), path)
    return str(path)


@pytest.fixture
def curves(tmp_path: Path) -> str:
    path = tmp_path / "curves.json"
    path.write_text('{"keydiff": {"0.5": 0.8}}', encoding="utf-8")
    return str(path)


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rows(printed: str) -> list[dict[str, str]]:
    """The table by its names: cells are apart by two spaces or more."""
    lines = printed.split("\n\n")[1].splitlines()
    names = [name for name in lines[0].split("  ") if name]
    return [
        dict(zip(map(str.strip, names), (cell.strip() for cell in line.split("  ") if cell), strict=True))
        for line in lines[1:]
    ]


def run(*words: str) -> int:
    return main(["replay", *words])


def test_lru_by_hand(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Prefill 20, hit 20 and prefill 5, prefill 20, prefill 20 again: 2 + 0.5 + 2 + 2 seconds."""
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS) == 0
    (row,) = rows(capsys.readouterr().out)
    assert row.pop("requests/min")
    assert row == {
        "policy": "lru",
        "alpha": "-",
        "TTFT s": "1.62",  # 1.625
        "p50": "2.00",
        "p95": "2.00",
        "lru/this": "1.00",
        "gpu %": "23.5",  # 20 of 85 tokens
        "prefilled %": "76.5",
        "quality": "1.0000",
        "hit quality": "1.0000",
        "served quality": "1.0000",
        "regret s": "0",
        "regret %": "0.00",
        "predicted s": "0",
        "predicted %": "0.00",
    }


def test_a_host_tier_by_hand(trace: str, tmp_path: Path) -> None:
    """The prefix comes back from the host: 0.0005 s and 20 bytes at 20 B/s, and one token is always prefilled."""
    out = tmp_path / "out.jsonl"
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS, "--host", "20", "--jsonl", str(out)) == 0
    (record,) = records(out)
    assert record["ttft"] == pytest.approx(
        {"mean_s": (2 + 0.5 + 2 + 1.1005) / 4, "p50_s": (1.1005 + 2) / 2, "p95_s": 2.0}
    )
    assert record["hit_share"] == pytest.approx({"gpu": 20 / 85, "host": 20 / 85})
    assert record["prefilled_share"] == pytest.approx(45 / 85)
    assert record["moved_bytes"] == {"gpu to host": 40, "host to gpu": 20}
    assert record["decisions"] == {"exact/host": 2}


def test_a_fixed_press_by_hand(trace: str, curves: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both prefixes fit at half the slots, so the last request hits at quality 0.8."""
    out = tmp_path / "out.jsonl"
    words = ("--policy", "lru,keydiff@0.5+lru", "--curves", curves, *TRANSFER_COSTS, "--jsonl", str(out))
    assert run(trace, *words) == 0
    lru, fixed = records(out)
    assert (lru["policy"], lru["hit_quality"], lru["lru_over_this"]) == ("lru", 1.0, 1.0)
    assert fixed["ttft"]["mean_s"] == pytest.approx((2 + 0.5 + 2 + 0.1) / 4)  # type: ignore[index]
    assert fixed["lru_over_this"] == pytest.approx(6.5 / 4.6)
    assert (fixed["quality"], fixed["hit_quality"]) == (pytest.approx(0.95), pytest.approx(0.9))
    assert [row["lru/this"] for row in rows(capsys.readouterr().out)] == ["1.00", "1.41"]


def test_layer_budgets_take_the_fullest_layer_on_the_gpu_and_their_mean_below(trace: str, tmp_path: Path) -> None:
    """4 layers keep, of 20 tokens, 19, 6, 3 and 3: 8 slots' bytes in host memory, 19 slots on the GPU."""
    budgets, out = tmp_path / "found.json", tmp_path / "out.jsonl"
    shares = {"num_layers": 4, "shares": [2.4, 0.8, 0.4, 0.4], "target": 10}
    budgets.write_text(json.dumps({"format": "evicpress-layer-budgets", "version": 1, **shares}))
    words = ("--policy", "evicpress", *TRANSFER_COSTS, "--host", "9", "--forms", f"keydiff@0.4:{budgets}")
    assert run(trace, *words, "--alpha", "0.1", "--recompute", "none", "--jsonl", str(out)) == 0
    (record,) = records(out)
    (form,) = record["settings"]["forms"]  # type: ignore[index]
    assert form.startswith("keydiff@0.4:found-")
    assert record["decisions"] == {f"{form}/host": 2}
    assert record["moved_bytes"] == {"gpu to host": 16, "host to gpu": 8}


def test_a_pyramid_needs_the_number_of_layers(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = (trace, "--policy", "evicpress", *TRANSFER_COSTS, "--forms", "keydiff@0.4:pyramid")
    assert run(*words) == 2
    says = "form keydiff@0.4:pyramid is spread over the layers of a model: expected --layers N"
    assert says in capsys.readouterr().err
    assert run(*words, "--layers", "32") == 0


def test_waiting_by_hand(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    """With one server the second request waits a second for the first."""
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS, "--servers", "1") == 0
    (row,) = rows(capsys.readouterr().out)
    assert (row["TTFT s"], row["alone s"]) == ("1.88", "1.62")  # 1.875 and 1.625


def test_a_load_becomes_servers(trace: str, tmp_path: Path) -> None:
    """85 tokens take 8.5 s, arrivals span 20 s."""
    out = tmp_path / "out.jsonl"
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS, "--servers", "load=0.5", "--jsonl", str(out)) == 0
    assert records(out)[0]["settings"]["num_servers"] == pytest.approx(0.85)  # type: ignore[index]


def test_each_quality_is_a_run_of_evicpress(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, "--policy", "evicpress,lru", "--quality", "0.9,1", *TRANSFER_COSTS) == 0
    found = [(row["policy"], row["alpha"]) for row in rows(capsys.readouterr().out)]
    assert found == [("evicpress", "for 0.9"), ("evicpress", "for 1"), ("lru", "-")]


def test_each_alpha_is_a_run_of_those_that_have_one(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trace, "--policy", "evicpress,lru,adaptcache", "--alpha", "0.5,4", *TRANSFER_COSTS) == 0
    found = [(row["policy"], row["alpha"]) for row in rows(capsys.readouterr().out)]
    pairs = list(itertools.product(("evicpress",), ("0.5", "4")))
    assert found == [*pairs, ("lru", "-"), ("adaptcache", "0.5"), ("adaptcache", "4")]


def test_belady_knows_the_future(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three prompts in turn where two fit: lru never hits, who knows the future does."""
    path = tmp_path / "turns.jsonl"
    write_trace(Trace("turns", 10, [Request(float(t), (t % 3,), 10) for t in range(30)]), path)
    assert run(str(path), "--policy", "lru,belady", *TRANSFER_COSTS) == 0
    lru, belady = (float(row["gpu %"]) for row in rows(capsys.readouterr().out))
    assert lru == 0.0
    assert belady > 40.0


def test_the_header_tells_how_to_do_it_again(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [trace, "--policy", "lru", *TRANSFER_COSTS, "--host", "50%", "--seed", "7"]
    assert run(*words) == 0
    header = capsys.readouterr().out.split("\n\n")[0]
    for text in (
        "four: 4 requests, blocks of 10 tokens",
        "40 tokens (40 B)",
        "gpu 20 tokens (20 B); host 20 tokens (20 B)",
        "prefill 0 + 0.1 n + 0 n (depth + n/2) s; host 0.0005 s + bytes / 20 B/s",
        "nothing waits",
        "seed 7",
        f"sglang-evicpress {__version__}",
        "evicpress replay " + " ".join(words),
    ):
        assert text in header


def test_the_same_command_gives_the_same_figures(tmp_path: Path) -> None:
    words = (
        "synthetic:rag:1",
        "--limit",
        "200",
        "--policy",
        "evicpress",
        "--gpu",
        "2%",
        "--host",
        "5%",
        "--noise",
        "0.2",
    )
    found = []
    for name in ("a.jsonl", "b.jsonl"):
        assert run(*words, "--seed", "3", "--jsonl", str(tmp_path / name)) == 0
        (record,) = records(tmp_path / name)
        found.append(
            {key: value for key, value in record.items() if key not in ("wall_s", "requests_per_minute", "settings")}
        )
    assert found[0] == found[1]


def test_one_line_for_each_request(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "requests.jsonl"
    assert run(trace, "--policy", "lru,lfu", *TRANSFER_COSTS, "--requests", str(out)) == 0
    lines = records(out)
    assert [(line["policy"], line["index"]) for line in lines] == list(itertools.product(("lru", "lfu"), range(4)))
    assert lines[1]["hit_tokens"] == {"gpu": 20}
    assert lines[1]["ttft_s"] == pytest.approx(0.5)


@pytest.mark.parametrize(("name", "start"), [("out.png", b"\x89PNG"), ("out.svg", b"<?xml")])
def test_plot(trace: str, tmp_path: Path, name: str, start: bytes) -> None:
    assert run(trace, *TRANSFER_COSTS, "--plot", str(tmp_path / name)) == 0
    assert (tmp_path / name).read_bytes().startswith(start)


def test_plot_without_matplotlib(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert run(trace, *TRANSFER_COSTS, "--plot", str(tmp_path / "out.png")) == 2
    printed = capsys.readouterr()
    assert "pip install 'sglang-evicpress[plot]'" in printed.err
    assert printed.out == ""


BAD = [
    (("--policy", "foo"), ("--policy", "'foo'", "evicpress, lru", "belady")),
    (("--policy", "lru,,lfu"), ("--policy", "''")),
    (("--policy", "keydiff@1.5+lru"), ("--policy", "'keydiff@1.5+lru'", "0 < KEPT < 1")),
    (("--gpu", "0"), ("--gpu", "'0'", "above 0")),
    (("--gpu", "3 parsecs"), ("--gpu", "'3 parsecs'", "30GiB", "500ktok", "1%")),
    (("--gpu", "1%%"), ("--gpu", "'1%%'")),
    (("--gpu", "1e3"), ("--gpu", "'1e3'")),
    *(
        ((flag, value), (f"{flag}: {value!r}: expected ",))
        for flag in ("--gpu", "--host", "--ssd")
        for value in ("-1%", "-30GB", "-.5", "inf", "-inf", "inf%", "nan", "nan%", "-nan")
    ),
    *(
        ((flag, value), (f"{flag}: {value!r}: expected ",))
        for flag in ("--host-bandwidth", "--ssd-bandwidth", "--alpha", "--noise", "--servers")
        for value in ("-1", "-1GB/s", "inf", "-inf", "nan")
    ),
    (("--servers", "load=inf"), ("--servers: 'load=inf': expected",)),
    (("--servers", "load=1e-320"), ("--servers: a load of", "endless servers: expected a larger share")),
    (("--prefill", "-1,0,0"), ("--prefill: '-1': expected",)),
    (("--prefill", "nan,0,0"), ("--prefill: 'nan': expected",)),
    (("--prefill", "0,inf,0"), ("--prefill: 'inf': expected",)),
    (("--prefill", "1e308,1e308,0"), ("--prefill: '1e308': expected", "at most 1e9")),
    (("--slot-bytes", "-1"), ("--slot-bytes: '-1': expected",)),
    (("--limit", "-1"), ("--limit: '-1': expected",)),
    (("--time-unit", "minutes"), ("--time-unit: 'minutes': expected one of s, ms, us, ns",)),
    (("--block-tokens", "0"), ("--block-tokens: '0': expected a whole number of at least 1",)),
    (("--block-tokens", "-512"), ("--block-tokens: '-512': expected",)),
    (("--block-tokens", "64"), ("four.jsonl, line 1: 'block_tokens' is 10: expected 64",)),
    (("--gpu", "0.5"), ("--gpu", "working set of 40 tokens", "one token")),
    (("--host", "0.1%"), ("--host", "one token")),
    (("--ssd", "nan"), ("--ssd", "'nan'")),
    (("--alpha", "x"), ("--alpha", "'x'")),
    (("--alpha", "1,-2"), ("--alpha", "'-2'", "0 or more")),
    (("--alpha", "inf"), ("--alpha", "'inf'")),
    (("--quality", "0"), ("--quality", "'0'", "above 0")),
    (("--quality", "0.9,1.1"), ("--quality", "'0.9,1.1'", "at most 1")),
    (("--forms", "keydiff"), ("--forms", "'keydiff'", "PRESS@KEPT")),
    (("--forms", "magic@0.5"), ("--forms", "magic", "snapkv")),
    (("--slot-bytes", "0"), ("--slot-bytes", "'0'", "at least 1")),
    (("--slot-bytes", "1.5"), ("--slot-bytes", "'1.5'")),
    (("--prefill", "1,2"), ("--prefill", "'1,2'", "FIXED,PER_TOKEN,PER_PAIR")),
    (("--prefill", "0,-1,0"), ("--prefill", "'-1'")),
    (("--prefill", "0,0,0"), ("--prefill", "no time")),
    (("--host-bandwidth", "20GB"), ("--host-bandwidth", "'20GB'", "20GB/s")),
    (("--ssd-bandwidth", "0GB/s"), ("--ssd-bandwidth", "'0GB/s'", "above 0")),
    (("--noise", "-1"), ("--noise", "'-1'")),
    (("--servers", "0"), ("--servers", "'0'", "load=0.9")),
    (("--servers", "load=x"), ("--servers", "'load=x'")),
    (("--seed", "-1"), ("--seed", "'-1'")),
    (("--limit", "0"), ("--limit", "'0'", "at least 1")),
    (("--curves", "nowhere.json"), ("--curves", "nowhere.json", "does not exist")),
    (("--jsonl", "nowhere/out.jsonl"), ("--jsonl", "'nowhere'", "does not exist")),
    (("--requests", "."), ("--requests", "directory")),
    (("--plot", "out.gif"), ("--plot", "'out.gif'", ".png or .svg")),
    (("--jsonl", "same", "--requests", "same"), ("--requests", "'same' is also --jsonl")),
    (("--jsonl", "four.jsonl"), ("--jsonl", "is also TRACE")),
    (("--jsonll", "x"), ("unrecognized arguments: --jsonll x",)),
]


@pytest.mark.parametrize(("words", "said"), BAD, ids=[" ".join(words) for words, _ in BAD])
def test_a_bad_flag_is_one_line(
    trace: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    said: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("four.jsonl", *TRANSFER_COSTS, *words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    (line,) = printed.err.splitlines()
    assert line.startswith("evicpress: error: ")
    assert [text for text in said if text not in line] == []
    assert [path.name for path in tmp_path.iterdir()] == ["four.jsonl"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "expected"),
        ("[]", "curves.json"),
        ("{", "is not JSON"),
        ('{"keydiff": {"2": 1}}', "(0, 1]"),
        ("\xff", "JSON"),
    ],
)
def test_bad_curves(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str, said: str) -> None:
    path = tmp_path / "curves.json"
    path.write_text(content, encoding="latin-1")
    assert run(trace, *TRANSFER_COSTS, "--curves", str(path)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("evicpress: error: --curves: ")
    assert said in line


def test_a_bad_trace_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing.jsonl")
    for words, said in (
        ((missing, *TRANSFER_COSTS), "does not exist"),
        ((str(tmp_path), *TRANSFER_COSTS), "is a directory"),
        (("synthetic:nonsense", *TRANSFER_COSTS), "unknown kind"),
        (TRANSFER_COSTS, "TRACE"),
        ((missing,), "--gpu"),
    ):
        assert run(*words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("evicpress: error: ")
        assert said in line


def test_bad_lines_are_skipped_only_when_asked(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(trace)
    path.write_text(path.read_text(encoding="utf-8") + '{"t": "never"}\n', encoding="utf-8")
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS) == 2
    assert "four.jsonl, line 6: " in capsys.readouterr().err
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS, "--skip-bad") == 0
    printed = capsys.readouterr()
    assert "line 6: " in printed.err
    assert "4 requests, 1 bad lines skipped" in printed.out


def test_a_load_needs_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one.jsonl"
    write_trace(Trace("one", 10, REQUESTS[:1]), path)
    assert run(str(path), *TRANSFER_COSTS, "--servers", "load=1") == 2
    assert "--servers: all requests arrive at once" in capsys.readouterr().err


def interrupt_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The ``number``-th request of all runs is one Ctrl-C."""
    served, serve = itertools.count(1), Replay.serve

    def interrupted(self: Replay, request: Request) -> Outcome:
        if next(served) == number:
            raise KeyboardInterrupt
        return serve(self, request)

    monkeypatch.setattr(Replay, "serve", interrupted)


def test_ctrl_c_prints_what_is_done(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at(monkeypatch, 6)
    out, requests = tmp_path / "out.jsonl", tmp_path / "requests.jsonl"
    out.write_text("of yesterday\n", encoding="utf-8")
    before = {path.name for path in tmp_path.iterdir()}
    words = ("--policy", "lru,evicpress,lfu", "--jsonl", str(out), "--requests", str(requests))
    assert run(trace, *TRANSFER_COSTS, *words) == 130
    printed = capsys.readouterr()
    assert printed.err == "evicpress: interrupted; no file was written\n"
    names, lru, evicpress, note = printed.out.split("\n\n")[1].splitlines()
    assert names.startswith("policy")
    assert lru.startswith("lru ")
    assert evicpress.startswith("evicpress (partial) ")
    assert note == "PARTIAL: evicpress was interrupted after 1 of 4 requests"
    assert out.read_text(encoding="utf-8") == "of yesterday\n"
    assert {path.name for path in tmp_path.iterdir()} == before


def test_ctrl_c_before_the_first_request(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_at(monkeypatch, 1)
    assert run(trace, *TRANSFER_COSTS) == 130
    printed = capsys.readouterr()
    assert printed.err == "evicpress: interrupted\n"
    assert "TTFT" not in printed.out


@pytest.mark.parametrize(("sign", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_signal_leaves_no_file(tmp_path: Path, sign: signal.Signals, status: int) -> None:
    (tmp_path / "out.jsonl").write_text("of yesterday\n", encoding="utf-8")
    code = "import sys; from sglang_evicpress.cli.main import main; sys.exit(main())"
    words = [
        "replay",
        "synthetic:chat",
        "--policy",
        ",".join(["evicpress"] + [f"keydiff@0.{n}+lru" for n in range(1, 99)]),
    ]
    words += [
        "--gpu",
        "1%",
        "--host",
        "4%",
        "--jsonl",
        "out.jsonl",
        "--requests",
        "requests.jsonl",
        "--plot",
        "out.svg",
    ]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: [signal.signal(each, signal.SIG_DFL) for each in (signal.SIGINT, signal.SIGHUP)],
    )
    try:
        deadline = time.monotonic() + 60
        while not _written(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(sign)
        printed, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, said) == (status, "evicpress: interrupted; no file was written\n")
    assert "PARTIAL: " in printed
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    assert (tmp_path / "out.jsonl").read_text(encoding="utf-8") == "of yesterday\n"


def _written(folder: Path) -> bool:
    """Some requests are in the file that is not there yet."""
    return any(path.stat().st_size for path in folder.glob(".evicpress.*"))


def test_all_files_are_there_or_none(trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal that comes between two of them waits until both are."""
    commit = WholeFile.commit

    def interrupted(self: WholeFile) -> None:
        signal.raise_signal(signal.SIGTERM)
        commit(self)

    monkeypatch.setattr(WholeFile, "commit", interrupted)
    words = ("--jsonl", str(tmp_path / "a.jsonl"), "--requests", str(tmp_path / "b.jsonl"))
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS, *words) == 143
    assert {path.name for path in tmp_path.iterdir()} == {"four.jsonl", "a.jsonl", "b.jsonl"}


def test_a_trace_in_other_units(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    record = {"input_length": 64, "output_length": 1, "hash_ids": [0, 1, 2, 3]}
    path.write_text("".join(json.dumps({"timestamp": str(at), **record}) + "\n" for at in (1, 2)), encoding="utf-8")
    words = ("--gpu", "50%", "--policy", "lru", "--servers", "load=1", "--prefill", "0.5,0,0")
    assert run(str(path), *words) == 2
    assert "'hash_ids' has 4 blocks of 512 tokens for a prompt of 64 tokens" in capsys.readouterr().err
    assert run(str(path), *words, "--block-tokens", "16", "--time-unit", "s") == 0
    printed = capsys.readouterr().out
    assert "2 requests, blocks of 16 tokens" in printed
    assert "servers     1.00, busy 1 of the time" in printed  # half a second twice, within one


def test_an_existing_file_is_replaced_at_the_end(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("of yesterday\n", encoding="utf-8")
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS, "--jsonl", str(out)) == 0
    (record,) = records(out)
    assert record["num_requests"] == record["num_expected"] == 4
    assert not record["is_partial"]
    assert record["settings"]["capacity_bytes"] == {"gpu": 20}  # type: ignore[index]
    assert record["settings"]["load"]["host"] == {"fixed_s": 0.0005, "bytes_per_s": 20.0}  # type: ignore[index]
    assert {path.name for path in tmp_path.iterdir()} == {"four.jsonl", "out.jsonl"}


def test_progress_only_on_a_terminal(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS, "--no-progress") == 0
    assert capsys.readouterr().err == ""
    assert run(trace, "--policy", "lru", *TRANSFER_COSTS) == 0
    assert "lru:   0%" in capsys.readouterr().err


def test_version_and_help_exit(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in (
        (["--version"], f"evicpress {__version__}\n"),
        (["--help"], "replay"),
        (["replay", "--help"], "1% of the trace's working set"),
    ):
        with pytest.raises(SystemExit) as exit_:
            main(words)
        assert exit_.value.code == 0
        assert said in capsys.readouterr().out


def imported(words: list[str]) -> set[str]:
    """Packages that are there after the command ran in a process of its own."""
    program = (
        "import sys\nfrom sglang_evicpress.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print('MODULES', *sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], check=True, capture_output=True, text=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["fsck", "--help"], ["--nonsense"]])
def test_help_imports_next_to_nothing(words: list[str]) -> None:
    assert not imported(words) & {"matplotlib", "numpy", "orjson", "sglang", "torch", "tqdm", "zstandard"}


@pytest.mark.parametrize("words", [["--help"], [*TRANSFER_COSTS]])
def test_replaying_imports_neither_torch_nor_sglang(trace: str, words: list[str]) -> None:
    assert not imported(["replay", trace, *words]) & {"matplotlib", "sglang", "torch", "tqdm", "triton"}


def test_a_file_of_curves_is_not_overwritten(trace: str, curves: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path(curves).read_bytes()
    for flag in ("--jsonl", "--requests"):
        assert run(trace, *TRANSFER_COSTS, "--curves", curves, flag, curves) == 2
        assert f"error: {flag}: {curves!r} is also --curves" in capsys.readouterr().err
    assert Path(curves).read_bytes() == before
