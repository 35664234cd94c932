"""The account of quality and the alpha that balances it: held, spent, bounded, and the same for the same inputs."""

from __future__ import annotations

import math
import random

import pytest
from tests.unit.policy.nodes import make_node

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.policy import make_planner, quality_correction, quality_target
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.quality_target import EARLY_GAIN, NOTHING, QualityTarget, Share

PREFILL = PrefillCost(0.01, 1e-4, 0.0)
ALLOWED = Share(1000, 1000 * 0.03)
"""A hit that loses just what a target of 0.97 allows."""


def exact(num_tokens: int = 1000) -> Share:
    return Share(num_tokens, 0.0)


def run(target: QualityTarget, served: Share, refused: Share = NOTHING) -> None:
    """A request whose whole prompt is known."""
    target.note_prompt(served.num_tokens + refused.num_tokens)
    target.note_hit(served, refused)


def alpha_after(target: QualityTarget, now_s: float = 1e6) -> float:
    target.next_alpha(now_s, PREFILL)
    assert target.alpha is not None
    return target.alpha


@pytest.mark.parametrize("quality", [0.0, -0.1, 1.01, math.nan, math.inf])
def test_a_quality_that_cannot_be_held_is_refused(quality: float) -> None:
    with pytest.raises(ValueError, match="expected a number above 0, at most 1"):
        QualityTarget(quality)


def test_it_starts_near_exact() -> None:
    """A loss of 0.033 costs as much as prefilling the prefix again; the first hit that loses nothing lowers that."""
    target = QualityTarget(0.97)
    run(target, exact(2000))
    assert target.next_alpha(0.0, PREFILL) == pytest.approx(math.exp(-EARLY_GAIN) * 30.0 * 2000 * 1e-4, rel=0.06)


def test_before_there_are_hits_the_prompts_say_what_a_usual_one_is() -> None:
    target = QualityTarget(0.97)
    target.note_prompt(50_000)
    assert alpha_after(target) == pytest.approx(30.0 * 50_000 * 1e-4, rel=0.02)
    for _ in range(200):
        target.note_prompt(50_000)
        target.note_hit(ALLOWED)
    assert target.next_alpha(2e6, PREFILL) == pytest.approx(alpha_after(target))
    assert alpha_after(target) < 30.0 * 50_000 * 1e-4 / 1.4


def test_what_is_unspent_lowers_alpha_and_what_is_owed_raises_it() -> None:
    """Credit counts beside the gain, which follows what is spent: here as much as is earned."""
    saved, owing, even = (QualityTarget(0.97) for _ in range(3))
    for target, credit in ((saved, 3000.0), (owing, -600.0), (even, 0.0)):
        for _ in range(300):
            target.note_prompt(1000)
            target.note_hit(ALLOWED)
        target.credit = credit
    hits = quality_target.ALPHA_CREDIT
    assert alpha_after(saved) == pytest.approx(alpha_after(even) * math.exp(-100 / hits), rel=1e-3)
    assert alpha_after(owing) == pytest.approx(alpha_after(even) * math.exp(20 / hits), rel=1e-3)


def test_hits_of_a_first_token_alone_move_nothing() -> None:
    """Prompts that share no more than that tell nothing of what a usual prefix costs or loses."""
    target, other = QualityTarget(0.97), QualityTarget(0.97)
    for _ in range(3):
        for _ in range(36):
            target.note_hit(Share(1, 0.0))
        for each in (target, other):
            each.note_hit(exact(2000))
    assert alpha_after(target) == pytest.approx(alpha_after(other), rel=0.1)


def test_the_first_hits_move_alpha_most() -> None:
    """A server that begins with exact KV is where it should be after some dozens of them, not hundreds."""
    target, late = QualityTarget(0.97), QualityTarget(0.97)
    for _ in range(500):
        run(late, ALLOWED)
    before = alpha_after(late)
    for _ in range(60):
        run(target, exact())
        run(late, exact())
    assert alpha_after(target) < alpha_after(QualityTarget(0.97)) / 8
    assert alpha_after(late) > before / 2


def test_unspent_credit_lowers_alpha_and_losses_raise_it() -> None:
    spent, saved, lossy = (QualityTarget(0.97) for _ in range(3))
    for _ in range(300):
        run(spent, ALLOWED)
        run(saved, exact())
        run(lossy, Share(1000, 90.0))
    assert alpha_after(spent) == pytest.approx(30.0 * 1000 * 1e-4, rel=0.1)  # where it started
    assert alpha_after(saved) < alpha_after(spent) / 10
    assert alpha_after(lossy) > 10 * alpha_after(spent)


def test_what_is_refused_raises_alpha_as_well() -> None:
    target, start = QualityTarget(0.97), QualityTarget(0.97)
    start.note_hit(exact())
    for _ in range(100):
        target.note_hit(Share(), Share(1000, 200.0))
    assert alpha_after(target) > 2 * alpha_after(start)
    assert target.credit == 0.0


def test_only_what_can_be_paid_for_is_affordable() -> None:
    target = QualityTarget(0.97)
    good, bad = Share(1000, 20.0), Share(1000, 500.0)
    assert target.num_affordable([good, good]) == 2
    assert target.num_affordable([good, bad]) == 1
    assert target.num_affordable([bad, good]) == 0
    assert target.num_affordable([bad, exact(100_000)]) == 2  # the mean over the whole prefix counts
    for _ in range(125):
        run(target, exact())
    assert target.num_affordable([bad]) == 1
    target.note_hit(bad)
    assert target.num_affordable([bad]) == 0


def test_a_lossy_prefix_is_served_where_it_saves_more_than_its_loss_costs() -> None:
    """Seconds of a long one grow faster than its tokens: at the same share of loss only a short one is refused."""
    target, prefill = QualityTarget(0.97), PrefillCost(0.01, 1e-5, 1e-8)
    for _ in range(100):
        target.note_prompt(10_000)
        target.note_hit(Share(10_000, 300.0))
    assert abs(target.credit) < 1e-9 and target.alpha is None
    short, long = Share(1000, 45.0), Share(100_000, 4500.0)
    assert (target.num_affordable([short]), target.num_affordable([long])) == (1, 1)  # nothing has a price yet
    target.next_alpha(0.0, prefill)
    assert target.alpha is not None
    price_s = target.alpha / 10_000  # of a lost token
    assert prefill.marginal_seconds(1000, 0) < price_s * 15.0 < prefill.marginal_seconds(100_000, 0) / 100
    assert (target.num_affordable([short]), target.num_affordable([long])) == (0, 1)
    assert target.num_affordable([Share(1000, 30.0)]) == 1  # what it earns pays for it
    assert target.num_affordable([exact(), short]) == 1  # each node of a prefix is worth it by itself
    assert target.num_affordable([short, exact()]) == 2
    target.next_alpha(1.0, prefill, recompute_weight=4.0)  # others would wait for it
    assert target.num_affordable([short]) == 1
    target.next_alpha(2.0, prefill)
    target.credit = quality_target.PRICE_CREDIT * 300.0
    assert target.num_affordable([short]) == 1  # credit makes all cheaper


def test_the_price_stays_until_alpha_moves() -> None:
    """Neither a cheaper prefill nor a longer prompt changes what a lost token costs beside an older alpha."""
    target, prefill = QualityTarget(0.97), PrefillCost(0.01, 1e-4, 0.0)
    for _ in range(100):
        run(target, ALLOWED)
    part = Share(1000, 31.0)
    target.next_alpha(0.0, prefill)
    assert target.num_affordable([part]) == 1
    assert target.next_alpha(0.1, PrefillCost(0.01, 1e-7, 0.0)) is None
    assert target.num_affordable([part]) == 1
    run(target, exact(100_000))
    target.credit = 0.0
    assert target.num_affordable([part]) == 1


@pytest.mark.parametrize(("quality", "owed"), [(0.95, 0.002), (0.97, 0.002), (0.999, 0.0002)])
def test_no_more_is_owed_than_a_small_share_of_what_was_served(
    quality: float, owed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what can be paid for counts where nothing has a price."""
    monkeypatch.setattr(quality_target, "CREDIT_AFTER", 0.0)
    target, draw = QualityTarget(quality), random.Random(5)
    tokens = lost = deepest = 0.0
    for _ in range(3000):
        num_tokens = draw.randrange(64, 20_000)
        part = Share(num_tokens, num_tokens * draw.choice([0.0, draw.uniform(0.0, 6.0 * (1.0 - quality))]))
        if target.num_affordable([part]):
            target.note_hit(part)
            tokens, lost = tokens + part.num_tokens, lost + part.lost
            deepest = max(deepest, quality - 1.0 + lost / tokens)
        else:
            target.note_hit(Share(), part)
    assert 0.5 * owed < deepest <= owed * (1.0 + 1e-9)


def test_no_more_is_owed_than_some_usual_hits_earn() -> None:
    target = QualityTarget(0.97)
    for _ in range(10_000):
        run(target, ALLOWED)
    most = quality_target.MAX_DEBT * 30.0
    assert target.num_affordable([Share(1000, 30.0 + 0.9 * most)]) == 1
    assert target.num_affordable([Share(1000, 30.0 + 1.1 * most)]) == 0


def test_a_long_prompt_that_finds_nothing_moves_nothing_once_there_were_hits() -> None:
    target = QualityTarget(0.97)
    for _ in range(100):
        target.note_prompt(1000)
        target.note_hit(Share(512, 512 * 0.03))
    before = alpha_after(target)
    target.note_prompt(500_000)
    assert alpha_after(target, 2e6) == before == pytest.approx(30.0 * 512 * 1e-4, rel=0.1)


def test_exact_kv_is_served_whatever_is_owed() -> None:
    target = QualityTarget(0.97)
    target.note_hit(Share(100_000, 20_000))
    assert target.credit < 0.0
    assert target.num_affordable([exact(8000), Share(500, 60)]) == 1


def test_what_the_first_hits_leave_unspent_is_not_kept() -> None:
    target = QualityTarget(0.97)
    num_hits = 0
    while target.credit == 0.0:
        assert target.num_affordable([Share(1000, 30.0)]) == 1  # a hit spends what it earns itself
        run(target, exact())
        num_hits += 1
    assert num_hits == pytest.approx(quality_target.CREDIT_AFTER, rel=0.05)
    assert target.credit == pytest.approx(1000 * quality_target.MAX_CREDIT_SHARE)


def test_credit_is_bounded() -> None:
    target = QualityTarget(0.97)
    for _ in range(10_000):
        run(target, exact())
    assert target.credit == pytest.approx(quality_target.MAX_CREDIT * 30.0, rel=0.01)


@pytest.mark.parametrize("error", [0.0, 0.05, -0.05])
@pytest.mark.parametrize("quality", [0.95, 0.97, 0.99])
def test_the_target_is_held_whatever_lies_in_the_cache(quality: float, error: float) -> None:
    """Prefixes of random size and quality, whatever alpha says; curves that promise ``error`` too much."""
    target, draw = QualityTarget(quality), random.Random(7)
    tokens = lost = 0.0
    for number in range(6000):
        size, predicted = draw.randrange(64, 20_000), draw.choice([1.0, 1.0, draw.uniform(0.3, 1.0)])
        part = Share(size, size * (1.0 - predicted))
        if not target.num_affordable([part]):
            target.note_hit(Share(), part)
            continue
        target.note_hit(part)
        true = predicted if predicted == 1.0 else min(1.0, max(0.0, predicted - error))
        if predicted < 1.0 and number % 8 == 0:
            target.note_judged(predicted, true)
        if number >= 1500:
            tokens += size
            lost += size * (1.0 - true)
    assert quality - 0.005 <= 1.0 - lost / tokens
    if error == 0.0:
        assert 1.0 - lost / tokens < quality + 0.005  # and it is spent


def test_alpha_settles_where_the_target_is_spent() -> None:
    """A cache whose prefixes lose less the higher alpha is, with a delay."""
    target, draw = QualityTarget(0.97), random.Random(3)
    recent: list[float] = []
    stored = [0.0] * 200  # losses of what lies there: each is used, then replaced at the present alpha
    for number in range(6000):
        alpha = target.next_alpha(float(number), PREFILL) or target.alpha or 1.0
        slot = draw.randrange(len(stored))
        part = Share(1000, 1000 * stored[slot])
        if target.num_affordable([part]):
            target.note_hit(part)
            recent.append(stored[slot])
        else:
            target.note_hit(Share(), part)
        stored[slot] = min(0.8, draw.expovariate(1.0) * 0.3 / (1.0 + alpha))
    last = recent[-2000:]
    assert 0.965 <= 1.0 - sum(last) / len(last) <= 0.98
    assert len(recent) > 0.9 * 6000  # little is refused


def test_the_same_inputs_give_the_same_answers() -> None:
    def answers() -> list[object]:
        target, draw, found = QualityTarget(0.96), random.Random(1), list[object]()
        for number in range(500):
            parts = [Share(draw.randrange(1, 5000), draw.uniform(0.0, 300.0)) for _ in range(3)]
            found.append(target.num_affordable(parts))
            target.note_hit(parts[0], parts[1])
            target.note_judged(draw.random(), draw.random())
            found.append(target.next_alpha(2.0 * number, PREFILL, 50))
        return [*found, target.credit, target.correction, target.predicted, target.measured]

    assert answers() == answers()


def test_alpha_stays_in_bounds() -> None:
    low, high = QualityTarget(0.9), QualityTarget(0.9)
    for _ in range(5000):
        run(low, exact())
        run(high, Share(1000, 1000.0))
    seconds = 1000 * 1e-4
    assert alpha_after(low) == pytest.approx(1e-3 * seconds)
    assert alpha_after(high) == pytest.approx(1e4 * seconds)


def test_alpha_moves_seldom_and_by_enough() -> None:
    target = QualityTarget(0.97)
    first = target.next_alpha(5.0, PREFILL)
    assert first is not None
    for _ in range(30):
        target.note_hit(exact(4096))
    assert target.next_alpha(5.0 + quality_target.PAUSE_S - 0.1, PREFILL) is None
    assert target.next_alpha(5.0 + quality_target.PAUSE_S, PREFILL, num_nodes=100_000) is None  # takes a second there
    moved = target.next_alpha(5.0 + quality_target.PAUSE_S, PREFILL)
    assert moved is not None and moved < first * 0.9
    target.note_hit(exact(4096))
    assert target.next_alpha(100.0, PREFILL) is None
    assert target.alpha == moved


def test_alpha_follows_the_machine() -> None:
    target = QualityTarget(0.97)
    first = target.next_alpha(0.0, PREFILL)
    assert first is not None
    assert target.next_alpha(20.0, PrefillCost(0.0, 1e-3, 0.0)) == pytest.approx(10.0 * first)


def test_judged_answers_correct_what_is_predicted() -> None:
    target = QualityTarget(0.97)
    target.note_hit(Share(1000, 20.0))
    assert (target.predicted, target.measured) == (pytest.approx(0.98), pytest.approx(0.98))
    for _ in range(400):
        target.note_judged(0.9, 0.8)
    assert target.correction == pytest.approx(2.0, rel=0.01)
    assert target.measured == pytest.approx(0.96, abs=1e-3)
    target.credit = 10.0
    assert target.num_affordable([Share(1000, 19.0)]) == 1
    assert target.num_affordable([Share(1000, 22.0)]) == 0  # 44 of 30, the credit and 2 that may be owed
    for _ in range(1000):
        target.note_judged(0.99, 0.0)
    assert target.correction == 10.0
    with pytest.raises(ValueError, match="finite"):
        target.note_judged(0.9, math.nan)


def test_nothing_counts_as_better_than_predicted_once_no_answer_was_judged_for_long() -> None:
    target = QualityTarget(0.97)
    target.next_alpha(0.0, PREFILL)
    for _ in range(400):
        target.note_judged(0.8, 0.9)
    target.next_alpha(quality_correction.FRESH_S, PREFILL)
    assert target.correction == pytest.approx(0.5, rel=0.01)
    target.next_alpha(quality_correction.FRESH_S + 1.0, PREFILL)
    assert target.correction == 1.0


def test_nothing_is_shown_before_the_first_hit() -> None:
    target = QualityTarget(0.97)
    assert (target.predicted, target.measured, target.correction) == (None, None, 1.0)


def test_with_a_quality_of_1_nothing_lossy_is_affordable() -> None:
    target = QualityTarget(1.0)
    for _ in range(100):
        run(target, exact(), Share(1000, 1.0))
    assert target.num_affordable([exact(), Share(1000, 1e-9), exact()]) == 1
    assert alpha_after(target) == pytest.approx(30.0 * 2000 * 1e-4, rel=0.01)


def test_a_planner_weighs_by_the_alpha_that_it_is_told() -> None:
    menu = Menu((Form("keydiff", 0.5),), (Tier.GPU, Tier.HOST))
    costs = CostSnapshot(PrefillCost(0.0, 0.1, 0.0), {Tier.HOST: TransferCost(0.0, 1e3)}, {})
    nodes = [make_node(number, menu=menu, tokens=10, curve=(1.0, 0.6), weight=number + 1.0) for number in range(4)]
    told, made = (make_planner("evicpress", menu, alpha=alpha, costs=costs) for alpha in (0.01, 50.0))
    for planner in (told, made):
        planner.add_all(nodes)
    before = told.plan(Tier.GPU, 25)
    told.set_alpha(50.0)
    assert told.alpha == 50.0
    assert told.plan(Tier.GPU, 25) == made.plan(Tier.GPU, 25) != before
    assert any(decision.option.form != EXACT for decision in before)
    with pytest.raises(ValueError, match="alpha is nan"):
        told.set_alpha(math.nan)


def test_a_policy_without_utility_has_no_alpha() -> None:
    planner = make_planner("lru", Menu((), (Tier.GPU,)), alpha=1.0, costs=CostSnapshot(PREFILL, {}, {}))
    planner.set_alpha(3.0)
    assert planner.alpha is None
