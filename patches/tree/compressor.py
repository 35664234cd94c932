"""Compresses one node inside SGLang's KV pool: score, select, compact, and place the survivors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from sglang_evicpress.codec import NotFiniteError
from sglang_evicpress.codec.layout import layout_of
from sglang_evicpress.core import Form
from sglang_evicpress.device import HostCopy, to_device
from sglang_evicpress.geometry.centres import QueryGeometry
from sglang_evicpress.kernels.compact import compact
from sglang_evicpress.kernels.group_codec import decode, encode
from sglang_evicpress.kernels.select import select_survivors
from sglang_evicpress.patches.tree.form_presses import FormPresses
from sglang_evicpress.patches.tree.layer_press import LayerPress, layout_of_layers
from sglang_evicpress.patches.tree.model_identity import agreed
from sglang_evicpress.patches.tree.node_kv import NodeSlots
from sglang_evicpress.patches.tree.ranks import Ranks
from sglang_evicpress.patches.tree.tries import agree, raised, tried_here
from sglang_evicpress.policy.layer_counts import NO_BUDGETS, LayerGroups
from sglang_evicpress.press import PressInput, QueryWindow, scored, select
from sglang_evicpress.press.layers import select_by_layer
from sglang_evicpress.survivors import SurvivorLayout, place
from sglang_evicpress.tiers.entry.header import Shape
from sglang_evicpress.tiers.entry.payload import PayloadCopier

Chosen: TypeAlias = tuple[PressInput, torch.Tensor, torch.Tensor]
"""A node, the survivors chosen of it, int32 [layers, heads, m], and the slots that hold them now [m]."""

Kept: TypeAlias = int | tuple[int, ...]
"""Tokens that every layer keeps, or, where that differs, a layer of each group."""

Made = TypeVar("Made")

Placed: TypeAlias = tuple[SurvivorLayout, torch.Tensor]
"""Where the survivors of a node are, and its logical value, int64 [tokens]."""


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A node that was compressed on this rank. ``rows``, int64 [2, m]: the greatest position of every survivor, and the
    slots."""

    start: int
    positions: HostCopy
    rows: torch.Tensor
    value: torch.Tensor


class Compressor:
    """Holds the pool and what ranks share. ``forward_stream`` is the scheduler's, once it has one (CUDA only)."""

    def __init__(
        self,
        pool: Any,
        page_size: int,
        sinks: int,
        *,
        window: int = 32,
        scale: Callable[[], float] | None = None,
        group: Any = None,
        groups: LayerGroups = NO_BUDGETS,
        geometry: QueryGeometry | None = None,
    ) -> None:
        self.page_size = page_size
        self.sinks = sinks
        self.window = window
        self.forward_stream: Any = None
        self._pool = pool
        self._ahead: dict[int, tuple[torch.Tensor, Placed | Exception]] = {}  # by id of the slots, which it keeps
        self.ranks = Ranks(group)
        self._group = group  # CPU group of the tensor-parallel ranks, None when there is one rank
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        # Not get_key_buffer: that one waits for layer transfers, which only attention may do.
        self.k_buffers = [pool._get_key_buffer(layer) for layer in layers]
        self.v_buffers = [pool._get_value_buffer(layer) for layer in layers]
        self._scale = scale
        self.groups = groups
        self._by_layers = LayerPress(self.k_buffers, self.v_buffers, groups, page_size, sinks)
        self.presses = FormPresses(window, geometry, self.k_buffers[0].device)

    @property
    def geometry(self) -> QueryGeometry | None:
        """Geometry of the model's queries on the pool's device, where the server was given one."""
        return self.presses.geometry

    @property
    def scale(self) -> float:
        """The attention's factor on q.k: asked for each time, since some models only learn it in their first pass."""
        return float(self.k_buffers[0].shape[-1]) ** -0.5 if self._scale is None else self._scale()

    @property
    def is_cuda(self) -> bool:
        return bool(self.k_buffers[0].is_cuda)

    @property
    def shape(self) -> Shape:
        return Shape.of(self.k_buffers, self.page_size)

    def payload_copier(self, codecs: Iterable[str] = ()) -> PayloadCopier:
        """The copier of the pool; ``codecs`` are those it will be asked for."""
        return PayloadCopier(self.k_buffers, self.v_buffers, self.page_size, codecs=codecs)

    def written_event(self) -> Any:
        """An event behind all that was launched until now, the forward pass in flight included; None on the CPU."""
        if not self.is_cuda:
            return None
        stream = torch.cuda.current_stream()
        if self.forward_stream is not None:
            stream.wait_stream(self.forward_stream)
        event = torch.cuda.Event()
        event.record(stream)
        return event

    def ahead_of_next_pass(self) -> AbstractContextManager[None]:
        """Order work behind all that was launched until now, and before whatever is written to the
        pool next: forward passes run in that stream, and everything else that writes waits for it. Nothing on the
        CPU."""
        if not self.is_cuda:
            return nullcontext()
        stream = self.forward_stream or torch.cuda.current_stream()
        stream.wait_stream(torch.cuda.current_stream())
        context: AbstractContextManager[None] = torch.cuda.stream(stream)
        return context

    @property
    def num_layers(self) -> int:
        return len(self.k_buffers)

    @property
    def num_heads(self) -> int:
        return int(self.k_buffers[0].shape[1])

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot over all layers, keys and values, on this rank."""
        return sum(buffer[0].nbytes for buffer in (*self.k_buffers, *self.v_buffers))

    def compress(self, form: Form, node: NodeSlots, num_kept: Kept) -> Placed:
        """Keep ``num_kept`` entries of every (layer, head), moved to the first of its slots, or, of layers that keep
        fewer than others, to some of these (``survivors.place_groups``).

        Returns the layout and the node's logical value: int64 [num_tokens], those slots at their logical indices and
        holes (0) elsewhere. Waits for nothing on the device unless ranks must agree. Starts behind the forward pass
        in flight: a finished request's last token may still be being written.

        Raises torch.OutOfMemoryError on every rank where one has no device memory left. The node's KV may be in part
        moved by then.
        """
        if id(node.slots) in self._ahead:
            return raised(self._ahead.pop(id(node.slots))[1])
        if isinstance(num_kept, tuple):
            self.wait_for_forward(node.slots)
            return self._by_layers.compress(partial(self.presses.of, form), node, num_kept, self.scale)
        return self._placed(partial(self._choose, form, node, num_kept), num_kept)

    @contextmanager
    def together(self, asked: Sequence[tuple[Form, NodeSlots, Kept]]) -> Iterator[None]:
        """Within this, ``compress`` of each of these (its arguments) gives what was made of all of them at the begin,
        when ranks agreed once for all. Each must come to that, unless it is given up. Nothing where there is one rank.
        """
        former = self._ahead  # of a plan around this one, which is still to be carried out
        if self._group is not None and len(asked) > 1:
            even = [(form, node, kept) for form, node, kept in asked if isinstance(kept, int)]
            placed = self._placed_by_all([(partial(self._choose, *each), each[2]) for each in even])
            self._ahead = {id(node.slots): (node.slots, made) for (_, node, _), made in zip(even, placed, strict=True)}
        try:
            yield
        finally:
            self._ahead = former

    def _choose(self, form: Form, node: NodeSlots, num_kept: int) -> Chosen:
        given = self._input(node)
        self.wait_for_forward(node.slots)
        return self._compacted(given, select(self.presses.of(form), given, num_kept, self.sinks))

    def copy(self, parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Bring what the first slots of ``parts`` (each [n]) hold, exact KV, into the slots ``target`` [m] as well.

        Raises torch.OutOfMemoryError on every rank where one has no device memory left.
        """

        def run() -> None:
            source = torch.cat(list(parts))[: len(target)]
            self.wait_for_forward(source)
            for buffer in (*self.k_buffers, *self.v_buffers):
                buffer[target] = buffer[source]

        self._by_all(run)

    def copy_compressed(
        self,
        *,
        form: Form,
        parts: Sequence[torch.Tensor],
        num_tokens: int,
        into: torch.Tensor,
        window: QueryWindow | None,
        num_kept: Kept | None = None,
    ) -> Placed:
        """Result of ``compress`` for an exact prefix in the slots of ``parts`` [num_tokens in all], written to the
        slots ``into`` [m] instead; ``parts`` keep what they hold. ``num_kept``: where layers keep different numbers,
        else m. Raises as ``compress`` does."""
        if isinstance(num_kept, tuple):
            whole = NodeSlots(torch.cat(list(parts)), None, 0, num_tokens, window)
            self.wait_for_forward(whole.slots)
            return self._by_layers.copy_compressed(partial(self.presses.of, form), whole, num_kept, self.scale, into)

        def choose() -> Chosen:
            slots = torch.cat(list(parts))
            node = self._input(NodeSlots(slots, None, 0, num_tokens, window))
            self.wait_for_forward(slots)
            survivors = select(self.presses.of(form), node, len(into), self.sinks)
            self.copy_survivors(slots, survivors, into)
            return node, survivors, into

        return self._placed(choose, len(into))

    def recode(self, slots: torch.Tensor, codec: str, survivors: SurvivorLayout | None) -> None:
        """Let the slots [n], or those of them that a layer fills, hold what is decoded of what they hold. Raises
        NotFiniteError for KV with NaN or Inf, and RuntimeError where another rank failed."""
        if Form(codec=codec).has_lossy_codec:
            self._by_all(partial(self._recode, slots, codec, survivors))

    def _recode(self, slots: torch.Tensor, codec: str, survivors: SurvivorLayout | None) -> None:
        flag = torch.zeros(1, dtype=torch.int32, device=slots.device)
        filling = None if survivors is None else survivors.filling
        for layer, (k_buffer, v_buffer) in enumerate(zip(self.k_buffers, self.v_buffers, strict=True)):
            own = slots if filling is None else slots[filling.index_of(filling.group_of[layer], slots.device)]
            layout = layout_of(codec, len(own), k_buffer[0].numel(), k_buffer.element_size())
            stored = torch.empty((1, layout.num_bytes), dtype=torch.uint8, device=slots.device)
            encode([k_buffer], [v_buffer], own, layout, stored, flag)
            decode([k_buffer], [v_buffer], own, layout, stored, 0)
        if bool(flag.any()):
            raise NotFiniteError("rows hold NaN or Inf")

    def kept_of_layer(
        self,
        *,
        form: Form,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        layout: SurvivorLayout | None,
        start: int,
        num_tokens: int,
        num_kept: int,
        window: QueryWindow | None,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Survivors, as by ``compress``, in one layer of a node whose ``keys``, ``values`` [n, heads, head_dim] are not
        in the pool: both [num_kept, heads, head_dim], and their positions, int32 [heads, num_kept]. On any thread."""
        every = torch.arange(len(keys), device=keys.device)
        if layout is None:
            positions = (every.to(torch.int32) + start).expand(1, self.num_heads, -1)
        else:
            positions = to_device(layout.positions_of(layer)[None], keys.device)
        if window is not None:
            window = replace(window, queries=window.queries[layer : layer + 1])
        node = PressInput(
            k_buffers=[keys],
            v_buffers=[values],
            slots=every,
            positions=positions,
            start=start,
            num_tokens=num_tokens,
            window=window,
            scale=self.scale,
        )
        scores = scored(self.presses.of(form, [layer], keys.device), node, self.sinks)
        survivors = select_by_layer(scores, [num_kept])[0].to(torch.int64)
        heads = torch.arange(self.num_heads, device=keys.device)[None, :]
        return (keys[survivors.T, heads], values[survivors.T, heads]), positions[0].gather(1, survivors)

    def layout_of(self, positions: Sequence[torch.Tensor], start: int) -> SurvivorLayout:
        """The layout of survivors of ``positions``, int32 [heads, count] for each layer; for one rank."""
        if len({each.shape[-1] for each in positions}) > 1:
            return layout_of_layers(positions, self.groups, start, self.page_size)
        stacked = torch.stack(list(positions))
        logical = place(stacked, start, self.page_size)
        return SurvivorLayout(HostCopy(stacked), HostCopy(logical), stacked.shape[-1])

    def copy_held(self, layout: SurvivorLayout, start: int, slots: torch.Tensor) -> None:
        """Bring what a layout keeps of a node, whose exact KV is in ``slots`` [tokens], into the first of them."""
        self.wait_for_forward(slots)
        for group in range(self.groups.num_groups if layout.filling is not None else 1):
            layers = list(range(self.num_layers)) if layout.filling is None else self.groups.layers_of(group)
            survivors = torch.stack([layout.positions_of(layer) for layer in layers]) - start
            into = slots[: layout.num_slots]
            if layout.filling is not None:
                into = slots[layout.filling.index_of(group, slots.device)]
            self._by_layers.copy_survivors(layers, slots, to_device(survivors, slots.device), into)

    def copy_survivors(self, slots: torch.Tensor, survivors: torch.Tensor, into: torch.Tensor) -> None:
        """Bring what survives of every (layer, head) in ``slots`` (int [L, H, m], indices into them) into the slots
        ``into`` [m]; ``slots`` keep what they hold."""
        heads = torch.arange(self.num_heads, device=slots.device)[:, None]
        for buffers in (self.k_buffers, self.v_buffers):
            for buffer, kept in zip(buffers, survivors.to(torch.int64), strict=True):
                buffer[into[None, :], heads] = buffer[slots[kept], heads]

    def trim(self, form: Form, node: NodeSlots, replaced: tuple[int, int]) -> Placed | None:
        """Rid a compressed node of entries for positions [replaced[0], replaced[1]), which an ancestor now holds
        itself.

        A node split off below another may hold, in some heads, survivors from before its start. Once the node above is
        exact again, those would be attended to twice. Every head gives up as many entries as the one with most of them:
        its overlaps, then its lowest scores. None when there are none; num_slots 0 when (whole pages of) nothing is
        left. Raises as ``compress`` does.
        """
        layout = node.layout
        if layout is None:
            return None
        if layout.filling is not None:
            self.wait_for_forward(node.slots)
            return self._by_layers.trim(partial(self.presses.sighted, form, node), node, layout, replaced, self.scale)
        overlaps = (layout.positions >= replaced[0]) & (layout.positions < replaced[1])
        most = int(self._most(overlaps.sum(-1).max()))
        if most == 0:
            return None
        num_kept = (layout.num_slots - most) // self.page_size * self.page_size

        def choose() -> Chosen:
            given = self._input(node)
            self.wait_for_forward(node.slots)
            press = self.presses.sighted(form, node)
            scores = press.score(given).nan_to_num()  # finite, so that overlaps really come last
            scores = scores.masked_fill(to_device(overlaps, node.slots.device), float("-inf"))
            return self._compacted(given, select_survivors(scores, num_kept))

        return self._placed(choose, num_kept)

    def _compacted(self, node: PressInput, survivors: torch.Tensor) -> Chosen:
        compact(self.k_buffers, self.v_buffers, node.slots, survivors)
        return node, survivors, node.slots[: survivors.shape[-1]]

    def _placed(self, choose: Callable[[], Chosen], num_kept: int) -> Placed:
        """The layout and logical value of the node of which ``choose`` keeps ``num_kept`` entries in every head."""
        if self._group is not None:
            return raised(self._placed_by_all([(choose, num_kept)])[0])
        node, survivors, kept_per_head = choose()
        kept = node.positions.gather(2, survivors.to(torch.int64))
        logical = place(kept, node.start, self.page_size)
        value = torch.zeros(node.num_tokens, dtype=torch.int64, device=node.slots.device)
        value.index_copy_(0, logical, kept_per_head)
        return SurvivorLayout(HostCopy(kept), HostCopy(logical), len(kept_per_head)), value

    def _placed_by_all(self, choices: Sequence[tuple[Callable[[], Chosen], int]]) -> list[Placed | Exception]:
        """The same for several nodes, on several ranks; for one that failed on some rank, what each is to raise.

        Each rank holds other heads, and all must split a node at the same slot: they go by the greatest position of
        every survivor on any rank. One copy to the host and one collective for all nodes, taken by every rank alike,
        also by one that fails. Once ranks have agreed none allocates on its device any more.
        """

        def prepare(choose: Callable[[], Chosen]) -> _Prepared:
            node, survivors, kept_per_head = choose()
            kept = node.positions.gather(2, survivors.to(torch.int64))
            value = torch.zeros(node.num_tokens, dtype=torch.int64, device=node.slots.device)
            rows = torch.stack([kept.amax(dim=(0, 1)).to(torch.int64), kept_per_head.to(torch.int64)])
            return _Prepared(node.start, HostCopy(kept), rows, value)

        def gather() -> list[torch.Tensor]:
            rows = [each.rows for each in tried if isinstance(each, _Prepared)]
            return list(torch.cat(rows, 1).cpu().split([each.shape[1] for each in rows], 1)) if rows else []

        tried = [tried_here(partial(prepare, choose)) for choose, _ in choices]
        gathered = tried_here(gather)
        if isinstance(gathered, Exception):
            tried, gathered = [gathered] * len(tried), []
        parts = iter(gathered)
        hosted = [
            torch.zeros(2, num_kept, dtype=torch.int64) if isinstance(each, Exception) else next(parts)
            for each, (_, num_kept) in zip(tried, choices, strict=True)
        ]
        agreed = agree(tried, [rows[0] for rows in hosted], self._group)
        placed: list[Placed | Exception] = []
        for each, (_, slots), last in zip(tried, hosted, agreed, strict=True):
            if isinstance(last, Exception):
                placed.append(last)
            elif isinstance(each, _Prepared):
                logical = place(last[None, None], each.start, self.page_size)
                each.value.copy_(torch.zeros(len(each.value), dtype=torch.int64).index_copy_(0, logical, slots))
                placed.append((SurvivorLayout(each.positions, HostCopy(logical), len(slots)), each.value))
        return placed

    def _by_all(self, run: Callable[[], Made]) -> Made:
        """Result of ``run``, if it succeeds on every rank; see ``tries.agree`` for what is raised else."""
        if self._group is None:
            return run()
        made = tried_here(run)
        (agreed,) = agree([made], [torch.empty(0, dtype=torch.int64)], self._group)
        raised(agreed)
        return raised(made)

    def _input(self, node: NodeSlots) -> PressInput:
        if node.layout is not None:
            positions = to_device(node.layout.positions, node.slots.device)
        else:
            end = node.start + len(node.slots)
            every = torch.arange(node.start, end, dtype=torch.int32, device=node.slots.device)
            positions = every.expand(self.num_layers, self.num_heads, -1)
        return PressInput(
            k_buffers=self.k_buffers,
            v_buffers=self.v_buffers,
            slots=node.slots,
            positions=positions,
            start=node.start,
            num_tokens=node.num_tokens,
            window=node.window,
            scale=self.scale,
        )

    def wait_for_forward(self, slots: torch.Tensor) -> None:
        """Whatever is launched from here on starts behind the forward pass in flight; the host waits for nothing."""
        if self.forward_stream is not None and slots.is_cuda:
            torch.cuda.current_stream().wait_stream(self.forward_stream)

    @property
    def is_alone(self) -> bool:
        """True if no other rank must do as this one does."""
        return self._group is None

    @property
    def is_first_rank(self) -> bool:
        """True if the others do as this one says."""
        return self._group is None or dist.get_rank(self._group) == 0

    def as_first_rank(self, value: bytes) -> bytes:
        """Value of rank 0; ``value`` itself when there is one rank. Every rank must take part."""
        return agreed(value, self._group)

    def _most(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise maximum over all ranks; ``values`` itself when there is one."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def summed(self, values: torch.Tensor) -> torch.Tensor:
        """The elementwise sum over all ranks; ``values`` itself when there is one. Every rank must take part."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def _reduced(self, values: torch.Tensor, op: Any) -> torch.Tensor:
        if self._group is None:
            return values
        agreed = values.cpu()
        dist.all_reduce(agreed, op=op, group=self._group)
        return agreed.to(values.device)
