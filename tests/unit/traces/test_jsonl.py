"""Traces in our own format are read as they were."""

from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.unit.traces.written import write_trace

from sglang_evicpress.traces import Request, Trace, read_trace

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


@settings(deadline=None)
@given(traces())
def test_working_set_is_the_number_of_distinct_prefixes(trace: Trace) -> None:
    prefixes = {r.blocks[: end + 1] for r in trace.requests for end in range(len(r.blocks))}
    assert trace.working_set_tokens == len(prefixes) * trace.block_tokens


@given(st.lists(st.lists(st.integers(0, 2), max_size=9), min_size=1))
def test_working_set_of_prompts_that_share_much(prompts: list[list[int]]) -> None:
    trace = Trace("t", 1, tuple(Request(0.0, tuple(ids), len(ids)) for ids in prompts))
    assert trace.working_set_tokens == len({tuple(ids[: end + 1]) for ids in prompts for end in range(len(ids))})
