"""Traces of passes stay within their room: those of requests that ended go first, the oldest before the others."""

from __future__ import annotations

import gc

import torch

from sglang_evicpress.decode_budget.stats import PassRecord
from sglang_evicpress.patches.decode_budget.trace import MAX_PASSES, PASS_BYTES, DecodeTrace, TraceRoom

POSITIONS = torch.arange(256, dtype=torch.int32)
ONE = PASS_BYTES + 1024  # such a pass


def record(logical: int) -> PassRecord:
    return PassRecord("page", logical, 256, 240, 1, 0.0, 0.0)


def test_a_trace_tells_every_pass_with_the_positions_it_left() -> None:
    room, trace = TraceRoom(), DecodeTrace()
    for logical in (300, 316):
        room.add(trace, record(logical), POSITIONS, [])
    assert [entry["logical_tokens"] for entry in trace.to_json()] == [300, 316]
    assert trace.to_json()[0]["positions_shape"] == [256] and trace.num_values == 512
    assert trace.values(0, 1000).tolist() == 2 * POSITIONS.tolist()
    assert trace.values(250, 260).tolist() == [*range(250, 256), 0, 1, 2, 3]
    assert trace.values(512, 600).size == 0
    assert room.num_bytes == 2 * ONE and not trace.is_cut
    trace.forget_from(316)
    assert [entry["logical_tokens"] for entry in trace.to_json()] == [300]


def test_the_oldest_that_ended_give_up_theirs() -> None:
    room = TraceRoom(4 * ONE)
    first, second, running = DecodeTrace(), DecodeTrace(), DecodeTrace()
    for trace in (first, second, second):
        room.add(trace, record(300), POSITIONS, [])
    room.end(second, POSITIONS, [first])
    assert room.num_bytes == 4 * ONE and second.final is not None
    room.add(running, record(300), POSITIONS, [first, second])
    assert (len(first.passes), len(second.passes), len(running.passes)) == (0, 2, 1)
    assert first.is_cut and not second.is_cut and not running.is_cut
    assert room.num_bytes == 4 * ONE


def test_without_room_a_running_request_keeps_what_it_has() -> None:
    room, one, other = TraceRoom(2 * ONE), DecodeTrace(), DecodeTrace()
    room.add(one, record(300), POSITIONS, [])
    room.add(other, record(300), POSITIONS, [])
    room.add(one, record(316), POSITIONS, [])
    assert one.is_cut and len(one.passes) == len(other.passes) == 1 and not other.is_cut
    room.end(other, POSITIONS, [])
    assert other.final is None and other.is_cut and room.num_bytes == 2 * ONE


def test_traces_that_ended_are_not_given_up_for_one_that_is_too_large_all_the_same() -> None:
    room, ended, large = TraceRoom(2 * ONE), DecodeTrace(), DecodeTrace()
    room.add(ended, record(300), POSITIONS, [])
    room.add(large, record(300), torch.zeros(3 * ONE, dtype=torch.int32), [ended])
    assert large.is_cut and not large.passes and len(ended.passes) == 1 and not ended.is_cut


def test_the_room_of_a_request_that_is_gone_is_free_again() -> None:
    room, trace = TraceRoom(ONE), DecodeTrace()
    room.add(trace, record(300), POSITIONS, [])
    del trace
    gc.collect()
    assert room.num_bytes == 0


def test_no_more_than_so_many_passes_are_kept() -> None:
    room, trace = TraceRoom(), DecodeTrace()
    for logical in range(MAX_PASSES + 1):
        room.add(trace, record(logical), POSITIONS[:1], [])
    assert len(trace.passes) == MAX_PASSES and trace.is_cut
