"""Memory reserved for a request with a budget, and the limits of its settings."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from tests.contract.releases import FakeRequest

from sglang_evicpress.decode_budget.settings import DecodeSettings
from sglang_evicpress.decode_budget.stats import RequestStats
from sglang_evicpress.patches.compat import sglang_0_5_23
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.decode_budget import admission
from sglang_evicpress.patches.decode_budget.budgets import DecodeBudgets
from sglang_evicpress.patches.decode_budget.records import BudgetRecords
from sglang_evicpress.patches.decode_budget.state import DecodeState
from sglang_evicpress.patches.tree.namespaces import SHADOW_PREFIX, salted_key
from sglang_evicpress.patches.tree.node_kv import PrefixView
from sglang_evicpress.patches.tree.quality_floors import QualityFloors
from sglang_evicpress.policy.layer_counts import NO_BUDGETS, LayerGroups
from sglang_evicpress.tenants import Tenant

pytestmark = pytest.mark.sglang

PAGE, SLOTS = 16, 512

OFFSETS: type = PrefillAdder  # it, or what has its offsets in later releases
if RELEASE is sglang_0_5_23:
    from sglang.srt.mem_cache.prefill_budget import PrefillBudget as OFFSETS


def request(num_tokens: int, max_new: int, budget: DecodeSettings | None = None, *, num_out: int = 0) -> Any:
    return FakeRequest(
        rid="r",
        full_untruncated_fill_ids=list(range(num_tokens)),
        origin_input_ids=list(range(num_tokens - num_out)),
        output_ids=[0] * num_out,
        prefix_indices=torch.empty(0, dtype=torch.int64),
        sampling_params=SimpleNamespace(max_new_tokens=max_new, min_new_tokens=0, ignore_eos=False, custom_params=None),
        kv_budget=None if budget is None else DecodeState(budget, RequestStats()),
        extra_key=None,
        retraction_count=0,
        req_pool_idx=3,
        kv_allocated_len=0,
        cache_protected_len=0,
        evicpress=PrefixView(torch.empty(0, dtype=torch.int64)),
        to_finish=None,
    )


class Adder:
    """Touched part of PrefillAdder; ``add`` does as ``add_one_req`` in the simple case."""

    def __init__(self, *, num_free: int = SLOTS, chunk: int | None = 128) -> None:
        self.page_size = PAGE
        self.token_to_kv_pool_allocator = SimpleNamespace(size=SLOTS)
        self.num_free = num_free
        self.rem_total_token_offset = self.cur_rem_token_offset = 0
        self.rem_chunk_tokens = chunk
        self.new_chunked_req: Any = None
        self.given_up: list[str] = []
        give_up = SimpleNamespace(give_up=lambda req, why: self.given_up.append(why))
        self.tree_cache = SimpleNamespace(decode_budgets=give_up)
        self.asked: list[tuple[int, int]] = []

    @property
    def memory_budget(self) -> Adder:
        """Where later releases have ``total_offset``."""
        return self

    total_offset = property(
        lambda self: self.rem_total_token_offset, lambda self, value: setattr(self, "rem_total_token_offset", value)
    )

    @property
    def rem_total_tokens(self) -> int:
        return self.num_free - self.rem_total_token_offset

    @property
    def cur_rem_tokens(self) -> int:
        return self.num_free - self.cur_rem_token_offset

    def add(self, _: Any, req: Any, has_chunked_req: bool, truncation_align_size: int | None) -> AddReqResult:
        num_tokens = len(req.full_untruncated_fill_ids) - len(req.prefix_indices)
        total = num_tokens + admission.num_remaining(req) + PAGE
        self.asked.append((total, self.rem_total_tokens))
        if total >= self.rem_total_tokens:
            return AddReqResult.NO_TOKEN
        paged = -(-num_tokens // PAGE) * PAGE
        if self.rem_chunk_tokens is not None and paged > self.rem_chunk_tokens:
            paged = self.rem_chunk_tokens
            self.new_chunked_req = req
            self.rem_total_token_offset += paged + PAGE
        else:
            self.rem_total_token_offset += paged + req.sampling_params.max_new_tokens + PAGE
        if self.rem_chunk_tokens is not None:
            self.rem_chunk_tokens -= paged
        return AddReqResult.CONTINUE

    def add_one_req(self, req: Any, has_chunked_req: bool = False) -> Any:
        return admission._around_add_one_req(self.add, self, req, has_chunked_req, None)


def test_a_request_without_a_budget_is_charged_as_ever() -> None:
    adder = Adder()
    assert adder.add_one_req(request(100, 300)) is AddReqResult.CONTINUE
    assert adder.rem_total_token_offset == 112 + 300 + PAGE


def test_room_is_kept_for_the_budget_and_not_for_the_answer() -> None:
    adder = Adder()
    for _ in range(3):
        assert adder.add_one_req(request(60, 4000, DecodeSettings(128))) is AddReqResult.CONTINUE
    assert adder.rem_total_token_offset == 3 * 128
    assert adder.add_one_req(request(60, 4000, DecodeSettings(128))) is AddReqResult.NO_TOKEN
    assert adder.rem_total_token_offset == 3 * 128, "who was not added is not charged"


def test_a_short_answer_is_charged_by_its_length() -> None:
    adder = Adder()
    adder.add_one_req(request(20, 10, DecodeSettings(256)))
    assert adder.rem_total_token_offset == 20 + 10 + PAGE


def test_a_prompt_over_the_budget_needs_room_for_what_survives_as_well() -> None:
    adder = Adder()
    adder.add_one_req(request(120, 4000, DecodeSettings(64, "repack", interval=32)))
    assert adder.rem_total_token_offset == 128 + PAGE + 64


def test_a_prompt_that_leaves_no_room_for_a_copy_is_served_all_the_same() -> None:
    req = request(400, 50, DecodeSettings(128))
    assert Adder(chunk=None).add_one_req(req) is AddReqResult.CONTINUE


@pytest.mark.parametrize("budget", [DecodeSettings(384), DecodeSettings(256, "compact"), DecodeSettings(4096)])
@pytest.mark.parametrize(("num_tokens", "num_cached"), [(20, 0), (300, 0), (300, 288), (470, 0), (470, 464)])
def test_nobody_waits_for_more_than_an_empty_pool_has(budget: DecodeSettings, num_tokens: int, num_cached: int) -> None:
    """SGLang lets nobody pass who waits in front."""
    req = request(num_tokens, 4000, budget)
    take(req, {"kv_decode_budget": budget.tokens, "kv_decode_method": budget.method})
    req.prefix_indices = torch.zeros(num_cached, dtype=torch.int64)
    assert Adder(num_free=SLOTS - num_cached, chunk=None).add_one_req(req) is AddReqResult.CONTINUE


def test_a_running_request_is_charged_to_its_peak_and_never_beyond() -> None:
    adder = SimpleNamespace(page_size=PAGE)
    req = request(60, 4000, DecodeSettings(128), num_out=1)
    req.kv_allocated_len = 61
    req.kv_budget.has_left_tree = True

    def offset() -> Any:
        return admission._around_running_offset(lambda *_: 4096, adder, req)

    assert offset() == 128 - 64
    req.kv_allocated_len = 128
    assert offset() == 0
    req.sampling_params.max_new_tokens, req.kv_allocated_len = 3, 61
    assert offset() == 2


def test_what_a_running_request_shares_is_to_be_copied_before_it_drops() -> None:
    req = request(60, 4000, DecodeSettings(128), num_out=1)
    req.kv_allocated_len, req.cache_protected_len = 61, 48
    offset = admission._around_running_offset(lambda *_: 4096, SimpleNamespace(page_size=PAGE), req)
    assert offset == 128 - 16


# ---- in chunks


def retracted(num_tokens: int) -> Any:
    req = request(num_tokens, 4000, DecodeSettings(64), num_out=num_tokens - 60)
    req.retraction_count = 1
    return req


def test_a_request_that_outgrew_the_pool_is_computed_anew_in_pieces() -> None:
    adder, req = Adder(), retracted(600)
    assert adder.add_one_req(req) is AddReqResult.CONTINUE
    assert adder.new_chunked_req is req and req.kv_budget.is_chunked
    assert adder.rem_chunk_tokens == 0, "no other request joins the batch of a piece"
    assert adder.rem_total_token_offset == 64 + 2 * PAGE


@pytest.mark.parametrize("chunk", [None, 128])
def test_a_request_that_fits_with_a_copy_is_computed_anew_at_once(chunk: int | None) -> None:
    adder, req = Adder(chunk=chunk), retracted(400)
    assert adder.add_one_req(req) is AddReqResult.CONTINUE
    assert not req.kv_budget.is_chunked and not req.kv_budget.in_tree


def test_a_request_that_fits_without_a_copy_alone_is_computed_in_pieces_or_kept_out_of_the_tree() -> None:
    """Were its answer the tree's, what survives of it could never be copied out."""
    whole, pieces = Adder(chunk=None), Adder()
    one, other = retracted(470), retracted(470)
    assert whole.add_one_req(one) is AddReqResult.CONTINUE
    assert one.kv_budget.in_tree and not one.kv_budget.is_chunked
    assert pieces.add_one_req(other) is AddReqResult.CONTINUE
    assert other.kv_budget.is_chunked and pieces.new_chunked_req is other


def test_a_prefix_with_holes_takes_the_slots_that_it_has() -> None:
    adder, req = Adder(), retracted(600)
    req.prefix_indices = torch.zeros(400, dtype=torch.int64)
    adder.num_free = SLOTS - 400
    assert adder.add_one_req(req) is AddReqResult.CONTINUE and len(adder.given_up) == 1
    req.evicpress = PrefixView(torch.zeros(80, dtype=torch.int64), 320)
    adder = Adder(num_free=SLOTS - 80)
    assert adder.add_one_req(req) is AddReqResult.CONTINUE and not adder.given_up


def test_pieces_wait_for_room_and_for_the_chunks_of_others() -> None:
    req = retracted(600)
    assert Adder(num_free=100).add_one_req(req) is AddReqResult.NO_TOKEN
    assert Adder().add_one_req(req, has_chunked_req=True) is AddReqResult.OTHER
    assert not req.kv_budget.is_chunked


def test_without_chunks_there_are_no_pieces_and_the_request_is_given_up() -> None:
    adder = Adder(chunk=None)
    assert adder.add_one_req(retracted(600)) is AddReqResult.CONTINUE
    assert len(adder.given_up) == 1
    assert "600 tokens" in adder.given_up[0] and "--chunked-prefill-size" in adder.given_up[0]


def test_a_next_piece_without_room_stays_open() -> None:
    adder, req = Adder(num_free=40), retracted(600)
    req.kv_budget.is_chunked = req.kv_budget.has_left_tree = True

    def never(*_: Any) -> Any:
        raise AssertionError("a piece was added")

    assert admission._around_add_chunked_req(never, adder, req) is req
    assert adder.rem_chunk_tokens == 0


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (OFFSETS, "total_offset" if RELEASE is sglang_0_5_23 else "rem_total_token_offset"),
        (PrefillAdder, "rem_chunk_tokens"),
        (PrefillAdder, "new_chunked_req"),
        (PrefillAdder, "tree_cache"),
        (PrefillAdder, "token_to_kv_pool_allocator"),
        *([(PrefillAdder, "memory_budget")] if RELEASE is sglang_0_5_23 else []),
    ],
)
def test_adders_of_sglang_keep_their_books_under_the_names_that_are_touched(owner: type, name: str) -> None:
    assert f"self.{name} = " in inspect.getsource(owner.__init__)


# ---- what may be asked for


FLOORS = QualityFloors([Tenant("law", "s", 1.0)])


def scheduler(default: DecodeSettings | None = None, groups: LayerGroups = NO_BUDGETS) -> Any:
    """With a pool of 512 slots under a model of 4,096 tokens."""
    tree, compressor = (
        SimpleNamespace(page_size=PAGE),
        SimpleNamespace(sinks=4, groups=groups, geometry=None),
    )
    records = BudgetRecords("cpu")
    budgets = DecodeBudgets(tree, compressor, lambda reqs: False, records, default or DecodeSettings(), "on", FLOORS)
    cache = SimpleNamespace(decode_budgets=budgets)
    return SimpleNamespace(
        tree_cache=cache,
        page_size=PAGE,
        model_config=SimpleNamespace(context_len=4096),
        max_total_num_tokens=SLOTS,
    )


def take(
    req: Any,
    params: Any,
    default: DecodeSettings | None = None,
    *,
    groups: LayerGroups = NO_BUDGETS,
    limit: int | None = None,
) -> Any:
    """Take a request like SGLang: the answer is cut to what the pool has room for. Returns the scheduler."""
    made = scheduler(default, groups)
    made.max_new_tokens_limit = limit
    req.sampling_params.custom_params = params

    def original(_: Any, each: Any) -> None:
        params = each.sampling_params
        num_prompt = -(-len(each.origin_input_ids) // PAGE) * PAGE
        params.max_new_tokens = max(0, min(params.max_new_tokens, SLOTS - num_prompt - PAGE - 1))
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)

    def abort(why: str) -> None:
        req.to_finish = why

    req.set_finish_with_abort = abort
    admission._around_init_req_max_new_tokens(original, made, req)
    return made


def test_an_answer_may_outgrow_the_pool_but_not_the_context() -> None:
    req = request(100, 100_000)
    made = take(req, {"kv_decode_budget": 128, "__req__": req})
    assert req.kv_budget.settings == DecodeSettings(128)
    assert req.sampling_params.max_new_tokens == 4096 - 100 - 2
    assert made.tree_cache.decode_budgets.has_budgets and made.tree_cache.decode_budgets.totals.num_requests == 1


def test_the_limit_of_the_operator_holds_for_requests_with_budgets() -> None:
    for asked, limit, given in ((100_000, 1000, 1000), (500, 1000, 500), (500, 0, 500), (500, None, 500)):
        req = request(100, asked)
        take(req, {"kv_decode_budget": 128}, limit=limit)
        assert req.sampling_params.max_new_tokens == given


def test_the_least_number_of_tokens_is_restored_with_the_most() -> None:
    req = request(100, 20_000)
    req.sampling_params.min_new_tokens = 3000
    take(req, {"kv_decode_budget": 128})
    assert (req.sampling_params.min_new_tokens, req.sampling_params.max_new_tokens) == (3000, 3994)
    req = request(100, 20_000)
    req.sampling_params.min_new_tokens = 9000
    take(req, {"kv_decode_budget": 128}, limit=50)
    assert (req.sampling_params.min_new_tokens, req.sampling_params.max_new_tokens) == (50, 50)


def test_an_exact_request_has_no_budget_and_may_not_ask_for_one() -> None:
    exact = {"kv_quality": "exact"}
    for params in (exact, {**exact, "kv_decode_budget": 0}):
        req = request(100, 1000)
        take(req, params, DecodeSettings(256))
        assert req.kv_budget is None and req.to_finish is None
    take(req, {**exact, "kv_decode_budget": 64})
    assert req.to_finish == "kv_quality is 'exact' and kv_decode_budget is 64, which drops KV: leave one out"


def test_a_tenant_with_exact_kv_has_no_budget_either() -> None:
    for params in (None, {"kv_decode_budget": 0}):
        req = request(100, 1000)
        req.extra_key = salted_key("s", "x")
        take(req, params, DecodeSettings(256))
        assert req.kv_budget is None and req.to_finish is None
    take(req, {"kv_decode_budget": 64})
    reason = "its tenant's kv_quality is 'exact' and kv_decode_budget is 64, which drops KV: leave the latter out"
    assert req.to_finish == reason


def test_a_budget_is_refused_where_layers_keep_different_numbers_of_tokens() -> None:
    uneven = LayerGroups((0, 1), {"pyramid": (2, 1)})
    req = request(100, 1000)
    take(req, {"kv_decode_budget": 64}, groups=uneven)
    assert req.to_finish.startswith("kv_decode_budget is 64, and this server's --kv-forms keep different numbers")
    req = request(100, 1000)
    take(req, {"kv_decode_budget": 0}, groups=uneven)
    assert req.to_finish is None and req.kv_budget is None


def test_a_quality_that_is_not_known_is_refused() -> None:
    req = request(100, 1000)
    take(req, {"kv_quality": "exakt"})
    assert req.to_finish == "kv_quality is 'exakt': expected 'exact', or a number above 0, at most 1"


@pytest.mark.parametrize(("num_tokens", "budget"), [(100, 512), (300, 256), (16, 4096)])
def test_an_answer_is_cut_to_the_pool_where_the_budget_does_not_fit_in_it(num_tokens: int, budget: int) -> None:
    req = request(num_tokens, 100_000)
    take(req, {"kv_decode_budget": budget})
    assert req.kv_budget is not None
    assert req.sampling_params.max_new_tokens == SLOTS - -(-num_tokens // PAGE) * PAGE - PAGE - 1


def test_without_a_budget_a_request_is_left_as_it_is() -> None:
    for params in (None, {}, {"other": 1}, {7: 1}, {"kv_decode_budget": 0}, 5, "kv_decode_budget", [1]):
        req = request(100, 100_000)
        made = take(req, params)
        assert req.kv_budget is None and req.sampling_params.max_new_tokens == SLOTS - 112 - PAGE - 1
        assert not made.tree_cache.decode_budgets.has_budgets


def test_the_budget_of_the_server_is_for_all_that_ask_for_none() -> None:
    req = request(100, 1000)
    take(req, None, DecodeSettings(256, "compact"))
    assert req.kv_budget.settings == DecodeSettings(256, "compact")
    req = request(100, 1000)
    take(req, {"kv_decode_budget": 0}, DecodeSettings(256))
    assert req.kv_budget is None


def test_an_answer_of_one_token_needs_no_budget() -> None:
    req = request(100, 1)
    take(req, {"kv_decode_budget": 64})
    assert req.kv_budget is None and req.to_finish is None


def test_requests_that_measure_prefixes_have_no_budget() -> None:
    req = request(100, 1000)
    req.extra_key = SHADOW_PREFIX + "1"
    take(req, None, DecodeSettings(256))
    assert req.kv_budget is None


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"kv_decode_budget": 40}, "at least 48"),
        ({"kv_decode_budget": "64"}, "kv_decode_budget is '64'"),
        ({"kv_decode_budget": 64, "kv_decode_score": "h2o"}, "does not keep: start it with --kv-decode-score h2o"),
        ({"kv_decode_trace": "yes"}, "kv_decode_trace is 'yes'"),
        ({"kv_decode_budget": 64, "kv_decode_trace": True}, "--kv-decode-client-budgets trace"),
        ({"kv_decode_budget": 64, "kv_decode_interval": 1}, "kv_decode_interval is 1: expected at least 32"),
    ],
)
def test_what_cannot_be_ends_the_request_with_a_sentence(params: dict[str, Any], words: str) -> None:
    req = request(100, 1000)
    take(req, params)
    assert words in req.to_finish and req.kv_budget is None


def test_another_reason_does_not_take_the_place_of_ours() -> None:
    """SGLang goes on to check what is left of an aborted request."""
    req = request(100, 1000)
    take(req, {"kv_decode_budget": 40})
    for later in (req.to_finish, "logprob_start_len is higher than the number of input tokens"):
        req.to_finish = SimpleNamespace(message=later)
        admission._before_add_request_to_queue(None, req)
        assert "at least 48" in getattr(req.to_finish, "message", req.to_finish)


def test_what_was_not_refused_goes_into_the_queue_as_it_is() -> None:
    req = request(100, 1000)
    req.to_finish = SimpleNamespace(message="too long")
    admission._before_add_request_to_queue(None, req)
    assert req.to_finish.message == "too long"
