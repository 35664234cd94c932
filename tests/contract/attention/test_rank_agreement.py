"""Tensor-parallel ranks hold other heads and so other survivors, yet must split a node at the same slot."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from sglang_evicpress.core import Form
from sglang_evicpress.patches.tree import compressor as module
from sglang_evicpress.patches.tree.compressor import Compressor
from sglang_evicpress.patches.tree.node_kv import NodeSlots

NUM_TOKENS, NUM_KEPT = 96, 48


def make_compressor(rank: int, group: object) -> Compressor:
    buffers = torch.randn(2, 2, 128, 2, 8, generator=torch.Generator().manual_seed(rank))
    pool = SimpleNamespace(
        start_layer=0,
        layer_num=2,
        _get_key_buffer=lambda layer: buffers[0, layer],
        _get_value_buffer=lambda layer: buffers[1, layer],
    )
    return Compressor(pool, 1, 4, group=group)


def compress(rank: int, group: object) -> tuple[torch.Tensor, torch.Tensor]:
    compressor = make_compressor(rank, group)
    slots = torch.arange(1, NUM_TOKENS + 1)
    node = NodeSlots(slots, None, 0, NUM_TOKENS, None)
    layout, value = compressor.compress(Form("knorm", 0.5), node, NUM_KEPT)
    assert int((value != 0).sum()) == NUM_KEPT
    # ranks may have other overlaps: all give up as many entries as the one with most
    left = NodeSlots(slots[:NUM_KEPT], layout, 0, NUM_TOKENS, None)
    trimmed = compressor.trim(Form("knorm", 0.5), left, (10, 20 + rank))
    return layout.logical, trimmed[0].logical


def asked_of(index: int) -> tuple[Form, NodeSlots, int]:
    """The compression of one of two nodes of a plan, each in 60 slots of its own."""
    slots = torch.arange(1 + 60 * index, 61 + 60 * index)
    return Form("knorm", 0.5), NodeSlots(slots, None, 0, 60, None), 30


def compress_a_plan(rank: int, group: object) -> None:
    """Two nodes at once come to what they would one after the other, with one collective instead of two; where one
    rank has no memory for the first, only that fails, on both."""
    all_reduce, num_reduced = dist.all_reduce, []

    def counted(*given: object, **more: object) -> None:
        num_reduced.append(1)
        all_reduce(*given, **more)

    module.dist.all_reduce = counted
    alone, together = make_compressor(rank, group), make_compressor(rank, group)
    asked = [asked_of(index) for index in range(2)]
    apart = [alone.compress(*each) for each in asked]
    assert len(num_reduced) == 2
    with together.together(asked):
        assert len(num_reduced) == 3
        with together.together([]):
            pass  # a plan that makes room below while this one is carried out
        found = [together.compress(*each) for each in reversed(asked)][::-1]
    assert len(num_reduced) == 3
    for (layout, value), (mine, shown) in zip(apart, found, strict=True):
        assert torch.equal(layout.logical, mine.logical) and torch.equal(layout.positions, mine.positions)
        assert torch.equal(value, shown)
    for left, right in zip(alone.k_buffers, together.k_buffers, strict=True):
        assert torch.equal(left, right)
    select = module.select

    def fail_once(*given: object) -> object:
        module.select = select
        raise torch.OutOfMemoryError("none left")

    if rank == 1:
        module.select = fail_once
    failing = make_compressor(rank, group)
    with failing.together(asked):
        try:
            failing.compress(*asked[0])
            raise AssertionError("it was compressed")
        except torch.OutOfMemoryError:
            assert torch.equal(failing.compress(*asked[1])[0].logical, apart[1][0].logical)
    module.dist.all_reduce = all_reduce


def compress_without_memory(rank: int, group: object) -> list[str]:
    """Outcome of three compressions where rank 1 has no memory left: before ranks agree, for what they
    agree on, and, the third time, not at all."""
    select, host_copy = module.select, module.HostCopy
    outcomes = []

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("none left")

    for name in ("select", "HostCopy", None):
        if rank == 1 and name is not None:
            setattr(module, name, fail)
        try:
            compress(rank, group)
            outcomes.append("compressed")
        except torch.OutOfMemoryError:
            outcomes.append("no memory")
        module.select, module.HostCopy = select, host_copy
    return outcomes


def run_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    logical, trimmed = compress(rank, dist.group.WORLD)
    torch.save((logical, trimmed), f"{folder}/{rank}.pt")
    outcomes = compress_without_memory(rank, dist.group.WORLD)
    assert outcomes == ["no memory", "no memory", "compressed"], outcomes
    compress_a_plan(rank, dist.group.WORLD)
    told = make_compressor(rank, dist.group.WORLD).as_first_rank(f"rank {rank}".encode())
    assert told == b"rank 0", told
    dist.barrier()
    os._exit(0)  # gloo's threads abort a process that ends orderly while the other rank closes its sockets


def test_ranks_place_survivors_alike_and_give_up_together(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, str(tmp_path))) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
        assert process.exitcode == 0
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)


def test_alone_they_would_not() -> None:
    assert not torch.equal(compress(0, None)[0], compress(1, None)[0])
