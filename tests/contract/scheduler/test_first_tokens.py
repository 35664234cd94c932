from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_evicpress.introspect.served import FirstTokenTimes
from sglang_evicpress.patches.scheduler.first_tokens import FirstTokenWatch

pytestmark = pytest.mark.sglang


def request(*, num_chunks: int = 0, was_retracted: bool = False) -> SimpleNamespace:
    return SimpleNamespace(inflight_middle_chunks=num_chunks, retracted_stain=was_retracted)


def test_a_request_counts_once_when_its_last_chunk_is_computed() -> None:
    clock = iter((10.0, 12.0, 15.0, 16.0))
    first_tokens = FirstTokenWatch(FirstTokenTimes(), lambda: next(clock))
    req = request(num_chunks=1)
    first_tokens.enter(req)
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND, reqs=[req])
    first_tokens.note(batch)  # a chunk in the middle
    assert first_tokens.times.num_seen == 0
    req.inflight_middle_chunks = 0
    first_tokens.note(batch)
    first_tokens.note(batch)
    assert first_tokens.times.describe()["mean_s"] == 5.0 and first_tokens.times.num_seen == 1


def test_decoding_retracted_and_unseen_requests_do_not_count() -> None:
    first_tokens = FirstTokenWatch(FirstTokenTimes(), lambda: 1.0)
    retracted, seen = request(was_retracted=True), request()
    first_tokens.enter(retracted)
    first_tokens.enter(seen)
    first_tokens.note(SimpleNamespace(forward_mode=ForwardMode.DECODE, reqs=[seen]))
    first_tokens.note(SimpleNamespace(forward_mode=ForwardMode.EXTEND, reqs=[retracted, request()]))
    assert first_tokens.times.num_seen == 0
