"""Traces in our own format come back equal, and a failed write leaves nothing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sglang_evicpress.traces import Request, Trace, read_trace, write_trace

COUNTS = st.integers(0, 2**40)


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    block_tokens = draw(st.integers(1, 4096))
    requests = []
    for arrival_s in sorted(draw(st.lists(st.floats(0, 1e12), min_size=1, max_size=8))):
        blocks = tuple(draw(st.lists(st.integers(0, 2**63 - 1), max_size=6)))
        requests.append(Request(arrival_s, blocks, len(blocks) * block_tokens + draw(COUNTS), draw(COUNTS)))
    name = draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
    return Trace(name, block_tokens, tuple(requests))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(traces())
def test_round_trip(tmp_path: Path, trace: Trace) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(trace, path)
    again = read_trace(str(path))
    assert again == trace
    assert again.working_set_tokens == trace.working_set_tokens
    assert [file.name for file in tmp_path.iterdir()] == ["trace.jsonl"]


@settings(deadline=None)
@given(traces())
def test_working_set_is_the_number_of_distinct_prefixes(trace: Trace) -> None:
    prefixes = {r.blocks[: end + 1] for r in trace.requests for end in range(len(r.blocks))}
    assert trace.working_set_tokens == len(prefixes) * trace.block_tokens


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1))
def test_working_set_of_prompts_that_share_much(prompts: list[list[int]]) -> None:
    trace = Trace("t", 1, tuple(Request(0.0, tuple(ids), len(ids)) for ids in prompts))
    assert trace.working_set_tokens == len({tuple(ids[: end + 1]) for ids in prompts for end in range(len(ids))})


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request(-1.0, (), 0), "'t' is -1.0"),
        (Request(math.nan, (), 0), "'t' is nan"),
        (Request(0.0, (1, 2), 31), "'blocks' has 2 full blocks of 16 tokens"),
        (Request(0.0, (-1,), 16), r"blocks\[0\] is -1"),
        (Request(0.0, (2**64,), 16), r"blocks\[0\] is 18446744073709551616"),
        (Request(0.0, (), -1), "'tokens' is -1"),
    ],
)
def test_what_could_not_be_read_back_is_not_written(tmp_path: Path, request_: Request, said: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("before")
    with pytest.raises(ValueError, match=f"request 1 of trace 't': {said}"):
        write_trace(Trace("t", 16, (Request(0.0, (), 0), request_)), path)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("trace.jsonl", "before")]


def test_a_trace_without_requests_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="trace 't' has no requests"):
        write_trace(Trace("t", 16, ()), tmp_path / "trace.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_a_written_trace_is_a_file_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    write_trace(Trace("t", 16, (Request(0.0, (), 0),)), tmp_path / "trace.jsonl")
    assert (tmp_path / "trace.jsonl").stat().st_mode == (tmp_path / "plain").stat().st_mode
