"""Compresses one node inside SGLang's KV pool: score, select, compact, and place the survivors."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

from sglang_evicpress.core import Form
from sglang_evicpress.error_text import code_path
from sglang_evicpress.kernels.compact import compact
from sglang_evicpress.kernels.select import select_survivors
from sglang_evicpress.layout import HostCopy, SurvivorLayout, place, to_device
from sglang_evicpress.patches.model_identity import agreed
from sglang_evicpress.press import Press, PressInput, QueryWindow, get_press, select
from sglang_evicpress.press.snapkv import SnapKV
from sglang_evicpress.tiers.payload import PayloadCopier

logger = logging.getLogger(__name__)

Chosen: TypeAlias = tuple[PressInput, torch.Tensor, torch.Tensor]
"""A node, the survivors chosen of it, int32 [layers, heads, m], and the slots that hold them now [m]."""

Made = TypeVar("Made")

_FINE, _NO_MEMORY, _FAILED = range(3)  # how it went on a rank; the worst counts


class Compressor:
    """Holds the pool and what ranks share. ``forward_stream`` is the scheduler's, once it has one (CUDA only)."""

    def __init__(
        self, pool: Any, page_size: int, sinks: int, *, window: int = 32, scale: float | None = None, group: Any = None
    ) -> None:
        self.page_size = page_size
        self.sinks = sinks
        self.window = window
        self.forward_stream: Any = None
        self._pool = pool
        self._group = group  # CPU group of the tensor-parallel ranks, None when there is one rank
        layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
        # Not get_key_buffer: that one waits for layer transfers, which only attention may do.
        self.k_buffers = [pool._get_key_buffer(layer) for layer in layers]
        self.v_buffers = [pool._get_value_buffer(layer) for layer in layers]
        self.scale = float(self.k_buffers[0].shape[-1]) ** -0.5 if scale is None else scale

    @property
    def is_cuda(self) -> bool:
        return bool(self.k_buffers[0].is_cuda)

    def payload_copier(self) -> PayloadCopier:
        return PayloadCopier(self.k_buffers, self.v_buffers, self.page_size)

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

    @property
    def num_layers(self) -> int:
        return len(self.k_buffers)

    @property
    def num_heads(self) -> int:
        return int(self.k_buffers[0].shape[1])

    @property
    def slot_bytes(self) -> int:
        """What one slot takes over all layers, keys and values, on this rank."""
        return sum(buffer[0].nbytes for buffer in (*self.k_buffers, *self.v_buffers))

    def compress(
        self,
        *,
        form: Form,
        slots: torch.Tensor,
        layout: SurvivorLayout | None,
        start: int,
        num_tokens: int,
        num_kept: int,
        window: QueryWindow | None,
    ) -> tuple[SurvivorLayout, torch.Tensor]:
        """Keep ``num_kept`` entries of every (layer, head), moved to the first ``num_kept`` of ``slots`` [n].

        Returns the layout and the node's logical value: int64 [num_tokens], those slots at their logical indices and
        holes (0) elsewhere. Waits for nothing on the device unless ranks must agree. Starts behind the forward pass
        in flight: a finished request's last token may still be being written.

        Raises torch.OutOfMemoryError on every rank where one has no device memory left. The node's KV may be in part
        moved by then.
        """

        def choose() -> Chosen:
            node = self._input(slots, layout, start, num_tokens, window)
            self.wait_for_forward(slots)
            return self._compacted(node, select(self._press(form), node, num_kept, self.sinks))

        return self._placed(choose, num_kept)

    def copy(self, parts: Sequence[torch.Tensor], target: torch.Tensor) -> None:
        """Bring what the first slots of ``parts`` (each [n]) hold, exact KV, into the slots ``target`` [m] as well.

        Raises torch.OutOfMemoryError on every rank where one has no device memory left.
        """

        def run() -> None:
            source = torch.cat(list(parts))[: len(target)]
            self.wait_for_forward(source)
            for buffer in (*self.k_buffers, *self.v_buffers):
                buffer[target] = buffer[source]

        self._by_all(run, torch.empty(0, dtype=torch.int64))

    def copy_compressed(
        self,
        *,
        form: Form,
        parts: Sequence[torch.Tensor],
        num_tokens: int,
        into: torch.Tensor,
        window: QueryWindow | None,
    ) -> tuple[SurvivorLayout, torch.Tensor]:
        """What ``compress`` makes of an exact prefix in the slots of ``parts`` [num_tokens in all], written to the
        slots ``into`` [m] instead; ``parts`` keep what they hold. Raises as ``compress`` does."""

        def choose() -> Chosen:
            slots = torch.cat(list(parts))
            node = self._input(slots, None, 0, num_tokens, window)
            self.wait_for_forward(slots)
            survivors = select(self._press(form), node, len(into), self.sinks)
            self.copy_survivors(slots, survivors, into)
            return node, survivors, into

        return self._placed(choose, len(into))

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
        """What ``compress`` keeps of one layer of a node whose KV ``keys`` and ``values`` [n, heads, head_dim] are not
        in the pool: both [num_kept, heads, head_dim], and their positions, int32 [heads, num_kept]. On any thread."""
        every = torch.arange(len(keys), device=keys.device)
        if layout is None:
            positions = (every.to(torch.int32) + start).expand(1, self.num_heads, -1)
        else:
            positions = to_device(layout.positions[layer : layer + 1], keys.device)
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
            page_size=self.page_size,
        )
        survivors = select(self._press(form), node, num_kept, self.sinks)[0].to(torch.int64)
        heads = torch.arange(self.num_heads, device=keys.device)[None, :]
        return (keys[survivors.T, heads], values[survivors.T, heads]), positions[0].gather(1, survivors)

    def layout_of(self, positions: torch.Tensor, start: int) -> SurvivorLayout:
        """The layout of survivors of ``positions``, int32 [layers, heads, m]; for one rank."""
        logical = place(positions, start, self.page_size)
        return SurvivorLayout(HostCopy(positions), HostCopy(logical), positions.shape[-1])

    def copy_survivors(self, slots: torch.Tensor, survivors: torch.Tensor, into: torch.Tensor) -> None:
        """Bring what survives of every (layer, head) in ``slots`` (int [L, H, m], indices into them) into the slots
        ``into`` [m]; ``slots`` keep what they hold."""
        heads = torch.arange(self.num_heads, device=slots.device)[:, None]
        for buffers in (self.k_buffers, self.v_buffers):
            for buffer, kept in zip(buffers, survivors.to(torch.int64), strict=True):
                buffer[into[None, :], heads] = buffer[slots[kept], heads]

    def trim(
        self,
        *,
        form: Form,
        slots: torch.Tensor,
        layout: SurvivorLayout,
        start: int,
        num_tokens: int,
        replaced: tuple[int, int],
        window: QueryWindow | None,
    ) -> tuple[SurvivorLayout, torch.Tensor] | None:
        """Rid a compressed node of entries for positions [replaced[0], replaced[1]), which an ancestor now holds
        itself.

        A node split off below another may hold, in some heads, survivors from before its start. Once the node above is
        exact again, those would be attended to twice. Every head gives up as many entries as the one with most of them:
        its strays, then its lowest scores. None when there are none; num_slots 0 when (whole pages of) nothing is left.
        Raises as ``compress`` does.
        """
        strays = (layout.positions >= replaced[0]) & (layout.positions < replaced[1])
        most = int(self._most(strays.sum(-1).max()))
        if most == 0:
            return None
        num_kept = (layout.num_slots - most) // self.page_size * self.page_size

        def choose() -> Chosen:
            node = self._input(slots, layout, start, num_tokens, window)
            self.wait_for_forward(slots)
            press = self._press(form)
            if press.needs_queries and window is None:
                press = get_press("keydiff")  # its queries had to make room; every press gives an order
            scores = press.score(node).nan_to_num()  # finite, so that strays really come last
            scores = scores.masked_fill(to_device(strays, slots.device), float("-inf"))
            return self._compacted(node, select_survivors(scores, num_kept))

        return self._placed(choose, num_kept)

    def _press(self, form: Form) -> Press:
        press = get_press(form.press or "")
        return replace(press, window=self.window) if isinstance(press, SnapKV) else press

    def _compacted(self, node: PressInput, survivors: torch.Tensor) -> Chosen:
        compact(self.k_buffers, self.v_buffers, node.slots, survivors)
        return node, survivors, node.slots[: survivors.shape[-1]]

    def _placed(self, choose: Callable[[], Chosen], num_kept: int) -> tuple[SurvivorLayout, torch.Tensor]:
        """The layout and logical value of the node of which ``choose`` keeps ``num_kept`` entries in every head.

        Each rank holds other heads, and all must split a node at the same slot: they go by the greatest position of
        every survivor on any rank. One collective per compression, taken by every rank alike, also by one whose
        ``choose`` fails. Once ranks have agreed none allocates on its device any more.
        """
        if self._group is None:
            node, survivors, held = choose()
            kept = node.positions.gather(2, survivors.to(torch.int64))
            logical = place(kept, node.start, self.page_size)
            value = torch.zeros(node.num_tokens, dtype=torch.int64, device=node.slots.device)
            value.index_copy_(0, logical, held)
            return SurvivorLayout(HostCopy(kept), HostCopy(logical), len(held)), value
        last = torch.zeros(num_kept, dtype=torch.int64)

        def prepare() -> tuple[PressInput, HostCopy, torch.Tensor, torch.Tensor]:
            node, survivors, held = choose()
            kept = node.positions.gather(2, survivors.to(torch.int64))
            value = torch.zeros(node.num_tokens, dtype=torch.int64, device=node.slots.device)
            positions, slots = HostCopy(kept), held.cpu()
            last.copy_(kept.amax(dim=(0, 1)))
            return node, positions, slots, value

        node, positions, held, value = self._by_all(prepare, last)
        logical = place(last[None, None], node.start, self.page_size)
        value.copy_(torch.zeros(node.num_tokens, dtype=torch.int64).index_copy_(0, logical, held))
        return SurvivorLayout(positions, HostCopy(logical), num_kept), value

    def _by_all(self, run: Callable[[], Made], values: torch.Tensor) -> Made:
        """What ``run`` gives, if it does on every rank; ``values`` (on the host) are then their maximum over ranks.

        One collective, whatever happens. Where one rank has no device memory left, each raises
        torch.OutOfMemoryError; after any other exception each raises, and none goes on as if nothing were.
        """
        if self._group is None:
            return run()
        made: list[Made] = []
        error: Exception | None = None
        outcome = _FINE
        try:
            made.append(run())
        except torch.OutOfMemoryError as found:
            error, outcome = found, _NO_MEMORY
        except Exception as found:  # noqa: BLE001 - raised on every rank
            logger.error("evicpress: this rank failed at what all must do: %s", code_path(found))
            error, outcome = found, _FAILED
        told = torch.cat([values, torch.tensor([outcome])])
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=self._group)
        worst = int(told[-1])
        if worst == _NO_MEMORY:
            raise error or torch.OutOfMemoryError("another rank has no device memory for it")
        if worst == _FAILED:
            raise RuntimeError("evicpress: a rank failed at what all must do: see its log") from error
        values.copy_(told[:-1])
        return made[0]

    def _input(
        self,
        slots: torch.Tensor,
        layout: SurvivorLayout | None,
        start: int,
        num_tokens: int,
        window: QueryWindow | None,
    ) -> PressInput:
        return PressInput(
            k_buffers=self.k_buffers,
            v_buffers=self.v_buffers,
            slots=slots,
            positions=self._positions(slots, layout, start),
            start=start,
            num_tokens=num_tokens,
            window=window,
            scale=self.scale,
            page_size=self.page_size,
        )

    def wait_for_forward(self, slots: torch.Tensor) -> None:
        """Whatever is launched from here on starts behind the forward pass in flight; the host waits for nothing."""
        if self.forward_stream is not None and slots.is_cuda:
            torch.cuda.current_stream().wait_stream(self.forward_stream)

    def _positions(self, slots: torch.Tensor, layout: SurvivorLayout | None, start: int) -> torch.Tensor:
        if layout is not None:
            return to_device(layout.positions, slots.device)
        every = torch.arange(start, start + len(slots), dtype=torch.int32, device=slots.device)
        return every.expand(self.num_layers, self.num_heads, -1)

    @property
    def is_alone(self) -> bool:
        """Whether no other rank must do as this one does."""
        return self._group is None

    @property
    def is_first_rank(self) -> bool:
        """Whether the others do as this one says."""
        return self._group is None or dist.get_rank(self._group) == 0

    def as_first_rank(self, value: bytes) -> bytes:
        """What rank 0 has here; ``value`` itself when there is one rank. Every rank must take part."""
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
