"""The quality target of a server: what it refuses, what it spends, and the alpha that follows at the stamped clock.

Over the real cache and pools, with the harness of the random walks.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.cache.test_radix_cache_model import CURVES, Request
from tests.contract.profiling.test_profiling import ProfiledWalk
from tests.contract.profiling.test_shadows import HALF

from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.patches.cache import radix_cache
from sglang_evicpress.patches.tree.namespaces import SHADOW_PREFIX, salted_key
from sglang_evicpress.policy import quality_target
from sglang_evicpress.policy.quality_target import MAX_CREDIT_SHARE
from sglang_evicpress.policy.rules.evicpress import EvicPressPolicy

pytestmark = pytest.mark.sglang

FIFTH = Form(HALF.press, 0.2)


def make_walk(quality: float | None = 0.97, **settings: object) -> ProfiledWalk:
    return ProfiledWalk(curves=CURVES, alpha=None if quality else 0.3, quality=quality, **settings)


def stats(walk: ProfiledWalk) -> dict[str, Any]:
    described: dict[str, Any] = walk.cache.inspector.describe_stats()
    return described


def compressed(walk: ProfiledWalk, form: Form = HALF) -> list[int]:
    """A context whose KV lies there in a form."""
    tokens: list[int] = walk.random_tokens(256)
    walk.answer(tokens)
    for node in walk.parts(tokens):
        walk.cache.parts.moves.compress(node.id, form)
    return tokens


@pytest.fixture
def keeps_credit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first hits earn as later ones do."""
    monkeypatch.setattr(quality_target, "CREDIT_AFTER", 0.0)


def earn(walk: ProfiledWalk, num_hits: int) -> None:
    """So many hits of 256 exact tokens."""
    tokens = walk.random_tokens(256)
    for index in range(num_hits + 1):
        walk.answer([*tokens, index])


def test_what_the_account_cannot_pay_for_is_computed_and_then_exact() -> None:
    walk = make_walk()
    tokens = compressed(walk)
    assert [node.kv.form for node in walk.parts(tokens)] == [HALF]
    walk.answer([*tokens, 1], 7)
    assert [node.kv.form.is_exact for node in walk.parts(tokens)] == [True]
    assert stats(walk)["quality"]["refused_tokens"] == 256
    assert walk.cache.parts.recomputation.counts.computed["too_lossy"] == 256
    walk.answer([*tokens, 2], 7)
    assert stats(walk)["quality"]["refused_tokens"] == 256
    assert stats(walk)["quality"]["predicted"] == 1.0
    walk.check()


@pytest.mark.usefixtures("keeps_credit")
def test_credit_is_spent_on_what_is_lossy() -> None:
    """Loss of 0.125 of its tokens where 0.03 is earned and half of it kept: eight exact hits and its own pay for it."""
    walk = make_walk()
    tokens = compressed(walk)
    earn(walk, 8)
    walk.answer([*tokens, 1], 7)
    quality = stats(walk)["quality"]
    assert quality["refused_tokens"] == 0
    assert quality["credit_tokens"] == pytest.approx(256 * (8 * MAX_CREDIT_SHARE + 0.03 - 0.125))
    assert quality["predicted"] == pytest.approx(1.0 - 0.125 / 9, abs=1e-3)
    walk.answer([*tokens, 2], 7)
    assert stats(walk)["quality"]["refused_tokens"] == 256


def served(request: Request) -> dict[str, Any]:
    """What the answer says of the KV that was served."""
    assert request.customized_info is not None
    (kv,) = request.customized_info["kv_cache"]
    assert isinstance(kv, dict)
    assert sum(kv["tiers"].values()) == kv["exact_tokens"] + kv["lossy_tokens"]
    return {name: value for name, value in kv.items() if name != "tiers"}


def test_a_request_is_served_what_is_good_enough_for_it() -> None:
    """HALF is predicted to be worth 0.875."""
    walk = make_walk(None)
    tokens = compressed(walk)
    assert served(walk.answer([*tokens, 1], 7, quality=0.8)) == {
        "exact_tokens": 0,
        "lossy_tokens": 256,
        "min_quality": 0.875,
    }
    assert stats(walk)["quality"]["below_floor_tokens"] == 0
    assert served(walk.answer([*tokens, 2], 7, quality=0.9)) == {
        "exact_tokens": 0,
        "lossy_tokens": 0,
        "min_quality": 1.0,
    }
    assert stats(walk)["quality"]["below_floor_tokens"] == 256
    assert walk.cache.parts.recomputation.counts.computed["asked_quality"] == 256
    # What it computed has taken the place of the lossy KV.
    assert served(walk.answer([*tokens, 3], 7, quality=0.9))["exact_tokens"] == 256
    assert stats(walk)["quality"]["refused_tokens"] == 0
    walk.check()


def test_a_floor_holds_for_the_mean_of_the_prefix_and_ends_it_before_what_is_too_lossy() -> None:
    walk = make_walk(None)
    tokens = walk.random_tokens(256)
    walk.answer(tokens[:128])
    walk.answer(tokens)
    walk.cache.parts.moves.compress(walk.parts(tokens)[1].id, HALF)
    assert served(walk.answer([*tokens, 1], 7, quality=0.93))["lossy_tokens"] == 128  # 1 and 0.875 are 0.9375
    assert served(walk.answer([*tokens, 2], 7, quality=0.95)) == {
        "exact_tokens": 128,
        "lossy_tokens": 0,
        "min_quality": 1.0,
    }


def test_a_floor_holds_for_each_beginning_of_the_prefix_as_what_follows_may_not_be_loaded() -> None:
    walk = make_walk(None)
    tokens = walk.random_tokens(256)
    walk.answer(tokens[:128])
    walk.answer(tokens)
    walk.cache.parts.moves.compress(walk.parts(tokens)[0].id, HALF)  # 0.875 and 1 are 0.9375
    assert served(walk.answer([*tokens, 1], 7, quality=0.9)) == {
        "exact_tokens": 0,
        "lossy_tokens": 0,
        "min_quality": 1.0,
    }


def test_a_floor_holds_where_a_match_ends_inside_a_compressed_node() -> None:
    """The piece that is left may hold less than its share of the slots: HALF is worth 0.875 as a whole."""
    walk, seen = make_walk(None, num_slots=8192), set()
    for _ in range(8):
        tokens = walk.random_tokens(256)
        walk.answer(tokens)
        largest = max(walk.parts(tokens), key=lambda node: len(node.key))
        walk.cache.parts.moves.compress(largest.id, HALF)
        told = served(walk.answer([*tokens[:96], *[9] * 64], 7, quality=0.87))
        assert told["min_quality"] >= 0.87
        seen.add(told["lossy_tokens"])
    assert len(seen) > 1  # some pieces are good enough


def test_what_was_computed_upon_a_better_prefix_takes_the_place_of_worse_kv() -> None:
    walk = make_walk(None)
    tokens = walk.random_tokens(256)
    walk.answer(tokens[:128])
    walk.answer(tokens)
    first, last = walk.parts(tokens)
    walk.cache.parts.moves.compress(first.id, HALF)
    walk.cache.parts.moves.compress(last.id, FIFTH)
    request = walk.answer([*tokens, 1], 7, quality=0.87)
    assert served(request)["lossy_tokens"] == 128 and request.evicpress.is_lossy
    assert last.kv.form == EXACT and last.kv.is_lossy_prefix and last.kv.prefix_quality == pytest.approx(0.875)
    assert served(walk.answer([*tokens, 2], 7, quality=0.87))["lossy_tokens"] >= 256
    walk.check()


def test_judged_answers_raise_what_is_asked_of_a_prediction() -> None:
    walk = make_walk(None)
    tokens = compressed(walk)
    walk.cache.quality.note_observed(walk.key_of(tokens), [(0.9, 0.7)] * 20)  # three times the loss
    assert served(walk.answer([*tokens, 1], 7, quality=0.8))["lossy_tokens"] == 0


def test_a_tenant_is_served_and_stored_no_less_than_its_floor() -> None:
    tenants = {"acme": {"cache_salt": "a/b", "kv_quality": 0.9}, "law": {"cache_salt": "c", "kv_quality": "exact"}}
    walk = make_walk(None, tenants=tenants)
    key, law = salted_key("a/b", "x"), salted_key("c", "")
    for namespace in (key, law, None):
        tokens = walk.random_tokens(256)
        walk.answer(tokens, namespace=namespace)
        (node,) = walk.parts(tokens, namespace)
        stats_of = walk.cache.parts.view.stats_of(node)
        forms = [
            form for index, form in enumerate(walk.cache.parts.tree.menu.forms) if stats_of.allowed_forms >> index & 1
        ]
        assert (HALF in forms) == (namespace is None) and all(form.is_exact for form in forms if namespace == law)
        walk.cache.parts.moves.compress(node.id, HALF)
        request = walk.answer([*tokens, 1], 7, namespace=namespace, quality=0.5)
        assert served(request)["lossy_tokens"] == (256 if namespace is None else 0)


def test_what_a_floor_lets_nodes_become_follows_judged_answers() -> None:
    walk = make_walk(None, tenants={"acme": {"cache_salt": "a/b", "kv_quality": 0.87}})
    key = salted_key("a/b", "x")
    tokens = walk.random_tokens(256)
    walk.answer(tokens, namespace=key)
    (node,) = walk.parts(tokens, key)
    parts = walk.cache.parts
    bit = 1 << parts.tree.menu.forms.index(HALF)

    def allows_half() -> bool:
        parts.quality_control.follow_clock()
        parts.tree.policy.finish()
        return bool(parts.tree.policy.planner.index.candidates[node.id].allowed_forms & bit)

    assert allows_half()
    walk.cache.quality.note_observed(walk.key_of(tokens), [(0.9, 0.7)] * 20)  # three times the loss
    assert not allows_half()
    walk.check()


@pytest.mark.usefixtures("keeps_credit")
def test_what_was_computed_on_a_lossy_prefix_costs_what_that_was_worth_when_it_is_exact_again() -> None:
    walk = make_walk()
    tokens = compressed(walk)
    earn(walk, 12)
    walk.answer([*tokens, *[7] * 64], 7)  # served lossy, so that what it computes is lossy too
    (first, *_), (*_, last) = walk.parts(tokens), walk.parts([*tokens, *[7] * 64])
    assert first.kv.form == HALF and last.kv.is_lossy_prefix and last.kv.prefix_quality == pytest.approx(0.875)
    walk.cache.parts.tiers.fill_replace.replace(first, walk.allocator.alloc(len(first.key)), False)
    shares = walk.cache.quality.shares_of([(first, len(first.key)), (last, len(last.key))])
    assert shares[0].lost == 0.0 and shares[1].lost == pytest.approx(0.125 * len(last.key))
    walk.is_sound = False  # nobody computed what the first holds now


def test_with_a_fixed_alpha_nothing_is_refused_or_tuned() -> None:
    walk = make_walk(None)
    tokens = compressed(walk)
    for index in range(50):
        walk.answer([*tokens, index])
        walk.wait_s(20.0)
    assert [node.kv.form for node in walk.parts(tokens)] == [HALF]
    described = stats(walk)
    assert described["alpha"] == 0.3
    assert described["quality"]["target"] is None and described["quality"]["refused_tokens"] == 0


def test_alpha_follows_at_the_stamped_clock() -> None:
    walk = make_walk()
    walk.wait_s(0.0)
    walk.cache.parts.round_begun()
    start = stats(walk)["alpha"]
    earn(walk, 100)
    assert stats(walk)["alpha"] == start
    walk.wait_s(20.0)
    assert stats(walk)["alpha"] == start, "a round follows the clock, in which no first token waits"
    walk.cache.parts.round_begun()
    policy = walk.cache.policy.planner.policy
    assert isinstance(policy, EvicPressPolicy)
    assert stats(walk)["alpha"] == policy.alpha < start / 2
    walk.check()
    walk.flush_all()
    assert stats(walk)["alpha"] == walk.cache.policy.planner.alpha == policy.alpha
    assert walk.cache.policy.planner.policy is not policy


def test_judged_answers_count() -> None:
    walk = make_walk()
    tokens = compressed(walk)
    key = walk.key_of(tokens)
    assert stats(walk)["quality"]["correction"] == 1.0
    walk.cache.quality.note_observed(key, [(0.9, 0.7)] * 20)
    assert stats(walk)["quality"]["correction"] > 2.0


def test_what_was_computed_upon_a_lossy_prefix_is_no_better_than_that() -> None:
    walk = make_walk(0.8)
    tokens = walk.random_tokens(320)
    walk.answer(tokens[:128])
    walk.cache.parts.moves.compress(walk.parts(tokens)[0].id, HALF)
    walk.answer(tokens)
    upper, lower = walk.parts(tokens)
    assert lower.kv.is_lossy_prefix and lower.kv.form.is_exact
    parts = walk.cache.quality.shares_of([(upper, 128), (lower, 192)])
    assert [(part.num_tokens, part.lost) for part in parts] == [(128, 128 * 0.125), (192, 192 * 0.125)]


def test_a_shadow_is_never_refused() -> None:
    walk = make_walk()
    tokens = compressed(walk)
    steps = [(node, len(node.key)) for node in walk.parts(tokens)]
    user, shadow = (Request("r0", tokens, len(tokens), name) for name in (None, f"{SHADOW_PREFIX}1"))
    control = walk.cache.parts.quality_control
    assert (control.num_affordable(user, steps), control.num_affordable(None, steps)) == (0, 1)
    assert control.num_affordable(shadow, steps) == 1


def test_prompts_say_what_a_usual_hit_is_before_there_are_any() -> None:
    walk = make_walk()
    walk.wait_s(0.0)
    walk.cache.parts.round_begun()
    start = stats(walk)["alpha"]
    for _ in range(3):
        walk.answer(walk.random_tokens(256))
    walk.wait_s(20.0)
    walk.cache.parts.round_begun()
    assert start / 20 < stats(walk)["alpha"] < start / 10


def test_the_target_is_told_how_much_recomputing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = make_walk()
    control, terms, told = walk.cache.parts.quality_control, walk.cache.terms, list[tuple[object, ...]]()
    monkeypatch.setattr(control.target, "next_alpha", lambda *arguments: told.append(arguments))
    terms.recompute_weight = 4.0
    control.follow_clock()
    assert told == [(terms.now_s, terms.policy_costs.prefill, len(walk.cache.nodes), 4.0)]


def test_a_retracted_request_has_paid_for_what_it_found() -> None:
    walk = make_walk()
    tokens = compressed(walk)
    steps = [(node, len(node.key)) for node in walk.parts(tokens)]
    request = Request("r0", tokens, len(tokens), None)
    control = walk.cache.parts.quality_control
    assert control.num_affordable(request, steps) == 0
    request.retracted_stain = True
    assert control.num_affordable(request, steps) == 1


def test_exact_kv_that_is_left_out_does_not_pay_for_what_is_lossy(monkeypatch: pytest.MonkeyPatch) -> None:
    walk = make_walk()
    tokens = walk.random_tokens(360)
    walk.answer(tokens[:40])
    walk.answer(tokens)
    upper, lower = walk.parts(tokens)
    walk.cache.parts.moves.compress(upper.id, HALF)
    assert [node.kv.form for node in walk.parts(tokens)] == [HALF, EXACT]
    request, control = Request("r0", [*tokens, 1], 361, None), walk.cache.parts.quality_control
    assert control.num_affordable(request, [(upper, 40), (lower, 320)]) == 2
    assert control.num_affordable(request, [(upper, 40)]) == 0
    monkeypatch.setattr(radix_cache, "servable_steps", lambda steps, _: min(1, len(steps)))
    walk.answer([*tokens, 1], 7)
    assert stats(walk)["quality"]["credit_tokens"] >= 0.0


def test_a_quality_of_1_serves_nothing_lossy() -> None:
    """Not even what is lossy by a codec that a profile says loses nothing."""
    walk = make_walk(1.0, forms=(HALF,))
    assert walk.cache.policy.menu.forms[1:] == ()
    tokens = walk.random_tokens(256)
    walk.answer(tokens)
    (node,) = walk.parts(tokens)
    node.kv.form = Form(codec="int8")  # as a load of what an earlier server left
    walk.cache.parts.tree.changes.changed(node)
    earn(walk, 20)
    walk.answer([*tokens, 1], 7)
    assert stats(walk)["quality"]["refused_tokens"] == 256
    assert [node.kv.form.is_exact for node in walk.parts(tokens)] == [True]


def test_a_decision_is_in_the_journal_with_its_alpha() -> None:
    walk = make_walk()
    walk.wait_s(0.0)
    for _ in range(12):
        walk.answer(walk.random_tokens(256))
    entries: Any = walk.cache.parts.controller.journal.read(0, 100)["entries"]
    assert entries and {entry["alpha"] for entry in entries} == {stats(walk)["alpha"]}


def test_what_a_request_asks_to_retain_weighs_more_until_its_time_is_over() -> None:
    walk = make_walk(None)
    walk.wait_s(0.0)  # from now on the clock counts
    plain, retained = walk.random_tokens(128), walk.random_tokens(128)
    walk.answer(plain, 7)
    walk.answer(retained, 7, retention=30.0)
    (first,), (second,) = walk.parts(plain), walk.parts(retained)
    assert second.kv.weight - first.kv.weight == pytest.approx(1 / 30, rel=0.1)
    num_retained = walk.cache.queued_hits.num_retained
    walk.answer([*retained[:64], 9], 7)
    _, lower = walk.parts(retained)
    assert walk.cache.queued_hits.num_retained == num_retained + 1
    walk.wait_s(31.0)
    walk.cache.queued_hits.grow_older()
    assert walk.cache.queued_hits.num_retained == 0
    assert lower.kv.weight == pytest.approx(first.kv.weight, rel=0.5)
    walk.check()
