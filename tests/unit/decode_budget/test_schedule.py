"""The rhythm of one request, played step by step: what a pass drops, what it leaves, and when the next one comes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.decode_budget.schedule import (
    block_size,
    check,
    is_due,
    is_near,
    is_over,
    least_tokens,
    peak,
    protected_blocks,
    target,
)
from sglang_evicpress.decode_budget.settings import METHODS, PROTECTIONS, DecodeSettings

PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass
class Run:
    """A request that decodes ``steps`` tokens: slots before and after each visit, the first visit included."""

    settings: DecodeSettings
    page_size: int
    prompt: int
    steps: int
    visits: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        held = self.visit(self.prompt, is_first=True)
        for _ in range(self.steps):
            held = self.visit(held + 1)

    def visit(self, held: int, is_first: bool = False) -> int:
        over = is_first and is_over(self.settings, held, self.page_size)
        drops = over or is_due(self.settings, held, self.page_size)
        after = target(self.settings, held, self.page_size) if drops else held
        self.visits.append((held, after))
        return after

    @property
    def passes(self) -> list[tuple[int, int]]:
        return [(before, after) for before, after in self.visits if before != after]


@st.composite
def runs(draw: st.DrawFn) -> Run:
    page_size = draw(st.sampled_from(PAGE_SIZES))
    method = draw(st.sampled_from(METHODS))
    protected_pages = draw(st.sampled_from([(), ("first",), ("newest",), PROTECTIONS]))
    sinks = draw(st.integers(0, 80))
    settings = DecodeSettings(1, method, interval=draw(st.integers(1, 70)), protected_pages=protected_pages)
    tokens = least_tokens(settings, page_size, sinks) + draw(st.integers(0, 3 * page_size))
    settings = DecodeSettings(tokens, method, interval=settings.interval, protected_pages=protected_pages)
    check(settings, page_size, sinks)
    run = Run(
        settings, page_size, draw(st.integers(1, 2 * tokens + 70)), draw(st.integers(0, 5 * block_size(page_size) + 80))
    )
    least = min([after for _, after in run.passes], default=sinks + 1)
    assert least > sinks, "a pass leaves the sinks and one more"
    return run


@given(runs())
def test_what_is_dropped_is_always_whole_pages(run):
    assert all(after < before and (before - after) % run.page_size == 0 for before, after in run.passes)


@given(runs())
def test_a_second_visit_without_a_decode_step_does_nothing(run):
    assert not is_over(run.settings, run.visits[0][1], run.page_size)
    assert not any(is_due(run.settings, after, run.page_size) for _, after in run.visits)


@given(runs())
def test_a_decoding_request_stays_below_its_bound(run):
    bound = run.settings.tokens + (0 if run.settings.method == "paged" else run.settings.interval)
    assert all(before <= bound for before, _ in run.visits[1:])
    assert all(after <= run.settings.tokens for _, after in run.passes)


@given(runs())
def test_the_peak_is_in_whole_pages_and_never_exceeded(run):
    most = peak(run.settings, run.page_size)
    assert most % run.page_size == 0
    assert all(-(-before // run.page_size) * run.page_size <= most for before, _ in run.visits[1:])


@given(runs())
def test_paged_frees_one_unprotected_block_whenever_a_block_fills_at_the_budget(run):
    if run.settings.method != "paged":
        return
    block = block_size(run.page_size)
    assert block >= 16 and block % run.page_size == 0
    for before, after in run.visits[1:]:
        if before != after:
            assert before - after == block
            assert before % block == 0
            assert before // block > sum(protected_blocks(run.settings.protected_pages, block, 0))


@pytest.mark.parametrize("page_size", [1, 2, 4, 8])
def test_paged_makes_the_same_passes_with_small_pages_as_with_pages_of_16(page_size):
    """At most one per 16 tokens; a pass reads the whole row."""
    settings = DecodeSettings(100)
    small, large = Run(settings, page_size, 333, 100), Run(settings, 16, 333, 100)
    assert small.visits == large.visits
    assert len(small.passes) <= 2 + 100 // 16


@pytest.mark.parametrize(("page_size", "sinks", "blocks"), [(1, 4, 1), (1, 0, 1), (1, 17, 2), (16, 40, 3), (64, 4, 1)])
def test_every_block_with_a_sink_is_protected(page_size, sinks, blocks):
    assert protected_blocks(PROTECTIONS, block_size(page_size), sinks) == (blocks, 1)
    assert protected_blocks(("newest",), block_size(page_size), sinks) == (0, 1)


@given(st.sampled_from(PAGE_SIZES), st.integers(0, 70), st.sampled_from([("first",), PROTECTIONS]), st.integers(0, 90))
def test_a_pass_that_was_put_off_is_made_up_for_at_the_next_token(page_size, sinks, protected_pages, late):
    settings = DecodeSettings(1, protected_pages=protected_pages)
    settings = DecodeSettings(least_tokens(settings, page_size, sinks) + 5, protected_pages=protected_pages)
    most, block = peak(settings, page_size), block_size(page_size)
    held = most + late
    assert is_due(settings, held, page_size)
    left = target(settings, held, page_size)
    assert left <= most and not is_due(settings, left, page_size) and (held - left) % block == 0
    num_free = (
        held // block
        - sum(protected_blocks(protected_pages, block, sinks))
        + bool(held % block and len(protected_pages) == 2)
    )
    assert num_free >= (held - left) // block, "what lies behind the last full block is the newest"


@given(runs())
def test_the_others_drop_every_so_many_tokens(run):
    if run.settings.method == "paged":
        return
    times = [step for step, (before, after) in enumerate(run.visits[1:]) if before != after]
    gaps = [late - early for early, late in zip(times, times[1:], strict=False)]
    assert all(run.settings.interval <= gap < run.settings.interval + run.page_size for gap in gaps)


@pytest.mark.parametrize("page_size", [1, 16, 32, 64])
def test_a_peak_is_reached_where_pages_divide_the_budget(page_size):
    for method in METHODS:
        settings = DecodeSettings(256, method, interval=64)
        run = Run(settings, page_size, prompt=300, steps=400)
        assert max(before for before, _ in run.visits[1:]) == peak(settings, page_size)


def test_a_long_prompt_is_dropped_to_the_budget_before_the_first_step():
    repack, paged = DecodeSettings(128, "repack"), DecodeSettings(128, "paged")
    assert is_over(repack, 129, 16)
    assert not is_over(repack, 128, 16)
    assert [target(repack, n, 16) for n in (1000, 1008, 1009)] == [120, 128, 113]
    # A prompt that ends with its page needs room for the next one: with paged the pass makes it.
    assert [target(paged, n, 16) for n in (1000, 1008, 1009)] == [120, 112, 113]


def test_paged_with_a_budget_of_no_whole_pages_stays_below_it():
    settings = DecodeSettings(70, "paged")
    assert peak(settings, 16) == 64
    assert max(before for before, _ in Run(settings, 16, prompt=70, steps=200).visits[1:]) == 64


@pytest.mark.parametrize(
    ("settings", "page_size", "sinks", "least"),
    [
        (DecodeSettings(1, "paged"), 16, 4, 48),
        (DecodeSettings(1, "paged", protected_pages=("first",)), 16, 4, 32),
        (DecodeSettings(1, "paged", protected_pages=()), 16, 4, 32),
        (DecodeSettings(1, "paged", protected_pages=()), 16, 16, 48),
        (DecodeSettings(1, "paged"), 1, 4, 48),
        (DecodeSettings(1, "paged"), 16, 20, 64),
        (DecodeSettings(1, "paged", protected_pages=()), 2, 4, 32),
        (DecodeSettings(1, "repack"), 16, 4, 20),
        (DecodeSettings(1, "holefill"), 1, 0, 1),
    ],
)
def test_the_smallest_budget_leaves_what_must_stay(settings, page_size, sinks, least):
    assert least_tokens(settings, page_size, sinks) == least


def test_a_budget_that_is_too_small_is_refused_in_one_sentence():
    with pytest.raises(ValueError) as refusal:
        check(DecodeSettings(47), 16, 4)
    assert str(refusal.value) == (
        "kv_decode_budget is 47: expected at least 48 for paged with pages of 16, 4 sinks and protected "
        "pages first,newest"
    )
    check(DecodeSettings(48), 16, 4)
    with pytest.raises(ValueError, match="for paged with pages of 1 freed in blocks of 16, 4 sinks"):
        check(DecodeSettings(47), 1, 4)


@given(
    st.sampled_from(METHODS),
    st.sampled_from(PAGE_SIZES),
    st.integers(0, 700),
    st.integers(64, 300),
    st.integers(0, 140),
)
def test_a_pass_is_near_when_one_of_the_next_tokens_makes_it_due(
    method: str, page_size: int, num_slots: int, tokens: int, within: int
) -> None:
    settings = DecodeSettings(tokens=tokens, method=method, interval=50)
    expected = any(is_due(settings, num_slots + more, page_size) for more in range(within + 1))
    assert is_near(settings, num_slots, page_size, within) == expected
