"""Errors of a trace: said once, with file and line; only what spoils one line can be skipped."""

from __future__ import annotations

import bz2
import gzip
import json
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import zstandard

from sglang_evicpress.traces import Reading, lines, read_trace

MOONCAKE: dict[str, object] = {"timestamp": 0, "input_length": 1024, "output_length": 7, "hash_ids": [0, 1]}
DATED: dict[str, object] = {**MOONCAKE, "timestamp": "2025-11-25"}
WEKA_REQUEST: dict[str, object] = {"t": 0.0, "type": "n", "in": 128, "out": 5, "hash_ids": [1, 2]}
WEKA: dict[str, object] = {"block_size": 64, "hash_id_scope": "local", "requests": [WEKA_REQUEST]}
TEXT: dict[str, object] = {"timestamp": 1, "input": "a", "output": "b", "session_id": "s"}
HEADER: dict[str, object] = {"format": "evicpress-trace", "version": 1, "block_tokens": 16, "name": "mine"}
OWN: dict[str, object] = {"t": 0.0, "tokens": 40, "blocks": [5, 6], "out": 3}


def weka(**changes: object) -> dict[str, object]:
    return {**WEKA, "requests": [WEKA_REQUEST, {**WEKA_REQUEST, **changes}]}


def without(record: dict[str, object], key: str) -> dict[str, object]:
    return {name: value for name, value in record.items() if name != key}


def as_lines(*records: object) -> bytes:
    return b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in records)


zipped = partial(gzip.compress, mtime=0)  # the same bytes in every process: they name the test
BINARY = (
    *(b"\x7fELF\x02\x01\x01\0", b"PAR1\x15\x04\0", b"{}\n" + b"\0" * 9, b"\n\xff\xd8\xff\xe0"),
    *(as_lines(MOONCAKE).decode().encode("utf-16"), bz2.compress(as_lines(MOONCAKE)), bytes(range(128, 256)) * 99),
)
BAD: list[tuple[list[dict[str, object]], object, str]] = [
    # (good lines before, the bad one, what is said)
    ([MOONCAKE], b"{", "not JSON"),
    ([MOONCAKE], b"\xff\xfe", "not JSON"),
    ([MOONCAKE], b'{"timestamp": NaN}', "not JSON"),
    ([MOONCAKE], [1], "no JSON object"),
    ([MOONCAKE], {}, "key 'timestamp' is missing: there are none"),
    *(([MOONCAKE], without(MOONCAKE, key), f"key '{key}' is missing") for key in MOONCAKE),
    ([MOONCAKE], {**MOONCAKE, "timestamp": -1}, "'timestamp' is -1: expected a finite number of at least 0"),
    *(
        ([MOONCAKE], {**MOONCAKE, "timestamp": value}, f"'timestamp' is '{value}': .* or a date")
        for value in ("soon", "", "-1", "inf", "nan", "1_000", "0x10", "2025-13-01", "9" * 31)
    ),
    ([MOONCAKE], {**MOONCAKE, "timestamp": "2025-11-25"}, "'timestamp' is '2025-11-25': expected a number, as in"),
    ([DATED], MOONCAKE, "'timestamp' is 0: expected a date, as in the lines before"),
    ([MOONCAKE], {**MOONCAKE, "timestamp": True}, "'timestamp' is True"),
    ([MOONCAKE], {**MOONCAKE, "timestamp": None}, "'timestamp' is None"),
    ([MOONCAKE], json.dumps(MOONCAKE).replace(": 0,", ": 1e999,", 1).encode(), "not JSON"),
    ([MOONCAKE], {**MOONCAKE, "input_length": 1024.0}, "'input_length' is 1024.0: expected an integer"),
    ([MOONCAKE], {**MOONCAKE, "input_length": -5}, "'input_length' is -5"),
    ([MOONCAKE], {**MOONCAKE, "input_length": 2**63}, "'input_length' is 9223372036854775808"),
    ([MOONCAKE], {**MOONCAKE, "input_length": 512}, "'hash_ids' has 2 blocks of 512 tokens for a prompt of 512 tokens"),
    ([MOONCAKE], {**MOONCAKE, "output_length": -1}, "'output_length' is -1"),
    ([MOONCAKE], {**MOONCAKE, "hash_ids": 3}, "'hash_ids' is 3: expected a list"),
    ([MOONCAKE], {**MOONCAKE, "hash_ids": [0, -1]}, r"hash_ids\[1\] is -1"),
    ([MOONCAKE], {**MOONCAKE, "hash_ids": [0, 1.0]}, r"hash_ids\[1\] is 1.0"),
    ([MOONCAKE], {**MOONCAKE, "hash_ids": [False, 1]}, r"hash_ids\[0\] is False"),
    ([MOONCAKE], {**MOONCAKE, "hash_ids": [2**63]}, r"hash_ids\[0\] is 9223372036854775808"),
    ([WEKA], without(WEKA, "block_size"), "key 'block_size' is missing"),
    ([WEKA], {**WEKA, "block_size": 0}, "'block_size' is 0: expected an integer of at least 1"),
    ([WEKA], {**WEKA, "block_size": 32}, "'block_size' is 32: expected 64, as in the lines before"),
    ([WEKA], {**WEKA, "hash_id_scope": "galaxy"}, "'hash_id_scope' is 'galaxy': expected one of local, global"),
    ([WEKA], without(WEKA, "requests"), "key 'requests' is missing"),
    ([WEKA], {**WEKA, "requests": None}, "'requests' is None: expected a list"),
    ([WEKA], {**WEKA, "requests": [7]}, r"requests\[0\] is 7: expected an object"),
    ([WEKA], weka(t=-0.5), r"requests\[1\]: 't' is -0.5"),
    ([WEKA], weka(t="2025-11-25"), r"requests\[1\]: 't' is '2025-11-25': expected a finite number of at least 0$"),
    ([WEKA], weka(out=None), r"requests\[1\]: 'out' is None"),
    ([WEKA], weka(hash_ids=[1, 2, 3]), r"requests\[1\]: 'hash_ids' has 3 blocks of 64 tokens for a prompt of 128"),
    ([WEKA], weka(type="subagent"), r"requests\[1\]: key 'requests' is missing"),
    ([WEKA], weka(type="subagent", requests=[{"t": "x"}]), r"requests\[1\].requests\[0\]: 't' is 'x'"),
    ([WEKA], weka(t=1e308, type="subagent", requests=[{**WEKA_REQUEST, "t": 1e308}]), "expected a finite sum"),
    *(([TEXT], without(TEXT, key), f"key '{key}' is missing") for key in ("timestamp", "input", "output")),
    ([TEXT], {**TEXT, "input": 5}, "'input' is 5: expected a string"),
    ([TEXT], {**TEXT, "output": ["b"]}, "'output' is .'b'.: expected a string"),
    ([TEXT], {**TEXT, "timestamp": -1}, "'timestamp' is -1"),
    ([TEXT], {**TEXT, "input": "\ud800"}, "not JSON"),
    *(([HEADER, OWN], without(OWN, key), f"key '{key}' is missing") for key in ("t", "tokens", "blocks")),
    ([HEADER, OWN], {**OWN, "tokens": 31}, "'blocks' has 2 full blocks of 16 tokens for a prompt of 31 tokens"),
    ([HEADER, OWN], {**OWN, "out": 1.5}, "'out' is 1.5"),
    ([HEADER, OWN], {**OWN, "t": [0]}, r"'t' is \[0\]"),
    ([HEADER, OWN], HEADER, "key 't' is missing"),
]


@pytest.mark.parametrize(("before", "bad", "said"), BAD)
def test_a_bad_line_is_named_and_can_be_skipped(
    tmp_path: Path, before: list[dict[str, object]], bad: object, said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    good = as_lines(*before)
    path.write_bytes(good + as_lines(bad) + as_lines(before[-1]))
    where = f"trace.jsonl, line {len(before) + 1}: "

    with pytest.raises(ValueError, match=f"{where}.*{said}") as caught:
        read_trace(str(path))
    assert len(str(caught.value)) < 500 + len(str(path))

    told: list[str] = []
    trace = read_trace(str(path), skip_bad=True, on_bad=told.append)
    path.write_bytes(good + as_lines(before[-1]))
    clean = read_trace(str(path))
    assert (trace.requests, trace.num_skipped, told) == (clean.requests, 1, [str(caught.value)])
    assert clean.num_skipped == 0


def test_a_skipped_session_takes_no_ids_and_sets_no_size(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(as_lines({**weka(out=-1), "block_size": 128}, WEKA))
    trace = read_trace(str(path), skip_bad=True)
    assert (trace.block_tokens, trace.requests[0].blocks, trace.num_skipped) == (64, (0, 1), 1)


def test_skipping_without_a_listener(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(as_lines(MOONCAKE, b"?"))
    assert read_trace(str(path), skip_bad=True).num_skipped == 1


@pytest.mark.parametrize("first", [b"garbage", b'{"foreign": 1}'])
def test_a_bad_first_line_is_skipped_too(tmp_path: Path, first: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(as_lines(first, MOONCAKE))
    trace = read_trace(str(path), skip_bad=True)
    assert (len(trace.requests), trace.num_skipped) == (1, 1)


@pytest.mark.parametrize("skip_bad", [False, True])
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (zstandard.compress(b""), "is empty"),
        (as_lines(HEADER), "has no requests"),
        (as_lines({**WEKA, "requests": []}), "has no requests"),
        (as_lines(*[{"foreign": 1}] * 200), "unknown format, keys .'foreign'.: expected one of evicpress-trace"),
        (as_lines({**HEADER, "format": "other"}, OWN), "line 1: 'format' is 'other': expected 'evicpress-trace'"),
        (as_lines({**HEADER, "version": 2}, OWN), "line 1: 'version' is 2: expected 1"),
        (as_lines({**HEADER, "version": True}, OWN), "line 1: 'version' is True: expected 1"),
        (as_lines(without(HEADER, "block_tokens"), OWN), "line 1: key 'block_tokens' is missing"),
        (
            as_lines({**HEADER, "block_tokens": 0}, OWN),
            "line 1: 'block_tokens' is 0: expected an integer of at least 1",
        ),
        (as_lines({**HEADER, "name": 5}, OWN), "line 1: 'name' is 5: expected a string"),
        (zstandard.compress(as_lines(*[MOONCAKE] * 50))[:-1], "is cut off"),
        (zstandard.compress(as_lines(MOONCAKE)) + zstandard.compress(as_lines(MOONCAKE))[:6], "is cut off"),
        (zstandard.compress(as_lines(MOONCAKE)) + b"tail", "is damaged"),
        (zipped(as_lines(*[MOONCAKE] * 50))[:-1], "is cut off: its last gzip frame"),
        (zipped(as_lines(MOONCAKE)) + b"tail", "is damaged"),
        (zipped(as_lines(MOONCAKE))[:-8] + b"wrong sum", "is damaged"),
        (zipped(b""), "is empty"),
        *((content, "is a binary file: expected text in UTF-8") for content in BINARY),
        *((pack(content), "is a binary file") for content in BINARY for pack in (zipped, zstandard.compress)),
    ],
)
def test_what_spoils_the_whole_file_is_not_skipped(tmp_path: Path, content: bytes, said: str, skip_bad: bool) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"trace.jsonl.*{said}"):
        read_trace(str(path), skip_bad=skip_bad)


def test_all_lines_bad_says_how_many_were_skipped(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(as_lines(without(MOONCAKE, "timestamp"), without(MOONCAKE, "hash_ids")))
    with pytest.raises(ValueError, match="has no requests; 2 bad lines were skipped"):
        read_trace(str(path), skip_bad=True)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere.jsonl does not exist"):
        read_trace(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match="is a directory"):
        read_trace(str(tmp_path))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="cannot be read: Not a directory"):
        read_trace(str(tmp_path / "file" / "below"))


@pytest.mark.parametrize("skip_bad", [False, True])
def test_a_line_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, skip_bad: bool) -> None:
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 1 << 21)
    path = tmp_path / "trace.jsonl"
    for pack in (bytes, gzip.compress, zstandard.compress):
        path.write_bytes(pack(as_lines(MOONCAKE) + b"x" * (1 << 22)))
        with pytest.raises(
            ValueError, match="trace.jsonl, line 2: no end within 2 MiB: expected one JSON object a line"
        ):
            read_trace(str(path), skip_bad=skip_bad)
    path.write_bytes(as_lines(*[{**MOONCAKE, "text": "x" * (1 << 20)}] * 5))  # long lines that end are none
    assert len(read_trace(str(path)).requests) == 5


def test_a_packed_line_without_end_fills_no_memory(tmp_path: Path) -> None:
    """4 GiB of one letter in a file of 4 MB, by a process that may take 1 GiB."""
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(16 * gzip.compress(b"x" * (1 << 28)))
    code = "import sys; from sglang_evicpress.traces import read_trace; read_trace(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
    )
    assert "line 1: no end within 64 MiB" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ((WEKA,), "line 1: 'block_size' is 64: expected 128, as asked for"),
        ((HEADER, OWN), "line 1: 'block_tokens' is 16: expected 128, as asked for"),
    ],
)
def test_a_file_that_says_its_blocks_is_not_read_otherwise(
    tmp_path: Path, record: tuple[dict[str, object], ...], said: str
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(as_lines(*record))
    with pytest.raises(ValueError, match=said):
        read_trace(str(path), reading=Reading(block_tokens=128))


def test_a_made_up_trace_is_not_read_otherwise() -> None:
    with pytest.raises(ValueError, match="synthetic:chat is made up in seconds and blocks of its own"):
        read_trace("synthetic:chat", reading=Reading("ms"))
