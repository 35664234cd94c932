"""Records of decode-time budgets and the answers from them, without a cache and without SGLang."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.contract.releases import FakeRequest

from sglang_evicpress.decode_budget.settings import DecodeSettings
from sglang_evicpress.decode_budget.stats import PassRecord, RequestStats
from sglang_evicpress.device import HostCopy
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.patches.decode_budget.inspection import RequestsInspection
from sglang_evicpress.patches.decode_budget.records import BudgetRecords
from sglang_evicpress.patches.decode_budget.state import DecodeState
from sglang_evicpress.patches.decode_budget.trace import DecodeTrace
from sglang_evicpress.patches.tree.node_kv import PrefixView


def request(records: BudgetRecords, rid: str, *, num_slots: int = 6) -> Any:
    """A running request of its own slots, of which it has dropped two."""
    trace = DecodeTrace()
    state = DecodeState(DecodeSettings(128), RequestStats(), trace=trace, number=records.note_request())
    state.has_left_tree, state.num_dropped = True, 2
    return FakeRequest(
        rid=rid,
        kv_budget=state,
        kv_allocated_len=num_slots,
        kv_committed_freed=False,
        cache_protected_len=0,
        req_pool_idx=1,
        origin_input_ids=[0] * 5,
        output_ids=[0] * 3,
        to_finish=None,
        evicpress=PrefixView(torch.empty(0, dtype=torch.int64)),
        finished=lambda: False,
    )


def answers(records: BudgetRecords, *running: Any) -> RequestsInspection:
    batch = SimpleNamespace(reqs=list(running))
    scheduler = SimpleNamespace(waiting_queue=[], running_batch=batch, last_batch=None, chunked_req=None)
    return RequestsInspection(SimpleNamespace(scheduler=scheduler), records, "cpu")


def test_a_pass_is_counted_once_and_its_copies_when_the_device_has_told() -> None:
    records = BudgetRecords("cpu")
    req = request(records, "a")
    record = PassRecord("holefill", 8, 8, 6, 1, None, 0.5)
    records.note_pass(req.kv_budget, record, (HostCopy(torch.tensor([2.0, 7.0])), 1))
    assert records.totals.counts.num_passes == 1 and records.totals.counts.slot_copies == 0.0
    records.settle_copies(req.kv_budget, but_last=True)
    assert record.copies is None, "the last one may still be on its way"
    records.settle_copies(req.kv_budget)
    assert record.copies == 7.0 == records.totals.counts.slot_copies


def test_requests_that_run_and_that_ended_are_listed_by_their_numbers() -> None:
    records = BudgetRecords("cpu")
    first, second = request(records, "a"), request(records, "b")
    second.to_finish = "its last token"
    records.note_end(second, second.kv_budget)
    shown = answers(records, first).describe_requests(None, positions=False)
    assert [(each["rid"], each["number"], each["state"]) for each in shown["requests"]] == [
        ("a", 1, "running"),
        ("b", 2, "ended"),
    ]
    assert shown["totals"]["requests"] == 2 and shown["next_after"] is None
    with pytest.raises(IntrospectionError, match="'c' has no budget here"):
        answers(records, first).describe_requests("c", positions=False)


def test_one_that_was_sent_back_after_its_abort_ends_once() -> None:
    records = BudgetRecords("cpu")
    first, second = request(records, "a"), request(records, "b")
    for req in (first, second, first):
        req.to_finish = "aborted"
        records.note_end(req, req.kv_budget)
    assert [ended.number for ended in records.ended] == [2, 1]


def test_positions_of_a_row_and_of_one_that_ended_are_the_same() -> None:
    records = BudgetRecords("cpu")
    req = request(records, "a")
    req.kv_budget.positions = torch.tensor([0, 1, 4, 5], dtype=torch.int32)  # of 8 tokens, 2 and 3 were dropped
    told = answers(records, req).describe_requests("a", positions=True)["requests"][0]
    assert told["values"].tolist() == [0, 1, 4, 5, 6, 7] and told["positions_shape"] == [6]
    req.to_finish = "its last token"
    records.note_end(req, req.kv_budget)
    ended = answers(records).describe_requests("a", positions=True)["requests"][0]
    assert ended["values"].tolist() == told["values"].tolist()


def test_a_request_that_is_sent_back_has_not_ended() -> None:
    records = BudgetRecords("cpu")
    req = request(records, "a")
    records.note_end(req, req.kv_budget)
    assert req.kv_budget.retracted == [8] and not records.ended
