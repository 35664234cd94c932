"""A server finds on its SSD the KV of its own model and adapter, and nothing kept while either was unknown.

Over the real cache, store and pools, with the harness of the random walks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from uuid import NAMESPACE_URL, uuid5

import pytest
from tests.contract.profiling.test_shadows import ShadowWalk
from tests.contract.tiers.test_tiers_model import Opened, TierWalk, blocked, cached, nodes_of, sent, some_tokens
from tests.contract.tree import test_model_identity as models

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.cache.factory import are_weights_released
from sglang_evicpress.patches.scheduler import hooks
from sglang_evicpress.patches.tiers import weights
from sglang_evicpress.patches.tree import adapters

pytestmark = pytest.mark.sglang


LORA_ID = uuid5(NAMESPACE_URL, "adapter\0/models/adapter").hex  # what SGLang makes of a name and a path


# ---- the model


@pytest.mark.parametrize("change", models.CHANGES)
def test_only_the_very_same_model_finds_the_entries(opened: Opened, change: Callable[[object], None]) -> None:
    model, other = models.make_model(), models.make_model()
    change(other)
    ours, others = models.identity_of(model).of_model(), models.identity_of(other).of_model()
    walk = opened(identity=ours)
    tokens, _ = cached(walk, 100)
    walk.close()
    walk = opened(identity=others)
    assert walk.serve([*tokens, 59]) == 0 and walk.tree.storage.counts["found_again"] == 0
    walk.close()
    walk = opened(identity=ours)
    assert walk.serve([*tokens, 59]) == 100


class Updated:
    """A walk whose model's weights change as SGLang changes them, told by our hooks."""

    def __init__(self, walk: TierWalk, monkeypatch: pytest.MonkeyPatch) -> None:
        self.walk, self.model = walk, models.make_model()
        cache = walk.cache
        identity = models.identity_of(self.model)
        identity.is_released = lambda: are_weights_released(cache.scheduler)
        cache.know_model(identity)
        self.updater = SimpleNamespace(offload_tags=set())
        cache.scheduler.weight_updater = self.updater
        monkeypatch.setattr(hooks, "_cache", SimpleNamespace(tiers=cache, weights=cache.parts.weights))
        cache.reset()
        self.first = cache.parts.tree.adapters.identity

    def update(self, change: Callable[[object], None] | None, *, flush: bool) -> None:
        hooks._before_weights_change(self.updater, None)
        if change is not None:
            change(self.model)
        if flush:
            self.walk.reset()
        hooks._after_weights_change(None, self.updater, None)

    def release(self, *tags: str) -> None:
        """Release like ``release_memory_occupation``: what it gives back is not there any more."""
        request = SimpleNamespace(tags=list(tags))
        hooks._before_release_memory(self.updater, request)
        self.updater.offload_tags |= set(tags)
        if "kv_cache" in tags:
            self.walk.reset()
        if "weights" in tags:
            self.gone, self.model[0].weight = self.model[0].weight, None

    def resume(self, *tags: str) -> None:
        self.updater.offload_tags -= set(tags)
        if "weights" in tags:
            self.model[0].weight = self.gone
        hooks._after_resume_memory(None, self.updater, SimpleNamespace(tags=list(tags)))


@pytest.fixture
def updated(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> Updated:
    return Updated(opened(), monkeypatch)


@pytest.mark.parametrize("change", [models.one_byte, models.rows_swapped])
def test_an_update_of_one_byte_with_a_flush_is_another_model(
    updated: Updated, change: Callable[[object], None]
) -> None:
    updated.update(change, flush=True)
    assert updated.walk.tree.adapters.identity != updated.first and updated.walk.cache.ssd is not None
    assert not updated.walk.cache.parts.ssd_attachment.is_mixed


@pytest.mark.parametrize("change", [models.one_byte, models.rows_swapped])
def test_an_update_of_one_byte_without_a_flush_parts_from_the_ssd(
    updated: Updated, change: Callable[[object], None]
) -> None:
    walk = updated.walk
    cached(walk, 100)
    updated.update(None, flush=False)
    assert walk.cache.ssd is not None and not walk.cache.parts.ssd_attachment.is_mixed, "the weights are the same"
    updated.update(change, flush=False)
    assert walk.cache.ssd is None and walk.cache.parts.ssd_attachment.is_mixed
    walk.reset()
    assert walk.cache.ssd is not None and walk.tree.adapters.identity != updated.first


def test_an_update_of_an_idle_server_with_an_empty_tree_mixes_nothing(updated: Updated) -> None:
    updated.update(models.one_byte, flush=False)
    assert updated.walk.cache.ssd is not None and updated.walk.tree.adapters.identity != updated.first
    assert not updated.walk.cache.parts.ssd_attachment.is_mixed
    tokens, node = cached(updated.walk, 100)
    sent(updated.walk, node, Tier.SSD)
    assert updated.walk.serve([*tokens, 59]) == 100


def test_an_update_while_a_request_runs_whose_kv_is_not_in_the_tree_mixes(updated: Updated) -> None:
    walk = updated.walk
    walk.is_sound = False
    request = walk.ready(some_tokens(walk, 60))
    walk.admit(request)
    for node in nodes_of(walk):
        del walk.cache.nodes[node.id]  # as before its first hand-in
    updated.update(models.one_byte, flush=False)
    assert walk.cache.parts.ssd_attachment.is_mixed


def test_released_weights_are_not_read_and_what_is_kept_meanwhile_is_never_found(updated: Updated) -> None:
    walk = updated.walk
    updated.release("weights")
    updated.release("kv_cache")
    unknown = walk.tree.adapters.identity
    assert unknown != updated.first and walk.cache.ssd is not None
    updated.resume("kv_cache")
    walk.reset()  # /flush_cache
    assert walk.tree.adapters.identity == unknown
    tokens, node = cached(walk, 100, Tier.SSD)
    walk.reset()
    updated.resume("weights")
    assert walk.tree.adapters.identity == updated.first and not walk.cache.parts.ssd_attachment.is_mixed
    assert walk.serve([*tokens, 59]) == 0 and walk.tree.storage.counts["found_again"] == 0


def test_the_pool_is_given_back_only_when_no_thread_copies_from_it(
    updated: Updated, monkeypatch: pytest.MonkeyPatch
) -> None:
    walk = updated.walk
    _, node = cached(walk, 100)
    (block,) = blocked(walk, "copy")
    walk.tiers.backup.start_copy(node, Tier.HOST)
    copy = node.kv.job
    threading.Timer(0.05, block.may_end.set).start()
    hooks._before_release_memory(updated.updater, SimpleNamespace(tags=None))  # all of it
    assert copy.has_run.is_set()
    walk.settle()
    monkeypatch.setattr(weights, "MOST_COPY_S", 0.01)
    (block,) = blocked(walk, "load")
    with pytest.raises(RuntimeError, match="it is not released"):
        walk.cache.parts.weights.end_copies()
    block.may_end.set()


# ---- adapters


def with_adapters(walk: TierWalk, **loaded: bytes | None) -> TierWalk:
    """A server with these LoRA adapters: digests by id."""
    walk.tree.adapters.attach(loaded.__getitem__, lambda: loaded)
    return walk


def serve(walk: TierWalk, tokens: list[int], lora_id: str | None, salt: str = "") -> int:
    """A request with an adapter, as SGLang names its namespace; how many tokens were loaded for it."""
    wait = walk.wait

    def wait_with_adapter(tokens: list[int], extra_key: str | None = None, **more: bool) -> object:
        expect = walk.cache.parts.admission.on_queued

        def expect_with_adapter(request: object) -> None:
            request.lora_id = lora_id
            expect(request)

        walk.cache.parts.admission.on_queued = expect_with_adapter
        try:
            return wait(tokens, extra_key, **more)
        finally:
            del walk.cache.parts.admission.on_queued

    walk.wait = wait_with_adapter
    try:
        return walk.serve(tokens, (salt + lora_id) if lora_id is not None else salt or None)
    finally:
        del walk.wait


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_an_adapter_trained_anew_at_its_name_and_path_finds_nothing_of_the_old_one(opened: Opened, salt: str) -> None:
    walk = with_adapters(opened(), **{LORA_ID: b"old"})
    tokens = some_tokens(walk, 100)
    serve(walk, tokens, LORA_ID, salt)
    walk.close()
    walk = with_adapters(opened(), **{LORA_ID: b"new"})
    assert serve(walk, [*tokens, 59], LORA_ID, salt) == 0 and walk.tree.storage.counts["found_again"] == 0
    walk.close()
    walk = with_adapters(opened(), **{LORA_ID: b"old"})
    assert serve(walk, [*tokens, 59], LORA_ID, "other" + salt) == 0, "the namespace is another"
    assert serve(walk, [*tokens, 59], LORA_ID, salt) == 100


def test_an_adapter_loaded_under_another_id_finds_its_own_and_the_base_model_does_not(opened: Opened) -> None:
    walk = with_adapters(opened(), **{"a" * 32: b"same"})
    tokens = some_tokens(walk, 100)
    serve(walk, tokens, "a" * 32, "tenant")
    walk.close()
    walk = with_adapters(opened(), **{"b" * 32: b"same"})
    assert serve(walk, [*tokens, 59], None) == 0
    assert serve(walk, [*tokens, 59], None, "tenant") == 0
    walk.adapter_of = lambda extra_key: "tenant" + "a" * 32  # what its KV was computed with
    walk.is_sound = False
    assert serve(walk, [*tokens, 59], "b" * 32, "tenant") == 100


@pytest.mark.parametrize("how", ["unreadable", "unseen", "changed under its id"])
def test_kv_of_an_adapter_that_nothing_is_known_of_is_neither_written_nor_looked_up(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    walk = with_adapters(opened(), **({} if how == "unseen" else {LORA_ID: None if how == "unreadable" else b"old"}))
    if how == "changed under its id":
        with_adapters(walk, **{LORA_ID: b"new"})
        with_adapters(walk, **{LORA_ID: b"new"})
    _, other = cached(walk, 60, Tier.SSD)
    monkeypatch.setattr(walk.cache.ssd.store, "find", lambda lookup_key: pytest.fail("it was looked up"))
    tokens = some_tokens(walk, 100)
    serve(walk, tokens, LORA_ID)
    (node,) = (node for node in nodes_of(walk) if node is not other)
    assert walk.tiers.backup.start_copy(node, Tier.SSD)  # by way of the host, where it may be
    walk.settle()
    assert list(node.kv.copies) == [Tier.HOST] and walk.tree.storage.counts["writes_refused"] == 1
    assert not walk.tiers.backup.start_copy(node, Tier.SSD)
    walk.tiers.removal.release(node.id, Tier.HOST)
    assert serve(walk, [*tokens, 59], LORA_ID) == 100
    walk.settle()
    for each in [each for each in nodes_of(walk) if each is not other][::-1]:
        walk.cache.parts.moves.demote(each.id, Tier.SSD, each.kv.form)
    walk.settle()
    assert nodes_of(walk) == [other], "what a plan would have on the SSD goes"
    walk.check()
    walk.close()
    assert opened().cache.ssd.store.num_entries == 1


def test_adapters_that_went_are_forgotten_with_their_last_node(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "PRUNE_ABOVE", 4)
    walk = opened()
    with_adapters(walk, **{LORA_ID: b"kept by its node"})
    serve(walk, some_tokens(walk, 60), LORA_ID, "tenant")
    for index in range(20):
        with_adapters(walk, **{f"{index:032x}": b"soon gone"})
    known = walk.tree.adapters
    assert LORA_ID in known._known and len(known._known) <= 5
    assert known.adapter_of("tenant" + LORA_ID) == LORA_ID and known.adapter_of("tenant") is None


def test_nothing_is_adopted_in_the_namespace_of_an_adapter() -> None:
    walk = ShadowWalk(0, 1)
    with_adapters(walk, **{LORA_ID: b"digest"})
    shadow = walk.copy(walk.random_tokens(64), "tenant" + LORA_ID)
    with pytest.raises(ValueError, match="namespace of a LoRA adapter: expected adopt false"):
        walk.cache.shadows.close_shadow(shadow.id, True)
    assert walk.put_away(shadow) == 0


# ---- after an exception


def test_nothing_is_published_or_waited_for_after_an_exception(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = opened()
    _, first = cached(walk, 100)
    sent(walk, first, Tier.SSD)
    _, second = cached(walk, 80)
    (block,) = blocked(walk, "write")
    sent(walk, second, Tier.HOST)
    walk.tiers.backup.start_copy(second, Tier.SSD)
    _, third = cached(walk, 60)
    store, writers = walk.cache.ssd.store, walk.tree.storage.workers["write"]
    with monkeypatch.context() as patched:
        patched.setattr(walk.tree.storage.arrival, "wait", lambda *_: pytest.fail("it waits for the threads"))
        walk.is_closed = True
        walk.cache.close(save=False)
    write = second.kv.copies[Tier.HOST].entry.write
    with pytest.raises(OSError, match="closed"):
        write.run()  # one that a thread was in the middle of
    block.may_end.set()
    for thread in writers.threads:
        thread.join()
    store.close()
    walk = opened()
    assert walk.cache.ssd.store.num_entries == 1, "what was there before"
    assert third.kv.copies == {}
