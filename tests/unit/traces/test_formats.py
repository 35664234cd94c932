"""Each format as its publisher writes it, a few lines by hand: what a request becomes."""

from __future__ import annotations

import builtins
import gzip
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import zstandard

from sglang_evicpress.traces import Reading, Request, Trace, read_trace

MOONCAKE: tuple[dict[str, object], ...] = (
    {"timestamp": 3000, "input_length": 1024, "output_length": 7, "hash_ids": [0, 9]},
    {"timestamp": 4500, "input_length": 1100, "output_length": 8, "hash_ids": [0, 1, 2]},
    {"timestamp": 3500.0, "input_length": 100, "output_length": 0, "hash_ids": [3]},
)


def entry(t: float, ids: list[int], extra: int = 0) -> dict[str, object]:
    return {"t": t, "type": "n", "in": len(ids) * 64 + extra, "out": 5, "hash_ids": ids, "think_time": 0.0}


def session(*entries: Mapping[str, object], scope: str = "local", size: int = 64) -> dict[str, object]:
    return {"id": "s", "block_size": size, "hash_id_scope": scope, "tool_tokens": 9, "requests": list(entries)}


def text(timestamp: int, prompt: str, answer: str = "") -> dict[str, object]:
    return {"file": "f", "timestamp": timestamp, "input": prompt, "output": answer, "session_id": "s"}


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def read(folder: Path, *records: object, limit: int | None = None, reading: Reading | None = None) -> Trace:
    path = folder / "some.trace"
    path.write_bytes(lines(*records))
    return read_trace(str(path), limit=limit, reading=reading)


def test_mooncake_keeps_full_blocks_in_the_order_of_arrival(tmp_path: Path) -> None:
    trace = read(tmp_path, *MOONCAKE)
    assert trace == Trace(
        "some.trace",
        512,
        (Request(0.0, (0, 9), 1024, 7), Request(0.5, (), 100, 0), Request(1.5, (0, 1), 1100, 8)),
    )
    assert trace.working_set_tokens == 3 * 512


def test_requests_of_one_instant_keep_the_order_of_the_file(tmp_path: Path) -> None:
    same = [{"timestamp": 5, "input_length": 512, "output_length": n, "hash_ids": [n]} for n in (3, 1, 2)]
    assert [request.output_tokens for request in read(tmp_path, *same).requests] == [3, 1, 2]


def test_weka_ids_of_two_sessions_are_two_things(tmp_path: Path) -> None:
    trace = read(
        tmp_path, session(entry(0.0, [1, 2], 63), entry(9.0, [1, 2, 3])), session(entry(4.0, [2, 1]), entry(5.0, [2]))
    )
    assert trace.block_tokens == 64
    assert trace.requests == (
        Request(0.0, (0, 1), 191, 5),
        Request(4.0, (3, 4), 128, 5),
        Request(5.0, (3,), 64, 5),
        Request(9.0, (0, 1, 2), 192, 5),
    )
    assert trace.working_set_tokens == 5 * 64


def test_weka_ids_of_global_scope_are_one_thing(tmp_path: Path) -> None:
    trace = read(tmp_path, *(session(entry(t, [7, 8]), scope="global") for t in (0.0, 1.0)))
    assert [request.blocks for request in trace.requests] == [(0, 1), (0, 1)]


def test_weka_subagents_count_from_their_start_and_share_the_ids_of_the_session(tmp_path: Path) -> None:
    deepest = {"t": 1.0, "type": "subagent", "requests": [entry(0.25, [20, 21])]}
    subagent = {"t": 100.0, "type": "subagent", "requests": [entry(0.0, [20]), deepest, entry(4.0, [20, 22])]}
    trace = read(tmp_path, session(entry(0.0, [1]), subagent, entry(102.0, [1, 2])))
    assert [(request.arrival_s, request.blocks) for request in trace.requests] == [
        (0.0, (0,)),
        (100.0, (1,)),
        (101.25, (1, 2)),
        (102.0, (0, 4)),
        (104.0, (1, 3)),
    ]


def test_weka_subagents_nest_deep(tmp_path: Path) -> None:
    inner: dict[str, object] = entry(1.0, [1])
    for _ in range(300):
        inner = {"t": 1.0, "type": "subagent", "requests": [inner]}
    assert read(tmp_path, session(inner)).requests[0].arrival_s == 301.0


def test_agent_text_is_cut_into_blocks_of_256_bytes(tmp_path: Path) -> None:
    head, tail = "é" * 128, "b" * 256
    trace = read(
        tmp_path,
        text(1_760_428_436_442_742, head + tail + "ccc", "four+"),
        text(1_760_428_436_442_743, head + tail),
        text(1_760_428_438_442_742, tail + head),
    )
    first, second, third = trace.requests
    assert (trace.block_tokens, first.num_tokens, first.output_tokens) == (64, 129, 2)
    assert [request.arrival_s for request in trace.requests] == [0.0, 1e-6, 2.0]
    assert first.blocks == second.blocks
    assert set(first.blocks).isdisjoint(third.blocks)  # the same bytes after another prefix are another block
    assert trace.working_set_tokens == 4 * 64


def test_agent_text_has_the_same_ids_in_another_process(tmp_path: Path) -> None:
    trace = read(tmp_path, text(1, "prompt " * 100))
    code = "import sys; from sglang_evicpress.traces import read_trace as r; print(r(sys.argv[1]).requests[0].blocks)"
    shown = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "some.trace")],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.strip() == str(trace.requests[0].blocks)


def test_own_format(tmp_path: Path) -> None:
    header = {"format": "evicpress-trace", "version": 1, "block_tokens": 16, "name": "mine"}
    trace = read(
        tmp_path, header, {"t": 2, "tokens": 40, "blocks": [5, 6], "out": 3}, {"t": 1.5, "tokens": 3, "blocks": []}
    )
    assert trace == Trace("mine", 16, (Request(1.5, (), 3, 0), Request(2.0, (5, 6), 40, 3)))


def test_own_format_without_a_name_takes_the_file_s(tmp_path: Path) -> None:
    header = {"format": "evicpress-trace", "version": 1, "block_tokens": 16}
    assert read(tmp_path, header, {"t": 0, "tokens": 0, "blocks": []}).name == "some.trace"


def test_working_set_counts_an_id_after_another_prefix_again(tmp_path: Path) -> None:
    header = {"format": "evicpress-trace", "version": 1, "block_tokens": 10}
    prompts: tuple[list[int], ...] = ([1, 2, 3], [1, 2], [4, 2, 3], [1, 2, 5], [1, 2, 3], [], [1, 2, 3, 9])
    trace = read(tmp_path, header, *({"t": 0, "tokens": 99, "blocks": ids} for ids in prompts))
    prefixes = {tuple(ids[: end + 1]) for ids in prompts for end in range(len(ids))}
    assert trace.working_set_tokens == len(prefixes) * 10


@pytest.mark.parametrize("name", ["trace.jsonl.zst", "trace.txt"])
def test_zstandard_is_told_by_its_bytes(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = lines(*MOONCAKE)
    # Two frames, as concatenated files have; the first ends inside a line.
    path.write_bytes(zstandard.compress(whole[:100]) + zstandard.compress(whole[100:]))
    assert read_trace(str(path)).requests == read(tmp_path, *MOONCAKE).requests


def test_lines_longer_than_any_chunk(tmp_path: Path) -> None:
    ids = list(range(300_000))
    long = {"timestamp": 0, "input_length": len(ids) * 512, "output_length": 1, "hash_ids": ids}
    for trace in (read(tmp_path, long, long), read_compressed(tmp_path, long, long)):
        assert [request.blocks for request in trace.requests] == [tuple(ids)] * 2


def read_compressed(folder: Path, *records: object) -> Trace:
    path = folder / "some.zst"
    path.write_bytes(zstandard.compress(lines(*records)))
    return read_trace(str(path))


def test_a_pipe_is_read_too(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(lines(*MOONCAKE),))
    writer.start()
    assert len(read_trace(str(pipe)).requests) == 3
    writer.join()


def test_blank_lines_and_a_missing_last_newline_are_no_fault(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n" + lines(*MOONCAKE).replace(b"\n", b"\r\n\r\n").rstrip())
    trace = read_trace(str(path))
    assert (len(trace.requests), trace.num_skipped) == (3, 0)


def test_equal_blocks_are_one_object(tmp_path: Path) -> None:
    big = [10**6, 10**6 + 1]
    for records in (
        [{"timestamp": 0, "input_length": 1024, "output_length": 1, "hash_ids": big}] * 2,
        [session(*[entry(0, list(range(900)))] * 2)],
        [text(0, "x" * 600)] * 2,
    ):
        first, second = read(tmp_path, *records).requests
        assert all(a is b for a, b in zip(first.blocks, second.blocks, strict=True))


def test_limit_keeps_the_first_and_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(lines(*MOONCAKE[:2]) + b"not read")
    assert [request.blocks for request in read_trace(str(path), limit=2).requests] == [(0, 9), (0, 1)]
    with pytest.raises(ValueError, match="line 3"):
        read_trace(str(path), limit=3)


def test_limit_inside_a_session_keeps_its_earliest(tmp_path: Path) -> None:
    one = session(entry(5.0, [3]), entry(1.0, [1]), entry(2.0, [2]))
    assert [request.arrival_s for request in read(tmp_path, one, session(entry(0.0, [1])), limit=2).requests] == [
        1.0,
        2.0,
    ]
    assert len(read(tmp_path, one, session(entry(0.0, [1])), limit=99).requests) == 4


@pytest.mark.parametrize("limit", [0, -1])
@pytest.mark.parametrize("source", ["synthetic:chat", "whatever"])
def test_limit_below_one_is_refused(source: str, limit: int) -> None:
    with pytest.raises(ValueError, match=f"limit is {limit}: expected at least 1"):
        read_trace(source, limit=limit)


def test_without_zstandard_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.zst"
    path.write_bytes(zstandard.compress(lines(*MOONCAKE)))
    usual = builtins.__import__

    def without(name: str, *args: object) -> object:
        if name == "zstandard":
            raise ImportError(name)
        return usual(name, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ValueError, match="install the package zstandard"):
        read_trace(str(path))


def arrivals(trace: Trace) -> list[float]:
    return [request.arrival_s for request in trace.requests]


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 1e3), ("us", 1e6), ("ns", 1e9)])
def test_timestamps_in_another_unit(tmp_path: Path, unit: str, scale: float) -> None:
    reading = Reading(time_unit=unit)
    expected = [0.0, 500 / scale, 1500 / scale]
    assert arrivals(read(tmp_path, *MOONCAKE, reading=reading)) == pytest.approx(expected)
    assert arrivals(read(tmp_path, text(7, "a"), text(507, "b"), text(1507, "c"), reading=reading)) == pytest.approx(
        expected
    )
    weka = session(entry(500.0, [1]), {"t": 1000.0, "type": "subagent", "requests": [entry(500.0, [2])]})
    assert arrivals(read(tmp_path, weka, reading=reading)) == pytest.approx(expected[1:])
    header = {"format": "evicpress-trace", "version": 1, "block_tokens": 16}
    own = [{"t": t, "tokens": 3, "blocks": []} for t in (500, 1500)]
    assert arrivals(read(tmp_path, header, *own, reading=reading)) == pytest.approx(expected[1:])


def test_nanoseconds_since_1970_keep_their_digits(tmp_path: Path) -> None:
    start = 1_760_428_436_442_742_001
    stamps = [start, start + 1, str(start + 100)]
    records = [{**MOONCAKE[0], "timestamp": stamp} for stamp in stamps]
    assert arrivals(read(tmp_path, *records, reading=Reading("ns"))) == [0.0, 1e-9, 1e-7]


def test_timestamps_in_strings(tmp_path: Path) -> None:
    records = [{**MOONCAKE[0], "timestamp": stamp} for stamp in ("3000", "3500.5", " 4e3 ")]
    assert arrivals(read(tmp_path, *records)) == [0.0, 0.5005, 1.0]
    assert arrivals(read(tmp_path, session({**entry(0.0, [1]), "t": "1.5"}))) == [1.5]


def test_timestamps_that_are_dates(tmp_path: Path) -> None:
    stamps = ("2025-11-25T07:14:00.25Z", "2025-11-25 07:14:01", "2025-11-25T08:14:01.5+01:00", "20251125T071402")
    for record in (MOONCAKE[0], text(0, "a")):
        records = [{**record, "timestamp": stamp} for stamp in stamps]
        for reading in (None, Reading("ns")):  # a date has no unit
            assert arrivals(read(tmp_path, *records, reading=reading)) == [0.0, 0.75, 1.25, 1.75]
    assert arrivals(read(tmp_path, {**MOONCAKE[0], "timestamp": "1969-12-31"})) == [0.0]


def test_blocks_of_another_size(tmp_path: Path) -> None:
    record = {"timestamp": 0, "input_length": 1100, "output_length": 8, "hash_ids": list(range(18))}
    trace = read(tmp_path, record, reading=Reading(block_tokens=64))
    assert (trace.block_tokens, trace.requests[0].blocks) == (64, tuple(range(17)))
    trace = read(tmp_path, text(0, "a" * 100), text(1, "a" * 128), reading=Reading(block_tokens=16))
    assert [len(request.blocks) for request in trace.requests] == [1, 2]
    assert trace.requests[0].blocks == trace.requests[1].blocks[:1]
    assert read(tmp_path, session(entry(0.0, [1])), reading=Reading(block_tokens=64)).block_tokens == 64


def test_gzip_is_read_as_plain(tmp_path: Path) -> None:
    plain = read(tmp_path, *MOONCAKE)
    path = tmp_path / "some.trace"
    packed = gzip.compress(lines(*MOONCAKE[:1])) + gzip.compress(lines(*MOONCAKE[1:]))
    for content in (packed, packed + b"\0" * 512):  # as tapes pad it
        path.write_bytes(content)
        assert read_trace(str(path)) == plain
