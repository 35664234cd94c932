"""Quality of contexts reaches the nodes that hold them, and questions of real requests reach the profiler.

Over the real cache and pools, with the harness of the random walks.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

import pytest
from tests.contract.cache.test_radix_cache_model import CURVES, FORMS, Request, costs_of, finished
from tests.contract.profiling.test_shadows import HALF, ShadowWalk
from tests.contract.releases import end_request

from sglang_evicpress.core import Form
from sglang_evicpress.flag_groups import ProfileFlags
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.patches.profiling import quality
from sglang_evicpress.policy.cost_model import PrefillCost
from sglang_evicpress.quality.profile import Profile, context_keys
from sglang_evicpress.quality.recorder import Recorder
from sglang_evicpress.quality.running_stats import RunningStats
from sglang_evicpress.quality.store import ProfileStore
from sglang_evicpress.tiers.entry.identity import KEY_BYTES

pytestmark = pytest.mark.sglang

IDENTITY = bytes(range(1, KEY_BYTES + 1))
COST = PrefillCost(0.01, 1e-4, 0.0)
GOOD = {"knorm@0.5": 0.9, "knorm@0.2": 0.8}
POOR = {"knorm@0.5": 0.3, "knorm@0.2": 0.1}


class ProfiledWalk(ShadowWalk):
    """A pool with room for contexts that are worth a profile; nothing is known of any at the start."""

    def __init__(self, page_size: int = 1, policy: str = "evicpress", **settings: object) -> None:
        super().__init__(0, page_size, policy, **{"num_slots": 2048, "curves": None, **settings})
        self.identity = IDENTITY
        self.cache.name_profiles = lambda tokenizer: self.identity
        self.cache.attach_scheduler(self.stub)

    def key_of(self, tokens: list[int], namespace: str | None = None) -> bytes:
        return context_keys(IDENTITY, namespace, array("q", tokens))[-1]

    def profile(
        self, tokens: list[int], means: dict[str, float], namespace: str | None = None, *, query_set: str = "0" * 16
    ) -> Profile:
        """Profile of a context from nine queries that agree."""
        forms = {Form.parse(text): RunningStats(9.0, mean, 0.1) for text, mean in means.items()}
        return Profile(self.key_of(tokens, namespace), len(tokens), forms, "logprob", query_set, 9, 1e9)

    def put(self, tokens: list[int], means: dict[str, float], namespace: str | None = None, **more: object) -> int:
        profile = self.profile(tokens, means, namespace, **more)
        answered = self.cache.quality.put_profile(profile, True)
        self.check()
        return answered["num_nodes"]

    def expected(self, node: object, *forms: str) -> list[float | None]:
        """The quality that the policy's index has of forms of a node, None of those that it may not choose."""
        stats, menu = self.cache.parts.view.stats_of(node), self.cache.policy.menu.forms
        record = self.cache.policy.planner.index.candidates[node.id]
        assert (list(record.curve), record.allowed_forms) == (list(stats.curve), stats.allowed_forms)
        indices = [menu.index(Form.parse(form)) for form in forms]
        return [stats.curve[index] if stats.allowed_forms >> index & 1 else None for index in indices]

    def wait_s(self, seconds: float) -> None:
        self.count += 1
        self.stamped_s = getattr(self, "stamped_s", 0.0) + seconds
        self.cache.terms.advance(self.stamped_s, costs_of(COST))

    def answer(
        self,
        tokens: list[int],
        *answer: int,
        namespace: str | None = None,
        lora_id: str | None = None,
        quality: float | None = None,
        retention: float | None = None,
        top_k: int = 1,
    ) -> Request:
        """A user's request from its arrival to its end; ``quality`` and ``retention`` are what it asks for."""
        request = self.enqueue(namespace, tokens)
        request.lora_id, request.quality, request.retention, request.top_k = lora_id, quality, retention, top_k
        self.prefill(request)
        for token in answer:
            self.generate(request, token)
        self.end(request)
        return request

    def generate(self, request: Request, token: int) -> None:
        request.tokens.append(token)
        begin = request.kv_allocated_len
        slots = self.alloc(request, begin, begin + 1)
        self.rows.req_to_token[request.req_pool_idx, begin - request.evicpress.holes] = slots[0]
        self.compute(request, begin, begin + 1, slots)
        request.kv_allocated_len = request.filled = begin + 1

    def job(self) -> dict[str, object]:
        return json.loads(json.dumps(self.cache.inspector.next_profiling_job()))


# ---- curves


@pytest.fixture
def walk() -> ProfiledWalk:
    return ProfiledWalk()


def test_with_nothing_known_only_the_exact_form_may_be_chosen(walk: ProfiledWalk) -> None:
    walk.served(128)
    (node,) = walk.cache.nodes.values()
    assert walk.expected(node, *map(str, FORMS)) == [None] * len(FORMS)
    assert [str(option.form or "drop") for option in walk.cache.parts.view.options_of(node)] == ["drop"]
    walk.cache.parts.eviction.free_slots(64)
    assert walk.cache.parts.controller.num_dropped == 1 and not walk.cache.parts.controller.num_compressed
    assert walk.cache.inspector.list_profiles()["default"] == {}


def test_a_policy_that_weighs_no_quality_compresses_without_any() -> None:
    walk = ProfiledWalk(policy="knorm@0.5+lru")
    walk.served(128)
    walk.cache.parts.eviction.free_slots(64)
    assert walk.cache.parts.controller.num_compressed == {"knorm@0.5": 1}


def test_a_prior_is_gone_by_until_something_is_profiled() -> None:
    walk = ProfiledWalk(curves=CURVES)
    tokens, other = walk.random_tokens(128), walk.random_tokens(128)
    finished(walk, tokens)
    finished(walk, other)
    (node,), (unprofiled,) = walk.parts(tokens), walk.parts(other)
    assert walk.expected(node, "knorm@0.8", "knorm@0.2", "random@0.5") == [0.99, 0.49, 0.5]
    shadow = walk.whole(tokens)
    assert walk.put(tokens, GOOD) == 1
    walk.put_away(shadow)
    bounds = walk.cache.quality.catalog.curves_of(walk.key_of(tokens))
    assert walk.expected(node, "knorm@0.2", "random@0.5") == [bounds.quality(Form("knorm", 0.2)), None]
    curves = walk.cache.quality.catalog.default
    believed = [curves.quality(form) for form in (HALF, Form("knorm", 0.2))]
    assert walk.expected(unprofiled, "knorm@0.5", "knorm@0.2", "random@0.5") == [*believed, None]
    assert 0.8 < believed[0] < 0.9 and 0.7 < believed[1] < 0.8


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_profile_finds_the_nodes_of_its_context_when_it_is_put(page_size: int) -> None:
    walk = ProfiledWalk(page_size)
    tokens = walk.random_tokens(192)
    finished(walk, tokens[:64])
    finished(walk, tokens)
    finished(walk, tokens, "lora-a")
    walk.put_away(walk.copy(tokens))
    assert walk.put(tokens, GOOD) == 2
    key = walk.key_of(tokens)
    shown = walk.cache.quality.show_profile(key)
    assert sorted(shown["nodes"]) == sorted(node.id for node in walk.parts(tokens))
    assert [node.kv.profiles for node in walk.parts(tokens)] == [{key: 192}, {key: 192}]
    assert [node.kv.profiles for node in walk.parts(tokens, "lora-a")] == [{}]
    assert shown["curve"]["knorm@0.5"]["mean"] == 0.9 and shown["curve"]["knorm@0.5"]["count"] == 9
    bound = shown["curve"]["knorm@0.5"]["expected"]
    assert 0.8 < bound < 0.9 and all(walk.expected(node, "knorm@0.5") == [bound] for node in walk.parts(tokens))


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_profile_from_elsewhere_finds_the_nodes_of_its_context(page_size: int) -> None:
    walk = ProfiledWalk(page_size)
    tokens = walk.random_tokens(256)
    finished(walk, tokens[:80])
    finished(walk, tokens)
    finished(walk, tokens, "lora-a")
    assert walk.put(tokens[:192], GOOD) == 2
    assert walk.put(tokens, POOR, "lora-a") == 1
    assert walk.put(walk.random_tokens(192), GOOD) == 0
    (alone,) = walk.parts(tokens, "lora-a")
    assert alone.kv.profiles == {walk.key_of(tokens, "lora-a"): 256}
    assert [node.kv.profiles for node in walk.parts(tokens)] == [{walk.key_of(tokens[:192]): 192}] * 2


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_profile_is_found_by_hash_when_its_context_comes_into_the_tree(page_size: int) -> None:
    walk = ProfiledWalk(page_size)
    tokens = walk.random_tokens(256)
    assert walk.put(tokens[:192], GOOD) == 0 and walk.put(tokens, POOR) == 0
    assert walk.put(tokens[:64], POOR, "lora-a") == 0
    finished(walk, tokens[:80])
    (upper,) = walk.parts(tokens[:80])
    assert upper.kv.profiles == {}
    finished(walk, tokens)
    (_, lower) = walk.parts(tokens)
    both = {walk.key_of(tokens[:192]): 192, walk.key_of(tokens): 256}
    assert upper.kv.profiles == lower.kv.profiles == both
    of = [walk.cache.quality.catalog.curves_of(key).quality(HALF) for key in both]
    assert walk.expected(upper, "knorm@0.5") == walk.expected(lower, "knorm@0.5") == [pytest.approx(sum(of) / 2)]
    walk.tiers.removal.drop(lower.id)
    other = [*tokens[:80], *walk.random_tokens(176)]
    finished(walk, other)
    assert walk.parts(other)[0] is upper and walk.parts(other)[1].kv.profiles == {}


def test_shadows_carry_no_profile(walk: ProfiledWalk) -> None:
    tokens = walk.random_tokens(128)
    walk.put(tokens, GOOD)
    finished(walk, tokens)
    shadow = walk.whole(tokens)
    walk.form(shadow)
    assert all(not node.kv.profiles for node in walk.cache.shadows.shadow_nodes())


@pytest.mark.parametrize(("at", "of_upper", "of_lower"), [(64, 3, 3), (80, 3, 2), (128, 3, 1), (150, 3, 1)])
def test_a_split_leaves_the_lower_part_what_ends_in_it(
    walk: ProfiledWalk, at: int, of_upper: int, of_lower: int
) -> None:
    tokens = walk.random_tokens(192)
    for length in (64, 128, 192):
        walk.put(tokens[:length], {"knorm@0.5": 0.5 + length / 1000})
    finished(walk, tokens)
    (node,) = walk.parts(tokens)
    upper = walk.cache._split_node(node.key, node, at)
    assert list(upper.kv.profiles.values()) == [64, 128, 192][:of_upper]
    assert list(node.kv.profiles.values()) == [length for length in (64, 128, 192) if length > at]


def test_the_parts_of_a_split_carry_profiles_of_their_own(walk: ProfiledWalk) -> None:
    tokens = walk.served(192)
    (node,) = walk.parts(tokens)
    walk.cache._split_node(node.key, node, 128)
    walk.put_away(walk.copy(tokens[:128]))
    assert walk.put(tokens[:128], GOOD) == 1
    default = walk.cache.quality.catalog.default.quality(HALF)
    assert node.kv.profiles == {} and walk.expected(node, "knorm@0.5") == [default]  # as any unprofiled node
    walk.cache._split_node(node.key, node, 32)
    assert [len(part.kv.profiles) for part in walk.parts(tokens)] == [1, 0, 0]


def test_a_node_that_is_mostly_something_else_is_not_taken_for_the_context() -> None:
    """Until it is split where the context ends."""
    for comes_first in (False, True):
        walk = ProfiledWalk()
        tokens, other = walk.random_tokens(300), walk.random_tokens(128)
        walk.put(other, POOR)
        if comes_first:
            walk.put(tokens[:64], GOOD)
        finished(walk, tokens)
        if not comes_first:
            walk.put_away(walk.copy(tokens[:64]))
            walk.put(tokens[:64], GOOD)
        (node,) = walk.parts(tokens)
        default = walk.cache.quality.catalog.default.quality(HALF)
        assert walk.expected(node, "knorm@0.5") == [default]
        finished(walk, [*tokens[:70], 59])
        bound = walk.cache.quality.catalog.curves_of(walk.key_of(tokens[:64])).quality(HALF)
        assert walk.expected(node.parent, "knorm@0.5") == [bound] != [default]
        assert walk.expected(node, "knorm@0.5") == [default]
        walk.check()


def test_an_unprofiled_context_is_taken_for_a_low_quantile(walk: ProfiledWalk) -> None:
    """A low quantile of the others' lower bounds: no context is trusted more for not having been profiled."""
    unprofiled = walk.random_tokens(128)
    finished(walk, unprofiled)
    (node,) = walk.parts(unprofiled)
    profiled = [walk.random_tokens(64) for _ in range(21)]

    walk.put(profiled[0], {"knorm@0.5": 0.5})
    first = walk.cache.quality.catalog.default.quality(HALF)
    assert first < 0.5 and walk.expected(node, "knorm@0.5") == [first]  # the first profile is gone by at once
    for index, tokens in enumerate(profiled[1:20], 1):
        walk.put(tokens, {"knorm@0.5": 0.5 + index / 100})
    walk.wait_s(0.0)
    walk.put(profiled[20], {"knorm@0.5": 0.1})
    walk.wait_s(1.0)
    assert walk.expected(node, "knorm@0.5") == [first]  # the others when some time has passed
    walk.wait_s(quality.DEFAULT_PAUSE_S)
    third = walk.cache.quality.catalog.get(walk.key_of(profiled[1])).forms[HALF]  # the lowest of all have 0.1 and 0.5
    assert walk.expected(node, "knorm@0.5") == [pytest.approx(third.lower_bound(third.variance))]


def test_what_others_that_are_measured_say_of_a_measured_context_is_gone_by_in_time(walk: ProfiledWalk) -> None:
    contexts = [walk.random_tokens(128) for _ in range(9)]
    for tokens in contexts:
        finished(walk, tokens)
    catalog = walk.cache.quality.catalog
    profiled = {walk.parts(tokens)[0].id: walk.key_of(tokens) for tokens in contexts}

    def expected() -> dict[int, list[float | None]]:
        return {node_id: walk.expected(walk.cache.nodes[node_id], "knorm@0.5") for node_id in profiled}

    for index, tokens in enumerate(contexts):
        walk.put(tokens, {"knorm@0.5": 0.5 + index / 40})
    early, told = expected(), {node_id: [catalog.curves_of(key).quality(HALF)] for node_id, key in profiled.items()}
    apart = {node_id for node_id in profiled if abs(early[node_id][0] - told[node_id][0]) > quality.TOLERANCE}
    assert apart  # the first were judged by few
    walk.wait_s(0.0)
    walk.wait_s(quality.DEFAULT_PAUSE_S)
    for _ in contexts:  # one a round
        walk.cache.quality.advance()
    assert expected() == {node_id: told[node_id] if node_id in apart else early[node_id] for node_id in profiled}
    walk.check()


def test_forms_that_are_known_to_be_worthless_are_known() -> None:
    walk = ProfiledWalk(forms=(Form("knorm", 0.2),))
    unprofiled = walk.random_tokens(128)
    finished(walk, unprofiled)
    (node,) = walk.parts(unprofiled)
    assert walk.expected(node, "knorm@0.2") == [None]
    walk.put(walk.random_tokens(64), {"knorm@0.2": 0.0})
    assert walk.expected(node, "knorm@0.2") == [0.0]


def test_what_is_put_again_is_gone_by_from_then_on(walk: ProfiledWalk) -> None:
    tokens = walk.random_tokens(128)
    walk.put(tokens, GOOD)
    finished(walk, tokens)  # no shadow was ever made of it
    (node,) = walk.parts(tokens)
    before = walk.expected(node, "knorm@0.5")
    assert walk.put(tokens, POOR) == 1
    assert walk.expected(node, "knorm@0.5") == [walk.cache.quality.catalog.curves_of(walk.key_of(tokens)).quality(HALF)]
    assert walk.expected(node, "knorm@0.5") < before


def test_a_profile_that_is_not_fresh_is_merged_with_the_one_before(walk: ProfiledWalk) -> None:
    tokens = walk.random_tokens(64)
    walk.put(tokens, {"knorm@0.5": 0.9})
    answered = walk.cache.quality.put_profile(walk.profile(tokens, {"knorm@0.5": 0.5, "knorm@0.2": 0.4}), False)
    assert answered["identity"] == IDENTITY.hex()
    merged = Profile.from_json(json.loads(json.dumps(answered["profile"])))
    assert merged.forms[HALF].count == 18 and merged.forms[HALF].mean == pytest.approx(0.7)
    walk.put(tokens, {"knorm@0.5": 0.2})
    assert walk.cache.quality.catalog.get(merged.key).forms[HALF].mean == 0.2


def test_profiles_are_read_at_the_start_and_those_of_another_model_are_not(tmp_path: Path) -> None:
    tokens = ProfiledWalk().random_tokens(128)
    for identity, means in ((IDENTITY, GOOD), (bytes(KEY_BYTES), POOR)):
        store = ProfileStore(tmp_path / "profiles", identity)
        store.put(ProfiledWalk().profile(tokens, means))
    walk = ProfiledWalk(profiles=ProfileFlags(str(tmp_path / "profiles")))
    finished(walk, tokens)
    (node,) = walk.parts(tokens)
    assert walk.expected(node, "knorm@0.5") == [walk.cache.quality.catalog.curves_of(walk.key_of(tokens)).quality(HALF)]
    assert walk.cache.inspector.list_profiles()["default"]["knorm@0.5"] == walk.cache.quality.catalog.default.quality(
        HALF
    )
    walk.identity = bytes(reversed(IDENTITY))  # other weights
    walk.flush_all()
    assert len(walk.cache.quality.catalog) == 0 and walk.cache.inspector.list_profiles()["default"] == {}
    finished(walk, tokens)
    assert walk.expected(walk.parts(tokens)[0], "knorm@0.5") == [None]


def test_profiles_of_another_model_are_not_gone_by_when_the_tree_was_kept(walk: ProfiledWalk, tmp_path: Path) -> None:
    tokens = walk.served(128)
    walk.put(tokens, GOOD)
    walk.copy(tokens)
    walk.identity = bytes(reversed(IDENTITY))  # other weights, without a flush
    walk.cache.parts.weights.weights_changed()
    walk.open.clear()
    assert not walk.cache.shadows.spaces and len(walk.cache.quality.catalog) == 0
    (node,) = walk.parts(tokens)
    assert walk.expected(node, "knorm@0.5") == [None]


def test_adaptcache_goes_by_the_mean_of_all_profiles() -> None:
    """Its one curve is measured offline, over contexts."""
    walk = ProfiledWalk(policy="adaptcache")
    walk.wait_s(0.0)
    for mean in (0.9, 0.5):
        walk.put(walk.random_tokens(64), {"knorm@0.5": mean})
    walk.served(128)
    walk.wait_s(100.0)
    assert walk.cache.policy.planner.policy._quality[HALF] == pytest.approx(0.7)


def test_an_unknown_context_has_no_profile_to_show() -> None:
    with pytest.raises(IntrospectionError, match=f"context {bytes(16).hex()} has no profile") as caught:
        ProfiledWalk().cache.quality.show_profile(bytes(16))
    assert caught.value.status == 404


# ---- what users ask


def asked(walk: ProfiledWalk, tokens: list[int], namespace: str | None = None) -> list[tuple[list[int], list[int]]]:
    """Questions about a context with their answers, oldest first."""
    found = walk.cache.quality.recorder.queries_of(walk.key_of(tokens, namespace))
    return [(list(query.tokens), list(query.answer)) for query in found]


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_users_ask_about_a_shared_prefix_is_recorded(page_size: int) -> None:
    walk = ProfiledWalk(page_size)
    tokens, first, second, third = walk.random_tokens(256), [51, 52], [53] * 20, [54] * 70
    walk.answer([*tokens, *first], 7)
    assert len(walk.cache.quality.recorder) == 0, "nobody else had it yet"
    walk.answer([*tokens, *second], 8, 9)
    walk.answer([*tokens, *third], 7)
    assert asked(walk, tokens) == [(second, [8, 9]), (third, [7])]
    walk.answer([*tokens, *third[:64], *first], 6, 5)
    assert asked(walk, [*tokens, *third[:64]]) == [(first, [6, 5])]  # what they share is longer
    assert (
        walk.cache.quality.counts["recorded"] == 3
        and walk.cache.inspector.list_profiles()["num_recorded_contexts"] == 2
    )


def test_a_drawn_answer_is_recorded_without_what_was_drawn(walk: ProfiledWalk) -> None:
    """It tells what is asked, and nothing of the KV: a drawn token is less likely than the best under exact KV too."""
    tokens = walk.random_tokens(256)
    for question, top_k in ((51, 1), (52, 40), (53, 1)):
        walk.answer([*tokens, question], 7, 8, top_k=top_k)
    assert asked(walk, tokens) == [([52], []), ([53], [7, 8])]


def test_what_is_not_recorded(walk: ProfiledWalk) -> None:
    tokens, short = walk.random_tokens(256), walk.random_tokens(255)
    for namespace in (None, "lora-a"):
        for prompt in (tokens, short):
            walk.answer([*prompt, 51], 7, namespace=namespace)
    walk.answer([*short, 52], 7)
    walk.answer([*tokens, 52], 7, namespace="lora-a", lora_id="a")
    walk.answer([*tokens, 52])  # no answer
    walk.answer([*tokens, *[52] * 10], 7)
    walk.cache.quality.recorder.max_query_tokens = 8
    walk.answer([*tokens, *[53] * 10], 7)
    shadow = walk.whole(tokens)
    walk.ask(shadow.exact, [*tokens, 51, 52])
    request = walk.enqueue(None, [*tokens, 54])
    walk.prefill(request)
    walk.generate(request, 7)
    walk.running.remove(request)
    end_request(walk.cache, request, is_insert=False)  # aborted
    assert walk.cache.quality.counts["recorded"] == 1 and asked(walk, tokens) == [([52] * 10, [7])]
    walk.answer([*tokens, 55], 7, namespace="lora-a")
    assert asked(walk, tokens, "lora-a") == [([55], [7])]


@pytest.mark.parametrize(
    "settings",
    [{"profiles": ProfileFlags(are_online=False)}, {"policy": "lru"}, {"forms": (Form(),)}],
    ids=["flag", "policy", "exact"],
)
def test_where_it_would_change_nothing_nothing_is_recorded(settings: dict[str, object]) -> None:
    walk = ProfiledWalk(**settings)
    tokens = walk.random_tokens(256)
    for question in (51, 52, 53):
        walk.answer([*tokens, question], 7)
    assert walk.cache.quality.recorder is None and walk.job() == {}
    assert walk.cache.inspector.list_profiles()["online_profiling"] is False


def test_a_lossy_hit_is_recorded_with_what_was_predicted() -> None:
    walk = ProfiledWalk(curves=CURVES)
    tokens = walk.random_tokens(320)
    walk.answer(tokens[:256])
    walk.answer(tokens)
    upper, lower = walk.parts(tokens)
    walk.cache.parts.moves.compress(lower.id, Form("knorm", 0.2))
    walk.answer([*tokens[:256], 51], 7)
    walk.answer([*tokens, 52], 7)
    walk.cache.parts.moves.compress(upper.id, HALF)
    walk.answer([*tokens, 53], 7)
    walk.answer([*tokens[:256], 54], 7)
    recorder = walk.cache.quality.recorder
    assert [query.predicted for query in recorder.queries_of(walk.key_of(tokens))] == pytest.approx(
        [(256 * 1.0 + 64 * 0.49) / 320, (256 * 0.875 + 64 * 0.49) / 320]
    )
    assert [query.predicted for query in recorder.queries_of(walk.key_of(tokens[:256]))] == [None, 0.875]
    assert recorder.context_of(walk.key_of(tokens)).num_lossy_hits == 2


def test_a_request_computed_on_lossy_kv_is_no_worse_than_that() -> None:
    walk = ProfiledWalk(curves=CURVES)
    tokens = walk.random_tokens(320)
    walk.answer(tokens[:256])
    walk.cache.parts.moves.compress(walk.parts(tokens)[0].id, HALF)
    walk.answer(tokens)  # lossy below, though all of it is there
    walk.answer([*tokens, 52], 7)
    (query,) = walk.cache.quality.recorder.queries_of(walk.key_of(tokens))
    assert query.predicted == 0.875


def test_a_hit_of_what_was_decoded_is_a_lossy_one() -> None:
    walk = ProfiledWalk(curves={**CURVES, "exact+int8": 0.9})
    tokens = walk.random_tokens(320)
    walk.answer(tokens)
    (node,) = walk.parts(tokens)
    node.kv.form = Form(codec="int8")  # as a load leaves it
    walk.cache.parts.tree.changes.changed(node)
    walk.answer([*tokens, 52], 7)
    (query,) = walk.cache.quality.recorder.queries_of(walk.key_of(tokens))
    assert query.predicted == 0.9


def test_a_retracted_request_that_finds_its_own_answer_in_the_tree_is_asked_about_its_prompt(
    walk: ProfiledWalk,
) -> None:
    tokens, answer = walk.random_tokens(300), [7] * 60
    walk.answer(tokens[:280])
    request = walk.enqueue(None, tokens)
    walk.prefill(request)
    for token in answer:
        walk.generate(request, token)
    walk.running.remove(request)
    end_request(walk.cache, request, is_insert=False)  # retracted
    walk.rows.free_slots.append(request.req_pool_idx)
    walk.answer(tokens, *answer, 8)  # an equal one was faster
    request.req_pool_idx, request.kv_committed_freed = None, False
    walk.waiting.append(request)
    walk.prefill(request)
    assert request.num_cached >= 320 > len(tokens)
    walk.generate(request, 9)
    walk.end(request)
    assert (tokens[256:], [*answer, 9]) in asked(walk, tokens[:256])


# ---- jobs


def test_a_context_that_was_asked_about_twice_is_to_be_profiled(walk: ProfiledWalk) -> None:
    tokens, other = walk.random_tokens(256), walk.random_tokens(256)
    for context in (tokens, other):
        walk.answer(context)
    walk.answer([*tokens, 51], 7)
    assert walk.job() == {}
    walk.answer([*tokens, 52, 53], 8, 9)
    walk.answer([*other, 51], 7)
    job = walk.job()
    assert (job["kind"], job["why"], job["key"]) == ("profile", "unprofiled", walk.key_of(tokens).hex())
    assert (job["token_ids"], job["extra_key"], job["num_lossy_hits"]) == (tokens, None, 0)
    assert [(query["token_ids"], query["answer"]) for query in job["queries"]] == [([51], [7]), ([52, 53], [8, 9])]
    assert sorted(job["forms"]) == sorted(map(str, FORMS))
    assert walk.job() == job, "asking changes nothing"
    walk.put(tokens, GOOD)
    assert walk.job() == {}
    walk.answer([*other, 52], 7)
    assert walk.job()["key"] == walk.key_of(other).hex()
    walk.cache.quality.note_failed(walk.key_of(other))
    assert walk.job() == {} and walk.cache.quality.counts["failed"] == 1


def test_a_context_that_was_profiled_in_other_presses_only_is_to_be_profiled_once(walk: ProfiledWalk) -> None:
    tokens = walk.random_tokens(256)
    walk.put(tokens, {"random@0.5": 0.9})
    for question in (51, 52, 53):
        walk.answer([*tokens, question], 7)
    assert walk.job()["why"] == "unprofiled"
    walk.put(tokens, {"random@0.5": 0.9, "random@0.2": 0.5})  # the other presses could not be measured
    assert walk.job() == {}
    walk.answer([*tokens, 54], 7)
    assert walk.job() == {}


def test_the_context_that_is_used_more_comes_first(walk: ProfiledWalk) -> None:
    often, seldom = walk.random_tokens(256), walk.random_tokens(256)
    for context, times in ((often, 5), (seldom, 3)):
        for question in range(times):
            walk.answer([*context, 50 + question], 7)
    assert walk.job()["key"] == walk.key_of(often).hex()
    walk.tiers.removal.drop_tree(walk.parts(often)[0])
    assert walk.job()["key"] == walk.key_of(seldom).hex(), "what is not in the tree is of no use"


def test_there_are_jobs_only_while_cycles_are_free(walk: ProfiledWalk) -> None:
    tokens = walk.random_tokens(256)
    for question in (51, 52, 53):
        walk.answer([*tokens, question], 7)
    assert walk.job() != {}
    waiting = walk.enqueue(None, walk.random_tokens(20))
    assert walk.job() == {}
    walk.prefill(waiting)
    assert walk.job() != {}
    walk.stub.max_running_requests = 1
    assert walk.job() == {}
    walk.end(waiting)
    assert walk.job() != {}


def test_what_was_measured_in_part_is_taken_up_again_and_what_is_whole_is_not_for_a_job_that_fails(
    walk: ProfiledWalk,
) -> None:
    tokens, quality = walk.random_tokens(256), walk.cache.quality
    key = walk.key_of(tokens)
    part = walk.profile(tokens, {"knorm@0.5": 0.9})

    def answers(count: int) -> None:
        for question in range(count):
            walk.answer([*tokens, 51 + question % 8], 7)

    answers(3)
    assert walk.job()["why"] == "unprofiled"
    quality.put_profile(part, False)
    quality.note_failed(key)
    assert walk.job() == {}, "users have just come"
    answers(8)
    assert walk.job()["why"] == "unprofiled"
    quality.put_profile(part, True)  # all that can be made of it
    quality.note_failed(key)  # of an observation, say
    answers(8)
    assert walk.job() == {}


def test_a_context_that_is_worse_than_predicted_is_observed_then_profiled_anew() -> None:
    walk = ProfiledWalk(curves=CURVES)
    tokens = walk.random_tokens(256)
    walk.answer(tokens)
    walk.put_away(walk.copy(tokens))
    walk.put(tokens, {"knorm@0.5": 0.95, "random@0.5": 0.5, "streaming@0.5": 0.5})
    (node,) = walk.parts(tokens)
    walk.answer([*tokens, 50], 7)
    assert walk.job() == {}
    walk.cache.parts.moves.compress(node.id, HALF)
    predicted = walk.cache.quality.quality_of(node)
    walk.answer([*tokens, 51], 7)
    job = walk.job()
    assert (job["kind"], [query["token_ids"] for query in job["queries"]]) == ("observe", [[51]])
    assert [query["predicted"] for query in job["queries"]] == [predicted]
    key = walk.key_of(tokens)
    assert walk.cache.quality.note_observed(key, [(predicted, 0.9)]) == {"is_drifted": False}
    assert walk.job() == {}
    for question in range(52, 60):
        walk.answer([*tokens, question], 7)
    assert walk.job()["kind"] == "observe"
    assert walk.cache.quality.note_observed(key, [(predicted, 0.1)] * 4) == {"is_drifted": True}
    job = walk.job()
    assert (job["kind"], job["why"], job["key"]) == ("profile", "drift", key.hex())
    walk.put(tokens, {"knorm@0.5": 0.2})
    assert walk.job() == {}
    assert walk.cache.quality.quality_of(walk.parts(tokens)[0]) < 0.3
    counts = walk.cache.quality.counts
    assert (counts["observed"], counts["drifted"], counts["profiled"]) == (5, 1, 2)


def test_contexts_that_are_forgotten_are_not_kept_while_no_cycle_is_ever_free(walk: ProfiledWalk) -> None:
    walk.cache.quality.recorder = Recorder(max_contexts=4)
    walk.stub.max_running_requests = 0  # a server that always has a queue
    for _ in range(24):
        tokens = walk.random_tokens(256)
        walk.answer(tokens)
        walk.answer([*tokens, 51], 7)
        assert walk.job() == {}
        assert len(walk.cache.quality._node_of_context) <= 4
    for _ in range(24):  # nor while nobody asks for a job
        tokens = walk.random_tokens(256)
        walk.answer(tokens)
        walk.answer([*tokens, 51], 7)
        assert len(walk.cache.quality._node_of_context) <= 8
