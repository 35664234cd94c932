"""Shadows: copies of a context's exact KV in namespaces of their own, to be compressed and asked questions, unseen by
users' requests.

A shadow is a space: one namespace with the exact copy, and one for each form made of it. Their nodes stand in the tree
like others, but the policy takes them for locked; they go with their space, or when users need room that nothing else
gives.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import accumulate

import torch
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_evicpress.core import PRESSES, Form
from sglang_evicpress.device import to_device
from sglang_evicpress.introspect.arguments import IntrospectionError
from sglang_evicpress.introspect.census import Census
from sglang_evicpress.patches.attention.prompt_queries import PromptQueries
from sglang_evicpress.patches.profiling.types import KnownContexts, ShadowTree
from sglang_evicpress.patches.tiers.types import GpuForms, Slots
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.namespaces import SHADOW_PREFIX, is_shadow_name
from sglang_evicpress.patches.tree.node import first_outside, is_lossy, iter_nodes
from sglang_evicpress.patches.tree.types import LogicalTime, Node, Request
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.press import get_press
from sglang_evicpress.press.geometry import MISSING
from sglang_evicpress.quality.profile import BLOCK_TOKENS, context_keys
from sglang_evicpress.survivors import SurvivorLayout

POOL_SHARE = {False: 1 / 4, True: 3 / 4}  # of the pool that shadows hold at most; True: users' nodes may all go for it
MAX_SPACES = 8
IDLE_S = 120.0
"""Nobody asked for a shadow for so long, nor in it: who opened it is gone. Longer than a profiler waits for room."""


@dataclass(slots=True)
class Space:
    """``tokens`` of the context whose users' namespace is ``namespace``; ``exact`` and ``forms`` are extra keys."""

    id: int
    key: bytes
    tokens: array[int]
    namespace: str | None
    exact: str
    may_evict: bool
    used_s: float
    forms: dict[Form, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.exact, *self.forms.values())


@dataclass(eq=False, repr=False)
class Shadows:
    """All shadows of a tree, on the scheduler thread. ``background requests`` are the requests in them, which keep them
    from expiring; ``adapter_of`` tells the LoRA adapter of a namespace, ``changed`` is told of nodes that hold less,
    ``drop`` forgets a leaf, ``replace`` gives a node full KV in place of what it holds, ``join_loads`` waits until all
    that comes to the GPU is queued, ``free_slots`` frees so many by the policy's plan."""

    tree: ShadowTree
    time: LogicalTime
    census: Census
    nodes: GpuForms
    menu: Menu
    ledger: Slots
    compressor: Compressor
    contexts: KnownContexts
    adapter_of: Callable[[str | None], str | None]
    changed: Callable[[Node], None]
    drop: Callable[[int], object]
    replace: Callable[[Node, torch.Tensor, bool], None]
    join_loads: Callable[[], None]
    free_slots: Callable[[int], int]
    background_requests: Sequence[Request]
    seed: bytes

    def __post_init__(self) -> None:
        self.spaces: dict[int, Space] = {}
        self.counts = dict.fromkeys(("opened", "refused", "forms", "released", "expired", "adopted_nodes"), 0)
        self._space_of: dict[str, Space] = {}  # by extra key
        self._retired: set[str] = set()
        self._next_space = 1

    def space_of(self, name: str | None) -> Space | None:
        """The shadow of this namespace; None for one that is not there, or not any more."""
        return None if name is None else self._space_of.get(name)

    def clear_shadows(self) -> None:
        """The tree goes."""
        self.spaces.clear()
        self._space_of.clear()
        self._retired.clear()

    def shadow_nodes(self) -> Iterator[Node]:
        """Every node of a shadow, also of one that was closed while a request ran on it."""
        for child in self.tree.root_node.children.values():
            if child.kv.is_shadow:
                yield child
                yield from iter_nodes(child)

    def num_shadow_tokens(self, req: Request) -> int:
        """The tokens that a request may put under a shadow's name: its prompt's, into the exact copy, while it is
        there. What it generates is no part of the context."""
        space = self.space_of(req.extra_key)
        if space is None or req.extra_key != space.exact:
            return 0
        return min(len(space.tokens), len(req.origin_input_ids))

    # ---- what can be asked

    def open_shadow(self, tokens: Sequence[int], namespace: str | None, may_evict: bool) -> dict[str, object]:
        """Copy what the GPU holds exactly of the context; requests in the answered namespace compute the rest."""
        row = array("q", tokens)  # what it cannot hold no request can be asked with: see arguments.py
        if is_shadow_name(namespace):
            raise ValueError("the context is a shadow's: expected the extra_key of users' requests")
        if not row or len(row) % BLOCK_TOKENS or len(row) % self.tree.page_size:
            raise ValueError(
                f"the context has {len(row)} tokens: expected whole blocks of {BLOCK_TOKENS} and pages of "
                f"{self.tree.page_size}"
            )
        odd = first_outside(row, self.tree.vocab_size)
        if odd is not None:
            raise ValueError(f"the context has token {row[odd]} at {odd}: expected 0 to {self.tree.vocab_size - 1}")
        self.expire_shadows()
        if len(self.spaces) >= MAX_SPACES:
            raise ValueError(f"no room for a shadow: {MAX_SPACES} are open already")
        path, num_present = self._exact_part(RadixKey(row, namespace))
        if PromptQueries.active is not None:  # computing the last block shows the queries that some presses look at
            num_present = min(num_present, (len(row) - BLOCK_TOKENS) // self.tree.page_size * self.tree.page_size)
        last = path[-1] if path else self.tree.root_node
        self.tree.inc_lock_ref(last)
        try:
            self._find_room(len(row), may_evict)
            slots = None if num_present == 0 else self._take_slots(num_present)
        finally:
            self.tree.dec_lock_ref(last)
        if slots is not None:
            with self._given_back_after_an_error(slots):
                self.join_loads()  # some of it may still be on its way, with no batch that waited for it
                self.compressor.copy(_values(path), slots[:num_present])
        space = Space(
            self._next_space,
            context_keys(self.contexts.profile_identity, namespace, row)[-1],
            row,
            namespace,
            self._name("exact"),
            may_evict,
            self.time.now_s,
        )
        self._next_space += 1
        self.contexts.know_context(space.key, row, namespace)
        self.spaces[space.id] = self._space_of[space.exact] = space
        if slots is not None:
            self._add_shadow_node(space.exact, row[:num_present], slots)
        self.counts["opened"] += 1
        return {
            "shadow": space.id,
            "key": space.key.hex(),
            "extra_key": space.exact,
            "num_tokens": len(row),
            "num_present": num_present,
        }

    def make_shadow_form(self, space_id: int, form: Form, layer_tokens: Sequence[int] = ()) -> dict[str, object]:
        """Keep of the exact copy what ``form`` keeps, or what its press keeps where layers keep ``layer_tokens``, in a
        namespace of its own."""
        space = self._space(space_id)
        if not layer_tokens:
            self.menu.check_budget(form)
        if form in space.forms:
            raise ValueError(f"shadow {space_id} has {form} already: drop it first")
        path, num_present = self._exact_part(RadixKey(space.tokens, space.exact))
        num_tokens = len(space.tokens)
        if num_present < num_tokens:
            raise ValueError(
                f"shadow {space_id} holds {num_present} of {num_tokens} tokens: expected requests in its namespace to "
                "compute the rest first"
            )
        window = self.nodes.window_of(path[-1])
        if form.press is not None and get_press(form.press).needs_queries and window is None:
            raise ValueError(
                f"shadow {space_id} cannot be brought to {form}: its press needs queries of the prompt, and none were "
                "kept (they are when --kv-forms names the press)"
            )
        if form.press is not None and PRESSES[form.press].needs_geometry and self.compressor.geometry is None:
            raise ValueError(f"shadow {space_id} cannot be brought to {form}: {MISSING}")
        sinks = self.nodes.sinks_of(num_tokens, 0)
        kept: int | tuple[int, ...] = self.menu.num_slots(form, num_tokens, sinks)
        if layer_tokens and form.press is None:
            raise ValueError(f"layer_tokens are given with {form}, of which every layer keeps all: expected PRESS@KEPT")
        if layer_tokens:
            kept = self.menu.given_counts(layer_tokens, num_tokens, sinks)
        elif form.is_uneven:
            kept = self.menu.layer_counts(form, num_tokens, sinks)
        num_kept = kept if isinstance(kept, int) else max(kept)
        last = path[-1]
        self.tree.inc_lock_ref(last)
        try:
            self._find_room(num_kept, space.may_evict)
            slots = self._take_slots(num_kept)
        finally:
            self.tree.dec_lock_ref(last)
        with self._given_back_after_an_error(slots):
            if form.press is None:
                self.compressor.copy(_values(path), slots)
                layout, value = None, slots
            else:
                layout, value = self.compressor.copy_compressed(
                    form=form, parts=_values(path), num_tokens=num_tokens, into=slots, window=window, num_kept=kept
                )
            self.compressor.recode(slots, form.codec, layout)
        name = space.forms[form] = self._name(str(form))
        self._space_of[name] = space
        self._add_shadow_node(name, space.tokens, slots, form=form, layout=layout, value=value)
        self.counts["forms"] += 1
        return {"shadow": space_id, "form": str(form), "extra_key": name, "num_slots": num_kept}

    def drop_shadow_form(self, space_id: int, form: Form) -> dict[str, object]:
        space = self._space(space_id)
        name = space.forms.pop(form, None)
        if name is None:
            raise ValueError(f"shadow {space_id} has no {form}: it has {', '.join(map(str, space.forms)) or 'no form'}")
        self._retire(name)
        return {"shadow": space_id, "form": str(form)}

    def close_shadow(self, space_id: int, adopt: bool) -> dict[str, object]:
        """The space ends. ``adopt``: users' lossy nodes of the context are given its exact KV first; ValueError where
        that is a LoRA adapter's, which no request in the shadow ran with."""
        space = self._space(space_id)
        if adopt and self.adapter_of(space.namespace) is not None:
            raise ValueError(
                f"shadow {space_id} holds KV of the base model in the namespace of a LoRA adapter: expected adopt false"
            )
        num_adopted = self._adopt_exact(space) if adopt else 0
        self._close(space)
        return {"shadow": space_id, "adopted_nodes": num_adopted}

    # ---- room

    def release_shadows(self) -> int:
        """Give up every shadow that no request runs on; returns the slots freed. Whoever asks in them finds nothing."""
        before = self.tree.token_to_kv_pool_allocator.available_size()
        for space in list(self.spaces.values()):
            self._close(space)
            self.counts["released"] += 1
        self.release_retired()
        return int(self.tree.token_to_kv_pool_allocator.available_size() - before)

    def expire_shadows(self) -> None:
        """Close those that nobody uses any more."""
        for req in self.background_requests:
            if (space := self.space_of(req.extra_key)) is not None:
                space.used_s = self.time.now_s
        for space in [space for space in self.spaces.values() if self.time.now_s - space.used_s > IDLE_S]:
            self._close(space)
            self.counts["expired"] += 1

    def release_retired(self) -> None:
        """Delete the nodes of ended namespaces that no request runs on any more."""
        if not self._retired:
            return
        left = set()
        for node in list(self.shadow_nodes())[::-1]:
            name = node.key.extra_key
            if name not in self._retired:
                continue
            if node.lock_ref == 0 and not node.children:
                self.drop(node.id)
            else:
                left.add(name)
        self._retired = left

    def _find_room(self, num_slots: int, may_evict: bool) -> None:
        allocator = self.tree.token_to_kv_pool_allocator
        num_held, most = (
            self.census.num_shadow_slots + self._num_unfilled(),
            int(POOL_SHARE[may_evict] * allocator.size),
        )
        unlocked = allocator.available_size() + self.ledger.evictable - num_held
        if num_slots > most:
            raise ValueError(f"a shadow of {num_slots} slots never fits: shadows may hold {most}")
        if num_held + num_slots > most or unlocked - num_slots < allocator.size // 8:
            self.counts["refused"] += 1
            raise ValueError(
                f"no room for a shadow of {num_slots} slots: shadows hold {num_held} and may hold {most}, "
                f"{unlocked} are free or users' that could make room"
            )
        missing = num_slots - allocator.available_size()
        if missing > 0:
            self.free_slots(missing)

    def _num_unfilled(self) -> int:
        """Slots that open shadows are still to be given by requests."""
        keys = (RadixKey(space.tokens, space.exact) for space in self.spaces.values())
        return sum(len(key) - sum(matched for _, matched in self.tree._steps(key)) for key in keys)

    def _take_slots(self, num_slots: int) -> torch.Tensor:
        pages = -(-num_slots // self.tree.page_size) * self.tree.page_size
        slots = self.tree.token_to_kv_pool_allocator.alloc(pages)
        if slots is None:
            self.counts["refused"] += 1
            raise ValueError(f"no room for a shadow of {num_slots} slots: making room for it did not free as many")
        return slots.to(torch.int64)

    @contextmanager
    def _given_back_after_an_error(self, slots: torch.Tensor) -> Iterator[None]:
        """Free the slots if filling them fails: it may find no device memory for its scratch."""
        try:
            yield
        except Exception:
            self.ledger.free(slots)
            raise

    # ---- parts

    def _name(self, what: str) -> str:
        """A namespace that nobody guesses, the same on every rank."""
        secret = sha256(self.seed + f"{self._next_space}/{self.counts['forms']}".encode()).hexdigest()
        return f"{SHADOW_PREFIX}{secret[:32]}/{what}"

    def _space(self, space_id: int) -> Space:
        space = self.spaces.get(space_id)
        if space is None:
            raise IntrospectionError(409, f"the shadow is gone: {space_id} was closed, or had to make room")
        space.used_s = self.time.now_s
        return space

    def _exact_part(self, key: RadixKey) -> tuple[list[Node], int]:
        """The nodes on the GPU that spell the longest exact prefix of ``key``, and how many tokens of it."""
        path: list[Node] = []
        num_tokens = 0
        for node, matched in self.tree._steps(key.page_aligned(self.tree.page_size)):
            if node.value is None or is_lossy(node):
                break
            path.append(node)
            num_tokens += matched
        return path, num_tokens

    def _add_shadow_node(
        self,
        name: str,
        tokens: array[int],
        slots: torch.Tensor,
        *,
        form: Form | None = None,
        layout: SurvivorLayout | None = None,
        value: torch.Tensor | None = None,
    ) -> None:
        node = self.tree._add_leaf(
            self.tree.root_node, RadixKey(tokens, name), slots if value is None else value, 0, False
        )
        if form is not None:
            node.kv.form = form
        if layout is not None:
            kv = node.kv
            kv.layout, kv.slots, kv.origin = layout, slots.clone(), node.id
            self.ledger.remove(len(tokens) - len(slots))
        if form is not None:
            self.changed(node)

    def _close(self, space: Space) -> None:
        del self.spaces[space.id]
        for name in space.names:
            self._retire(name)

    def _retire(self, name: str) -> None:
        del self._space_of[name]
        self._retired.add(name)
        self.release_retired()

    def _adopt_exact(self, space: Space) -> int:
        """Users' unlocked lossy nodes of the context take the exact copy's slots in place of theirs."""
        copy_path, num_present = self._exact_part(RadixKey(space.tokens, space.exact))
        if num_present < len(space.tokens) or any(node.lock_ref for node in copy_path):
            return 0
        if any(len(node.children) > 1 for node in copy_path) or copy_path[-1].children:
            return 0
        key = RadixKey(space.tokens, space.namespace).page_aligned(self.tree.page_size)
        steps = self.tree._steps(key)
        if not any(node.value is not None and is_lossy(node) and not node.lock_ref for node, _ in steps):
            return 0
        exact = torch.cat(_values(copy_path))
        is_left = torch.ones(len(exact), dtype=torch.bool)
        ends = list(accumulate(len(node.key) for node in self.tree._take(steps)))
        num_adopted = 0
        for (node, _), end in zip(self.tree._steps(key)[::-1], ends[::-1], strict=True):  # from the end: see _give
            if node.value is None or not is_lossy(node) or node.lock_ref:
                continue
            begin = end - len(node.key)
            self.replace(node, exact[begin:end].clone(), False)
            is_left[begin:end] = False
            num_adopted += 1
        end = len(exact)
        for node, value in zip(copy_path[::-1], _values(copy_path)[::-1], strict=True):
            left = is_left[end - len(node.key) : end].nonzero().flatten()  # a mask on the device would wait for it
            rest = value[to_device(left, value.device)]
            end -= len(node.key)
            if len(rest):
                self.ledger.free(rest)
            self.tree._delete_leaf(node)
        self.counts["adopted_nodes"] += num_adopted
        return num_adopted


def _values(path: Sequence[Node]) -> list[torch.Tensor]:
    """Values of nodes on the GPU."""
    return [node.value for node in path if node.value is not None]
