"""Shadows over the real cache and pools: what is copied, compressed, asked and adopted, and that users see none of it.

The harness is that of the random walks: requests that prefill, decode and end, and an oracle that reads every KV entry
back. In a shadow the model computes what it would in the namespace that the shadow is a copy of.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.radix_cache import RadixKey
from tests.contract.cache.test_radix_cache_model import (
    DIM,
    FORMS,
    HEADS,
    LAYERS,
    ROWS,
    Request,
    Walk,
    finished,
    held_in,
    path_hashes,
)
from tests.contract.releases import NO_BATCH, load_back, lock, tell_kv_events, unlock
from tests.contract.tiers.test_tiers_model import TierWalk, blocked
from tests.unit.geometry.made import make_geometry, make_rope

from sglang_evicpress.codec import get_codec
from sglang_evicpress.core import PRESSES, Form, Tier
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.patches.attention.prompt_queries import PromptQueries
from sglang_evicpress.patches.profiling import shadows
from sglang_evicpress.patches.tiers import admin
from sglang_evicpress.patches.tree.namespaces import is_shadow_name
from sglang_evicpress.patches.tree.node import is_lossy, iter_nodes, num_slots, path_to, slots_of

pytestmark = pytest.mark.sglang

HALF = Form("knorm", 0.5)


class ShadowMoves:
    """Moves of a profiler, on top of a walk. ``copied`` are the names of shadows with whose context they hold."""

    def scheduler(self) -> SimpleNamespace:
        """Part of SGLang's scheduler that background requests meet."""
        self.copied: dict[str, str | None] = {}
        self.open: dict[int, SimpleNamespace] = {}
        self.aborted: list[str] = []
        sender = SimpleNamespace(send_output=lambda message, req: self.aborted.append(req.rid))
        self.cache.background._retract = lambda scheduler: None  # here background requests run until they end
        self.stub = SimpleNamespace(
            last_batch=None,
            running_batch=SimpleNamespace(reqs=self.running),
            **NO_BATCH,
            chunked_req=None,
            tokenizer=None,
            metrics_reporter=None,
            metrics_collector=None,
            waiting_queue=self.waiting,
            max_running_requests=ROWS - 2,
            ipc_channels=SimpleNamespace(send_to_tokenizer=sender, recv_from_tokenizer=None, recv_from_rpc=None),
        )
        return self.stub

    def adapter_of(self, extra_key: str | None) -> str | None:
        return self.copied.get(extra_key, extra_key)

    # ---- one thing at a time

    def copy(self, tokens: list[int], namespace: str | None = None, *, may_evict: bool = True) -> SimpleNamespace:
        """A shadow, as far as it could be copied."""
        given = self.cache.shadows.open_shadow(tokens, namespace, may_evict)
        self.copied[given["extra_key"]] = namespace
        found = SimpleNamespace(id=given["shadow"], exact=given["extra_key"], tokens=list(tokens), forms={}, **given)
        self.open[found.id] = found
        return found

    def whole(self, tokens: list[int], namespace: str | None = None) -> SimpleNamespace:
        """A shadow that holds all of its context; the rest was computed by a background request."""
        shadow = self.copy(tokens, namespace)
        if shadow.num_present < len(tokens):
            assert self.ask(shadow.exact, tokens) is not None
        return shadow

    def form(self, shadow: SimpleNamespace, form: Form = HALF) -> str:
        name = shadow.forms[form] = self.cache.shadows.make_shadow_form(shadow.id, form)["extra_key"]
        self.copied[name] = self.copied[shadow.exact]
        return name

    def put_away(self, shadow: SimpleNamespace, *, adopt: bool = False) -> int:
        self.open.pop(shadow.id, None)
        return self.cache.shadows.close_shadow(shadow.id, adopt)["adopted_nodes"]

    def enqueue(self, name: str | None, tokens: list[int]) -> Request:
        self.count += 1
        request = Request(f"r{self.count}", list(tokens), len(tokens), name)
        self.waiting.append(request)
        self.cache.parts.admission.on_queued(request)
        return request

    def begin(self, name: str, tokens: list[int]) -> Request | None:
        """A background request enters the queue and runs at once; None when it was aborted instead."""
        request = self.enqueue(name, tokens)
        self.cache.background.begin_round(self.stub)
        if request not in self.waiting:
            return None
        self.prefill(request)
        return request

    def prefill(self, request: Request, upto: int | None = None) -> None:
        self.waiting.remove(request)
        self.look_up(request)
        request.num_cached = request.prefix_len
        lock(self.cache, request)
        assert self.extend(request, len(request.tokens) if upto is None else upto)

    def ask(self, name: str, tokens: list[int]) -> int | None:
        """A background request from its arrival to its end; returns how many of its tokens were there, None if it was
        aborted."""
        request = self.begin(name, tokens)
        if request is None:
            return None
        self.end(request)
        return request.num_cached

    def flush_all(self) -> None:
        """Flush like SGLang when nothing runs or waits."""
        assert not self.running and not self.waiting
        self.cache.reset()
        self.rows.clear()
        self.allocator.clear()

    def begin_user(self, tokens: list[int], namespace: str | None = None) -> Request:
        request = self.enqueue(namespace, tokens)
        self.prefill(request)
        return request

    def use(self, tokens: list[int], namespace: str | None = None) -> int:
        """A user's request from its arrival to its end; returns how many of its tokens were there."""
        request = self.begin_user(tokens, namespace)
        self.end(request)
        return request.num_cached

    def parts(self, tokens: list[int], namespace: str | None = None) -> list[object]:
        """The nodes that spell as much of ``tokens`` as there is."""
        return [node for node, _ in self.cache._steps(RadixKey(array("q", tokens), namespace))]

    def node(self, name: str | None, tokens: list[int]) -> object:
        """The one node that spells ``tokens``."""
        ((node, matched),) = self.cache._steps(RadixKey(array("q", tokens), name))
        assert matched == len(node.key) == len(tokens)
        return node

    def random_tokens(self, num_tokens: int) -> list[int]:
        return [self.rng.randrange(50) for _ in range(num_tokens)]

    def served(self, num_tokens: int) -> list[int]:
        """A context that nobody knew, after a request for it."""
        tokens = self.random_tokens(num_tokens)
        finished(self, tokens)
        return tokens

    # ---- moves of a random walk

    def moves(self) -> dict[Callable[[], None], float]:
        asking = {self.open_one: 3, self.fill: 6, self.make_form: 6, self.question: 6, self.drop_form: 1}
        return super().moves() | asking | {self.close_one: 1.5, self.mend: 2, self.fill_up: 0.3}

    def some(self) -> SimpleNamespace | None:
        for gone in [number for number in self.open if number not in self.cache.shadows.spaces]:
            del self.open[gone]
        return self.rng.choice(list(self.open.values())) if self.open else None

    def open_one(self) -> None:
        tokens = self.rng.choice(self.documents)[: self.rng.choice([64, 64, 128])]
        with contextlib.suppress(ValueError):  # no room
            shadow = self.copy(tokens, self.rng.choice([None, None, "lora-a"]), may_evict=self.rng.random() < 0.5)
            if len(self.running) < ROWS - 2 and self.rng.random() < 0.5:
                self.ask(shadow.exact, tokens)

    def fill(self) -> None:
        shadow = self.some()
        if shadow is not None and len(self.waiting) < 7:
            num_tokens = self.rng.choice([len(shadow.tokens)] * 3 + [self.rng.randrange(1, len(shadow.tokens) + 1)])
            self.enqueue(shadow.exact, shadow.tokens[:num_tokens])

    def make_form(self) -> None:
        shadow = self.some()
        if shadow is not None:
            with contextlib.suppress(ValueError):  # not filled yet, made already, or no room
                self.form(shadow, self.rng.choice(FORMS))

    def drop_form(self) -> None:
        shadow = self.some()
        if shadow is not None and shadow.forms:
            form = self.rng.choice(list(shadow.forms))
            self.cache.shadows.drop_shadow_form(shadow.id, form)
            del shadow.forms[form]

    def question(self) -> None:
        shadow = self.some()
        if shadow is not None and len(self.waiting) < 7:
            name = self.rng.choice([shadow.exact, *shadow.forms.values()])
            asked = [self.rng.randrange(50, 60) for _ in range(self.rng.randrange(1, 20))]
            self.enqueue(name, [*shadow.tokens, *asked])

    def mend(self) -> None:
        """A context is copied, some of what users have of it made lossy meanwhile, and the copy adopted."""
        namespace, tokens = self.rng.choice([None, "lora-a"]), self.rng.choice(self.documents)[:64]
        with contextlib.suppress(ValueError):
            shadow = self.copy(tokens, namespace)
            if len(self.running) < ROWS - 2:
                asked = self.begin(shadow.exact, tokens)
                for node, _ in self.cache._steps(RadixKey(array("q", tokens), namespace)):
                    options = self.cache.parts.view.options_of(node)[:-1]
                    if options and self.rng.random() < 0.8:
                        self.cache.parts.moves.compress(node.id, self.rng.choice(options).form)
                self.check()
                if self.rng.random() < 0.9:
                    self.end(asked)
            self.num_adopted += self.put_away(shadow, adopt=True)

    def close_one(self) -> None:
        shadow = self.some()
        if shadow is not None:
            self.num_adopted += self.put_away(shadow, adopt=self.rng.random() < 0.5)

    def start(self) -> None:
        self.cache.background.begin_round(self.stub)
        super().start()

    def leave(self) -> None:
        if self.waiting:
            self.waiting.pop(self.rng.randrange(len(self.waiting)))
            self.cache.queued_hits.keep_only(self.cache.background.without_background(self.waiting))

    def fill_up(self) -> None:
        """A batch that needs all that SGLang was told could be had."""
        cache = self.cache
        wanted = self.allocator.available_size() + cache.evictable_size()
        cache.parts.eviction.make_room(wanted)
        assert self.allocator.available_size() >= wanted, "room that was promised is not there"

    def end_all(self) -> None:
        super().end_all()
        self.cache.background.begin_round(self.stub)
        for shadow in list(self.open.values()):
            if shadow.id in self.cache.shadows.spaces:
                self.put_away(shadow)
        self.open.clear()
        assert (
            self.cache.policy.census.num_shadow_slots == 0
            and not self.cache.shadows._space_of
            and not self.cache.shadows._retired
        )

    # ---- the oracle

    num_adopted = 0

    def check(self) -> None:
        background_requests = [request for request in self.waiting if is_shadow_name(request.extra_key)]
        with without(self.waiting, background_requests):  # they queued hit nothing
            super().check()
        for request in self.running:
            assert all(node.key.extra_key == request.extra_key for node in path_to(request.last_node))
        for node in iter_nodes(self.cache.root_node):
            assert node.kv.is_shadow == is_shadow_name(node.key.extra_key)
        if self.rng.random() < 0.3:
            self.check_rows()


@contextlib.contextmanager
def without(requests: list[Request], some: list[Request]) -> Iterator[None]:
    everyone = list(requests)
    requests[:] = [request for request in requests if request not in some]
    try:
        yield
    finally:
        requests[:] = everyone


class ShadowWalk(ShadowMoves, Walk):
    pass


class ShadowTierWalk(ShadowMoves, TierWalk):
    def moves(self) -> dict[Callable[[], None], float]:
        moves = super().moves()
        del moves[self.fill_up]  # what has to be copied first is not waited for
        return moves

    def demote(self) -> None:
        """Users' nodes: those of shadows stay where they are."""
        for node in self.rng.sample(list(self.cache.nodes.values()), len(self.cache.nodes)):
            with contextlib.suppress(ValueError, IntrospectionError):
                self.cache.parts.admin.demote_node(node.id, self.rng.choice(self.tree.storage.tiers[1:]))
                assert not node.kv.is_shadow
                return


@pytest.fixture
def walk() -> ShadowWalk:
    return ShadowWalk(0, 1)


class RichWalk(ShadowWalk):
    """KV and queries that tell every press something; both follow from the path and the namespace alone.
    ``prompt_queries`` keeps queries."""

    capture: PromptQueries | None = None

    def compute(self, request: Request, begin: int, end: int, slots: torch.Tensor) -> None:
        hashes = path_hashes(request.tokens[:end], self.adapter_of(request.extra_key))[begin:]
        drawn = [torch.randn(3, LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(each)) for each in hashes]
        rows = torch.stack(drawn, dim=3)  # [k, v and q; layer; head; token; dim]
        for layer in range(LAYERS):
            self.pool.k_buffer[layer][slots] = rows[0, layer].transpose(0, 1)
            self.pool.v_buffer[layer][slots] = rows[1, layer].transpose(0, 1)
        if self.capture is not None and begin < request.prompt_len:
            batch = SimpleNamespace(
                forward_mode=SimpleNamespace(is_extend=lambda: True),
                reqs=[request],
                decoding_reqs=None,
                extend_lens=[end - begin],
                seq_lens_cpu=torch.tensor([end]),
            )
            self.capture.begin_batch(batch)
            for layer in range(LAYERS):
                of_layer = SimpleNamespace(layer_id=layer, tp_q_head_num=HEADS, qk_head_dim=DIM)
                self.capture.observe(rows[2, layer].transpose(0, 1).reshape(end - begin, -1), of_layer)

    def view_of(self, request: Request) -> list[set[tuple[int, int]]]:
        """Rows do not tell where they belong."""
        return []

    def check_rows(self) -> None:
        """Nor do those of nodes."""

    def kv_of(self, node: object) -> torch.Tensor:
        slots = slots_of(node)
        return torch.stack([buffer[slots] for buffer in (*self.pool.k_buffer, *self.pool.v_buffer)])


@pytest.fixture
def prompt_queries(monkeypatch: pytest.MonkeyPatch) -> PromptQueries:
    found = PromptQueries(32, LAYERS, 0, 1 << 20)
    monkeypatch.setattr(PromptQueries, "active", found)
    monkeypatch.setattr(RichWalk, "capture", found)
    return found


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("press", PRESSES)
@pytest.mark.parametrize("kept", [0.8, 0.37, 0.05])
def test_a_form_of_a_shadow_is_bit_for_bit_what_compressing_a_node_keeps(
    prompt_queries: PromptQueries, press: str, page_size: int, kept: float
) -> None:
    form = Form(press, kept)
    plain, shadowed = RichWalk(0, page_size, num_slots=1024), RichWalk(0, page_size, num_slots=1024)
    for walk in (plain, shadowed):
        walk.cache.compressor.presses.geometry = make_geometry(LAYERS, 2 * HEADS, HEADS, make_rope(DIM))
    tokens = plain.random_tokens(128)
    finished(plain, tokens)
    node = plain.node(None, tokens)
    plain.cache.parts.moves.compress(node.id, form)
    finished(shadowed, tokens)
    users = shadowed.node(None, tokens)
    before = shadowed.kv_of(users)
    shadow = shadowed.whole(tokens)
    made = shadowed.cache.shadows.make_shadow_form(shadow.id, form)
    copy = shadowed.node(made["extra_key"], tokens)
    assert made["num_slots"] == num_slots(copy) == num_slots(node) < 128
    assert torch.equal(shadowed.kv_of(copy), plain.kv_of(node))
    assert torch.equal(copy.kv.layout.positions, node.kv.layout.positions)
    assert torch.equal(copy.kv.layout.logical, node.kv.layout.logical)
    assert (copy.kv.form, copy.kv.is_lossy_prefix, num_slots(users)) == (form, False, 128)
    assert torch.equal(shadowed.kv_of(users), before), "users' KV was touched"
    parts = [part for part, _ in shadowed.cache._steps(RadixKey(array("q", tokens), shadow.exact))]
    assert torch.equal(torch.cat([shadowed.kv_of(part) for part in parts], dim=1), before), "the copy was touched"
    assert shadowed.cache.inspector.check_integrity()["violations"] == []


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("press", ["knorm", "snapkv"])
@pytest.mark.usefixtures("prompt_queries")
def test_a_form_whose_layers_keep_different_numbers_is_what_compression_makes_of_users_kv(
    press: str, page_size: int
) -> None:
    form = Form(press, 0.4, budget="pyramid")
    menu = (Form("knorm", 0.4, budget="pyramid"),)
    plain, shadowed = (RichWalk(0, page_size, num_slots=1024, forms=menu) for _ in range(2))
    tokens = plain.random_tokens(128)
    finished(plain, tokens)
    node = plain.node(None, tokens)
    plain.cache.parts.moves.compress(node.id, form)
    finished(shadowed, tokens)
    copy = shadowed.node(shadowed.form(shadowed.whole(tokens), form), tokens)
    assert node.kv.layout.layer_slots and copy.kv.layout.layer_slots == node.kv.layout.layer_slots
    assert torch.equal(copy.kv.layout.positions, node.kv.layout.positions)
    assert torch.equal(copy.kv.layout.logical, node.kv.layout.logical)
    for layer in range(LAYERS):
        rows = [walk.pool.k_buffer[layer][held_in(each, layer)[0]] for walk, each in ((plain, node), (shadowed, copy))]
        assert torch.equal(*rows)
    assert shadowed.cache.inspector.check_integrity()["violations"] == []


def test_a_budget_that_the_menu_does_not_have_is_refused(walk: ShadowWalk) -> None:
    form = Form("knorm", 0.4, budget="found-0a1b2c3d")
    tokens = walk.served(128)
    shadow = walk.whole(tokens)
    says = "form knorm@0.4:found-0a1b2c3d has no layer budget: expected one of none"
    with pytest.raises(ValueError, match=says):
        walk.cache.shadows.make_shadow_form(shadow.id, form)
    with pytest.raises(ValueError, match=says):
        walk.cache.inspector.compress_node(walk.node(None, tokens).id, form)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("form", [Form(codec="int8"), Form(codec="int4"), Form("knorm", 0.5, "int4")], ids=str)
def test_a_form_with_a_codec_holds_what_is_decoded_of_its_stored_bytes(form: Form, page_size: int) -> None:
    walk = RichWalk(0, page_size, num_slots=1024)
    tokens = walk.served(128)
    before = walk.kv_of(walk.node(None, tokens))
    shadow = walk.whole(tokens)
    raw = before if form.press is None else walk.kv_of(walk.node(walk.form(shadow, form.pressed), tokens))
    copy = walk.node(walk.form(shadow, form), tokens)
    expected, codec = raw.clone(), get_codec(form.codec)
    for keys, values in zip(expected[:LAYERS].flatten(2), expected[LAYERS:].flatten(2), strict=True):
        stored = torch.empty(codec.num_bytes(*keys.shape, keys.dtype), dtype=torch.uint8)
        codec.encode(keys, values, stored)
        codec.decode(stored, len(keys), 0, keys, values)
    assert torch.equal(walk.kv_of(copy), expected) and not torch.equal(expected, raw)
    assert (copy.kv.form, is_lossy(copy), num_slots(copy)) == (form, True, raw.shape[1])
    assert torch.equal(walk.kv_of(walk.node(None, tokens)), before), "users' KV was touched"
    assert walk.cache.inspector.check_integrity()["violations"] == []
    walk.put_away(shadow)


@pytest.mark.parametrize(("page_size", "present"), [(1, 192), (16, 192), (64, 192), (128, 128)])
def test_the_last_block_is_computed_where_a_press_needs_its_queries(
    prompt_queries: PromptQueries, page_size: int, present: int
) -> None:
    walk = RichWalk(0, page_size, num_slots=2048)
    tokens = walk.served(256)
    shadow = walk.copy(tokens)
    assert shadow.num_present == present
    assert walk.ask(shadow.exact, tokens) == present
    walk.form(shadow, Form("snapkv", 0.5))


def test_a_form_that_needs_queries_is_refused_without_them() -> None:
    walk = RichWalk(0, 1, num_slots=1024)
    tokens = walk.served(64)
    shadow = walk.whole(tokens)
    assert shadow.num_present == 64
    refused(walk, "cannot be brought to snapkv@0.5: its press needs queries", walk.form, shadow, Form("snapkv", 0.5))


def test_a_form_by_geometry_is_refused_without_one() -> None:
    walk = RichWalk(0, 1, num_slots=1024)
    shadow, form = walk.whole(walk.served(64)), Form("geometry", 0.5)
    refused(walk, "cannot be brought to geometry@0.5: expected a server with --kv-geometry", walk.form, shadow, form)


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_users_have_is_copied_and_a_guest_computes_the_rest(page_size: int) -> None:
    walk = ShadowWalk(0, page_size)
    tokens = walk.random_tokens(128)
    finished(walk, tokens[:70])
    shadow = walk.copy(tokens)
    present = 70 // page_size * page_size
    assert (shadow.num_present, shadow.num_tokens) == (present, 128)
    assert walk.ask(shadow.exact, [*tokens[:100], 58]) == present  # computes a part, and something else
    found = [
        (num_slots(node), matched) for node, matched in walk.cache._steps(RadixKey(array("q", tokens), shadow.exact))
    ]
    assert sum(matched for _, matched in found) == 100 // page_size * page_size
    assert walk.ask(shadow.exact, tokens) == 100 // page_size * page_size
    walk.form(shadow)


def test_lossy_and_absent_parts_are_not_copied(walk: ShadowWalk) -> None:
    tokens = walk.random_tokens(128)
    finished(walk, tokens[:80])
    finished(walk, tokens)
    upper, lower = walk.parts(tokens)
    walk.cache.parts.moves.compress(lower.id, HALF)
    assert walk.copy(tokens).num_present == 80
    walk.cache.parts.moves.compress(upper.id, HALF)
    assert walk.copy(tokens).num_present == 0
    assert walk.copy(tokens, "lora-a").num_present == 0


def test_a_context_in_another_namespace_has_another_key(walk: ShadowWalk) -> None:
    tokens = walk.random_tokens(64)
    keys = {walk.copy(tokens, namespace).key for namespace in (None, "lora-a", "", None)}
    assert len(keys) == 3
    names = [shadow.exact for shadow in walk.open.values()]
    assert len(set(names)) == 4 and all(map(is_shadow_name, names))


def refused(walk: ShadowWalk, match: str, call: Callable[..., object], *args: object, **kwargs: object) -> None:
    """It is one sentence, and all is as it was."""

    def state() -> tuple[object, ...]:
        cache = walk.cache
        spaces = {number: dict(space.forms) for number, space in cache.shadows.spaces.items()}
        slots = {node.id: slots_of(node).tolist() for node in cache.nodes.values()}
        return (
            cache.inspector.describe_tree(),
            slots,
            spaces,
            set(cache.shadows._space_of),
            walk.allocator.available_size(),
        )

    before = state()
    with pytest.raises((ValueError, IntrospectionError), match=match) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value) and ": " in str(caught.value)
    assert state() == before
    walk.check()


def test_what_cannot_be_is_refused_and_changes_nothing(walk: ShadowWalk) -> None:
    tokens = walk.served(128)
    walk.cache.parts.moves.compress(walk.node(None, tokens).id, HALF)
    for wrong in ([], tokens[:63], tokens[:65]):
        refused(walk, f"the context has {len(wrong)} tokens: expected whole blocks of 64", walk.copy, wrong)
    shadow = walk.copy(tokens)
    refused(walk, "holds 0 of 128 tokens: expected requests in its namespace", walk.form, shadow)
    walk.ask(shadow.exact, tokens[:64])
    refused(walk, "holds 64 of 128 tokens", walk.form, shadow)
    walk.ask(shadow.exact, tokens)
    walk.form(shadow)
    refused(walk, "has knorm@0.5 already: drop it first", walk.form, shadow)
    never = Form("knorm", 0.2)
    refused(walk, "has no knorm@0.2: it has knorm@0.5", walk.cache.shadows.drop_shadow_form, shadow.id, never)
    for call in (walk.cache.shadows.make_shadow_form, walk.cache.shadows.drop_shadow_form):
        refused(walk, "the shadow is gone: 77 was closed, or had to make room", call, 77, never)
    refused(walk, "the shadow is gone: 77", walk.cache.shadows.close_shadow, 77, False)
    refused(walk, "the context is a shadow's", walk.copy, tokens, shadow.exact)
    walk.put_away(shadow)
    refused(walk, f"the shadow is gone: {shadow.id} was closed", walk.cache.shadows.close_shadow, shadow.id, True)


@pytest.mark.parametrize("name", ["copy", "copy_compressed"])
def test_without_device_memory_for_the_copy_its_slots_are_given_back(
    walk: ShadowWalk, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = walk.served(128)
    shadow = walk.copy(tokens) if name == "copy_compressed" else None
    before = walk.allocator.available_size()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(walk.cache.compressor, name, fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        walk.copy(tokens) if shadow is None else walk.form(shadow)
    assert walk.allocator.available_size() == before and len(walk.cache.shadows.spaces) == (shadow is not None)


def test_shadows_take_no_more_than_their_share(walk: ShadowWalk) -> None:
    tokens = walk.random_tokens(128)
    small = walk.copy(tokens, may_evict=False)
    walk.ask(small.exact, tokens)
    refused(walk, "no room for a shadow of 128 slots: shadows hold 128 and may hold 128", walk.copy, tokens,
            may_evict=False)  # fmt: skip
    refused(walk, "no room for a shadow of 64 slots", walk.form, small)
    for _ in range(2):
        walk.copy(tokens)
    refused(walk, "no room for a shadow of 128 slots: shadows hold 384 and may hold 384", walk.copy, tokens)
    walk.put_away(small)
    walk.copy(tokens)
    assert walk.cache.shadows.counts["refused"] == 3


def test_so_many_are_open_at_once_and_no_more() -> None:
    walk = ShadowWalk(0, 1, num_slots=1024)
    opened = [walk.copy(walk.random_tokens(64)) for _ in range(shadows.MAX_SPACES)]
    refused(walk, "no room for a shadow: 8 are open already", walk.copy, walk.random_tokens(64))
    walk.put_away(opened[3])
    walk.copy(walk.random_tokens(64))


def test_a_shadow_that_nobody_uses_any_more_is_closed_for_the_next() -> None:
    walk = ShadowWalk(0, 1, num_slots=1024)
    left, asked, held = (walk.copy(walk.random_tokens(64)) for _ in range(3))
    background = walk.begin(held.exact, held.tokens)
    half = shadows.IDLE_S / 2 + 1
    walk.cache.terms.now_s += half
    assert walk.ask(asked.exact, asked.tokens) is not None
    walk.cache.terms.now_s += half
    walk.copy(walk.random_tokens(64))
    assert left.id not in walk.cache.shadows.spaces and walk.cache.shadows.counts["expired"] == 1
    refused(walk, f"the shadow is gone: {left.id} was closed", walk.form, walk.open.pop(left.id))
    walk.end(background)
    walk.cache.background.begin_round(walk.stub)
    walk.cache.terms.now_s += half
    walk.form(asked)
    walk.cache.shadows.expire_shadows()
    assert {held.id, asked.id} <= {*walk.cache.shadows.spaces}
    walk.cache.terms.now_s += half
    walk.cache.terms.advanced()
    assert held.id not in walk.cache.shadows.spaces and asked.id in walk.cache.shadows.spaces
    walk.open.pop(held.id)


def test_a_shadow_that_never_fits_is_not_waited_for(walk: ShadowWalk) -> None:
    refused(walk, "a shadow of 192 slots never fits: shadows may hold 128", walk.copy, walk.random_tokens(192),
            may_evict=False)  # fmt: skip


def test_shadows_that_are_to_be_filled_yet_count_as_full(walk: ShadowWalk) -> None:
    walk.copy(walk.random_tokens(128), may_evict=False)
    refused(walk, "no room for a shadow of 64 slots", walk.copy, walk.random_tokens(64), may_evict=False)


def test_users_that_run_keep_an_eighth_of_the_pool(walk: ShadowWalk) -> None:
    tokens = walk.random_tokens(64)
    held = [walk.begin_user(walk.random_tokens(190)) for _ in range(2)]
    refused(walk, "no room for a shadow of 128 slots: .* 132 are free or users' that could make room", walk.copy,
            [*tokens, *tokens])  # fmt: skip
    walk.copy(tokens)
    walk.end(held[0])
    walk.copy([*tokens, *tokens])


# ---- apart from users


@pytest.mark.parametrize("page_size", [1, 16])
def test_users_never_find_a_shadow_and_shadows_never_users(page_size: int) -> None:
    walk = ShadowWalk(0, page_size)
    tokens = walk.random_tokens(64)
    shadow = walk.whole(tokens)  # nothing of it was there
    name = walk.form(shadow)
    question = [*tokens, *range(50, 58)]
    assert walk.use(question) == 0
    assert (walk.ask(shadow.exact, question), walk.ask(name, question)) == (64, 64)
    walk.put_away(shadow)
    assert walk.use([*question, 1]) == len(question) // page_size * page_size
    assert walk.ask(shadow.exact, question) is None, "it would compute the whole context"


def test_questions_leave_nothing_behind(walk: ShadowWalk) -> None:
    shadow = walk.whole(tokens := walk.random_tokens(64))
    name = walk.form(shadow)
    before = walk.cache.inspector.describe_tree()["num_nodes"], walk.allocator.available_size()
    for of in (shadow.exact, name):
        request = walk.begin(of, [*tokens, 51, 52])
        for _ in range(3):
            walk.decode()
        walk.end(request)
        walk.check()
    assert (walk.cache.inspector.describe_tree()["num_nodes"], walk.allocator.available_size()) == before


def test_a_question_in_a_shadow_that_is_not_whole_is_aborted(walk: ShadowWalk) -> None:
    tokens = walk.random_tokens(128)
    finished(walk, tokens[:64])
    shadow = walk.copy(tokens)
    assert walk.ask(shadow.exact, [*tokens, 51, 52]) is None
    assert walk.ask("evicpress/shadow/of nobody/exact", tokens) is None
    assert walk.ask(shadow.exact, tokens) == 64
    assert walk.ask(shadow.exact, [*tokens, 51, 52]) == 128
    assert len(walk.aborted) == 2 == walk.cache.background.counts["aborted"]


def test_the_policy_plans_without_shadows(walk: ShadowWalk) -> None:
    tokens = walk.served(64)
    shadow = walk.whole(tokens)
    walk.form(shadow)
    cached = walk.cache.evictable_size()
    assert cached == 64 + 64 + 32
    assert walk.cache.parts.eviction.free_slots(cached) == 64 and walk.parts(tokens) == []
    assert {node.key.extra_key for node in walk.cache.nodes.values()} == {shadow.exact, shadow.forms[HALF]}
    assert walk.cache.evictable_size() == 96, "SGLang may count on it"
    assert walk.cache.parts.eviction.free_slots(1) == 0


def test_shadows_make_room_when_nothing_else_does(walk: ShadowWalk) -> None:
    tokens = walk.served(128)
    shadow = walk.whole(tokens)
    walk.form(shadow)
    wanted = walk.allocator.available_size() + 128
    walk.cache.parts.eviction.make_room(wanted)
    assert shadow.id in walk.cache.shadows.spaces and walk.cache.shadows.counts["released"] == 0
    walk.cache.parts.eviction.make_room(wanted + 1)
    assert walk.allocator.available_size() == walk.allocator.size and not walk.cache.nodes
    assert walk.cache.shadows.counts["released"] == 1
    refused(walk, "the shadow is gone", walk.form, shadow)


def test_a_shadow_that_is_closed_while_a_request_runs_on_it_goes_when_that_ends(walk: ShadowWalk) -> None:
    shadow = walk.whole(tokens := walk.random_tokens(64))
    name = walk.form(shadow)
    asked, filling = walk.begin(name, [*tokens, 51]), walk.begin(shadow.exact, tokens)
    walk.put_away(shadow)
    walk.check()
    assert walk.cache.policy.census.num_shadow_slots == 96
    walk.decode()
    walk.end(asked)
    walk.cache.background.begin_round(walk.stub)
    walk.check()
    assert walk.cache.policy.census.num_shadow_slots == 64
    walk.end(filling)
    walk.cache.background.begin_round(walk.stub)
    assert walk.cache.policy.census.num_shadow_slots == 0 and walk.allocator.available_size() == walk.allocator.size


def test_a_guest_that_is_computing_a_shadow_when_it_is_closed_leaves_nothing(walk: ShadowWalk) -> None:
    tokens = walk.random_tokens(128)
    shadow = walk.copy(tokens)
    request = walk.enqueue(shadow.exact, tokens)
    walk.prefill(request, 64)  # a chunk of it
    walk.put_away(shadow)
    assert walk.extend(request, 128)
    walk.check()
    walk.end(request)
    walk.cache.background.begin_round(walk.stub)
    assert walk.allocator.available_size() == walk.allocator.size


def test_room_of_a_closed_shadow_is_there_as_soon_as_its_requests_end(walk: ShadowWalk) -> None:
    """Whoever still runs in another one."""
    first, second = (walk.whole(walk.random_tokens(64)) for _ in range(2))
    asked = [walk.begin(shadow.exact, [*shadow.tokens, 51]) for shadow in (first, second)]
    walk.cache.shadows.release_shadows()
    walk.end(asked[0])
    wanted = walk.allocator.available_size() + walk.cache.evictable_size()
    walk.cache.parts.eviction.make_room(wanted)
    assert walk.allocator.available_size() == wanted, "SGLang was promised more than there is"


def test_a_flush_takes_all_shadows(walk: ShadowWalk) -> None:
    shadow = walk.whole(tokens := walk.random_tokens(64))
    walk.form(shadow)
    walk.flush_all()
    walk.check()
    assert walk.cache.policy.census.num_shadow_slots == 0 and not walk.cache.shadows._space_of
    refused(walk, "the shadow is gone", walk.form, shadow)
    assert walk.ask(shadow.exact, tokens) is None
    assert walk.copy(tokens).exact != shadow.exact, "a name is given once"


def test_a_flush_of_the_gpu_takes_all_shadows(walk: ShadowWalk) -> None:
    shadow = walk.whole(tokens := walk.random_tokens(64))
    name = walk.form(shadow)
    asked = walk.begin(name, [*tokens, 51])
    walk.cache.parts.admin.flush_tier(Tier.GPU)
    walk.check()
    refused(walk, "the shadow is gone", walk.form, shadow, Form("knorm", 0.2))
    assert walk.ask(name, [*tokens, 51]) is None
    walk.end(asked)
    walk.cache.shadows.release_shadows()
    assert walk.cache.policy.census.num_shadow_slots == 0


def test_shadows_are_no_kv_events(walk: ShadowWalk) -> None:
    """They name blocks by their tokens alone."""
    tell_kv_events(walk.cache)
    tokens = walk.served(64)
    assert walk.cache.take_events()
    shadow = walk.whole(tokens)
    walk.form(shadow)
    walk.ask(shadow.exact, [*tokens, 51])
    walk.put_away(shadow)
    assert walk.cache.take_events() == []
    walk.tiers.removal.drop(walk.node(None, tokens).id)
    assert len(walk.cache.take_events()) == 1


# ---- adoption


@pytest.mark.parametrize("page_size", [1, 16])
def test_users_lossy_nodes_get_the_exact_copy_token_for_token(page_size: int) -> None:
    walk = ShadowWalk(0, page_size, num_slots=1024)
    tokens, other = walk.random_tokens(192), walk.random_tokens(48)
    for upto in (64, 112, 192):
        finished(walk, tokens[:upto])
    finished(walk, [*tokens, *other])  # goes on below the context
    finished(walk, [*tokens[:160], *other])  # parts a node of it
    shadow = walk.whole(tokens)
    for node in walk.parts([*tokens, *other])[::2]:
        walk.cache.parts.moves.compress(node.id, HALF)
    lossy = [node for node in walk.parts(tokens) if is_lossy(node)]
    below = walk.parts([*tokens, *other])[-1]
    assert 0 < len(lossy) < len(walk.parts(tokens)) and is_lossy(below)
    before, held = walk.allocator.available_size(), sum(map(num_slots, walk.parts(tokens)))
    assert walk.put_away(shadow, adopt=True) == len(lossy)
    assert not any(map(is_lossy, walk.parts(tokens))) and is_lossy(below)
    walk.check()
    walk.check_rows()
    assert walk.cache.policy.census.num_shadow_slots == 0
    assert walk.allocator.available_size() == before + held
    assert walk.use([*tokens, 51]) == 192


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("press", ["knorm", "random", "streaming"])
def test_a_node_that_goes_beyond_the_context_is_split_for_it(press: str, page_size: int) -> None:
    walk = ShadowWalk(0, page_size, num_slots=1024)
    tokens = walk.random_tokens(192)
    shadow = walk.whole(tokens[:128])
    finished(walk, tokens)
    (node,) = walk.parts(tokens)
    walk.cache.parts.moves.compress(node.id, Form(press, 0.5))
    assert walk.put_away(shadow, adopt=True) == 1
    upper, lower = walk.parts(tokens)
    assert (len(upper.key), is_lossy(upper), is_lossy(lower)) == (128, False, True)
    assert not bool((lower.kv.layout.positions < 128).any()), "what is exact above would be attended to twice"


def test_what_a_user_runs_on_is_not_exchanged(walk: ShadowWalk) -> None:
    tokens = walk.random_tokens(128)
    finished(walk, tokens[:64])
    finished(walk, tokens)
    shadow = walk.whole(tokens)
    for node in walk.parts(tokens):
        walk.cache.parts.moves.compress(node.id, HALF)
    user = walk.begin_user([*tokens[:64], 51, 52])
    assert walk.put_away(shadow, adopt=True) == 1
    assert [is_lossy(node) for node in walk.parts(tokens)] == [True, False]
    walk.check()  # and that the request sees what it saw
    walk.check_rows()
    walk.end(user)


def test_what_was_computed_on_lossy_kv_is_replaced_too(walk: ShadowWalk) -> None:
    tokens = walk.random_tokens(128)
    finished(walk, tokens[:64])
    walk.cache.parts.moves.compress(walk.node(None, tokens[:64]).id, HALF)
    finished(walk, tokens)
    assert [node.kv.is_lossy_prefix for node in walk.parts(tokens)] == [False, True]
    shadow = walk.whole(tokens)
    assert shadow.num_present == 0
    assert walk.put_away(shadow, adopt=True) == 2
    assert not any(map(is_lossy, walk.parts(tokens)))


def test_nothing_is_adopted_where_nothing_is_lossy_or_the_copy_is_in_use_or_has_a_gap(walk: ShadowWalk) -> None:
    tokens = walk.served(128)
    assert walk.put_away(walk.whole(tokens), adopt=True) == 0
    used, gapped = walk.whole(tokens), walk.copy(tokens)
    walk.cache.parts.moves.compress(walk.node(None, tokens).id, HALF)
    request = walk.begin(used.exact, [*tokens, 51])
    assert walk.put_away(used, adopt=True) == 0
    walk.end(request)
    walk.cache.background.begin_round(walk.stub)
    walk.check()
    (node,) = [node for node in walk.cache.nodes.values() if node.key.extra_key == gapped.exact]
    walk.tiers.removal.drop(node.id)
    assert walk.put_away(gapped, adopt=True) == 0
    assert is_lossy(walk.node(None, tokens))


def test_adoption_is_of_one_namespace(walk: ShadowWalk) -> None:
    tokens = walk.random_tokens(64)
    for namespace in (None, "lora-a"):
        finished(walk, tokens, namespace)
    shadow = walk.whole(tokens, "lora-a")
    for namespace in (None, "lora-a"):
        walk.cache.parts.moves.compress(walk.node(namespace, tokens).id, HALF)
    assert walk.put_away(shadow, adopt=True) == 1
    assert is_lossy(walk.node(None, tokens)) and not is_lossy(walk.node("lora-a", tokens))


# ---- random walks


@pytest.fixture
def tiered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int, int], ShadowTierWalk]:
    monkeypatch.setattr(admin, "MOVE_WAIT_S", 0.02)
    return lambda seed, page_size: ShadowTierWalk(seed, page_size, tmp_path, num_slots=512)


def test_what_is_still_being_loaded_is_waited_for(tiered: Callable[[int, int], ShadowTierWalk]) -> None:
    """SGLang may refuse a request after its prefix was begun to be loaded: no batch waits for that."""
    walk = tiered(0, 1)
    tokens = walk.random_tokens(64)
    walk.serve(tokens)
    walk.cache.parts.admin.demote_node(walk.node(None, tokens).id, Tier.HOST)
    walk.settle()
    assert walk.node(None, tokens).value is None
    request = walk.ready([*tokens, 51, 52])
    match = walk.look_up(request)
    (block,) = blocked(walk, "load")
    lock(walk.cache, request)
    assert load_back(walk.cache, request, match) == 64 and walk.tiers.loads
    unlock(walk.cache, request)
    assert walk.copy(tokens).num_present == 64
    walk.go_on(block)
    walk.leave()


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("seed", range(8))
def test_random_walk_with_shadows_keeps_every_invariant(seed: int, page_size: int) -> None:
    walk = ShadowWalk(seed, page_size, num_slots=768)
    walk.run(200)
    counts = walk.cache.shadows.counts
    assert counts["opened"] > 0 and walk.cache.background.counts["requests"] > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_random_walk_with_shadows_over_tiers_keeps_every_row(
    tiered: Callable[[int, int], ShadowTierWalk], page_size: int
) -> None:
    walk = tiered(20 + page_size, page_size)
    walk.cost = None
    walk.run(400)
    assert walk.cache.shadows.counts["forms"] > 0 and walk.tree.storage.counts["released"] > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_layers_keep_the_tokens_that_are_asked_for(page_size: int) -> None:
    walk = RichWalk(0, page_size, num_slots=1024, forms=(Form("knorm", 0.4, budget="pyramid"),))
    tokens = walk.served(128)
    before = walk.kv_of(walk.node(None, tokens))
    wanted = [80, 32]
    form, shadow = Form("knorm", 0.3, budget="searched"), walk.whole(tokens)
    made = walk.cache.shadows.make_shadow_form(shadow.id, form, wanted)
    copy = walk.node(str(made["extra_key"]), tokens)
    assert made["num_slots"] == 80 and copy.kv.layout.layer_slots == (80, 32)
    kept = [copy.kv.layout.positions_of(layer) for layer in range(LAYERS)]
    for layer, positions in enumerate(kept):
        lengths = before[layer].norm(dim=-1).T.masked_fill(torch.arange(128) < 4, -1.0)  # [heads, tokens], sinks first
        best = lengths.argsort(dim=-1, stable=True)[:, : wanted[layer]].sort().values
        assert torch.equal(positions.long(), best)
    assert walk.cache.inspector.check_integrity()["violations"] == []
    with pytest.raises(ValueError, match=r"layer_tokens has 129: expected from 1 to 128"):
        walk.cache.shadows.make_shadow_form(shadow.id, Form("knorm", 0.9, budget="searched"), [129] * LAYERS)
    with pytest.raises(ValueError, match=r"layer_tokens are given with exact\+int8, of which every layer keeps all"):
        walk.cache.shadows.make_shadow_form(shadow.id, Form(codec="int8"), [64] * LAYERS)
