"""Two ranks of one server as processes over gloo, each with its own heads, threads, faults and disk: random walks in
which they must decide alike at every step, and every row must be right on both."""

from __future__ import annotations

import multiprocessing
import os
import random
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tests.contract.tiers import test_tiers_model
from tests.contract.tiers.test_tiers_model import TierWalk

from sglang_evicpress.core import Tier
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.tiers import admin
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.patches.tiers.storage import FAULTS_FLAG
from sglang_evicpress.patches.tree.node import slots_of

pytestmark = pytest.mark.sglang

FAULTS = (
    "delay=0.05:0.003,eio=0.03,short=0.05,flip=0.1",
    "delay=0.2:0.01,eio=0.05,enospc=0.05,lost=0.03,flip=0.03",
)
"""Of each rank."""

NUM_STEPS, NUM_QUESTIONS = int(os.environ.get("STEPS", "150")), 4


class RankWalk(TierWalk):
    """A walk that all ranks make. ``luck`` is of this rank: what it damages, the others do not."""

    def __init__(self, seed: int, rank: int, page_size: int, folder: Path) -> None:
        self.luck = random.Random(1000 * seed + rank)
        self.num_compared = 0
        super().__init__(seed, page_size, folder)
        self.cost = None

    def tick(self) -> None:
        self.tree.storage.meet()  # as with what rank 0 receives in each round
        super().tick()

    def start(self) -> None:
        if not self.waiting or len(self.running) >= test_tiers_model.ROWS - 2:
            return
        request = self.rng.choice(self.waiting)
        if self.tiers.prefetcher.is_prefetching(request) and self.rng.random() < 0.3:
            return
        begin_s = self.tree.storage.now_s()
        self.until(lambda: self._is_ready(request) or self.tree.storage.now_s() > begin_s + 5.0)
        if self._is_ready(request):
            self.admit(request, self.rng.choice([1.0, 1.0, self.rng.random()]))

    def damage(self, entry: object) -> None:
        is_mine, at = self.luck.random() < 0.5, self.rng.randrange(entry.header.payload_bytes)
        entry.checked_s = 0.0
        if is_mine:
            (chunk,) = self.cache.host.arena.buffers(entry.runs, at, 1)
            chunk[0] ^= 1

    def step(self, steps: int) -> None:
        moves = self.moves()
        for _ in range(steps):
            self.last = self.rng.choices(list(moves), list(moves.values()))[0]
            self.last()
            self.check()

    def spoil_ssd(self) -> None:
        own = self.tree.ranks.rank
        files = sorted((self.folder / f"rank-{own}").glob("segment-*"))
        if files and self.luck.random() < 0.5:
            path = self.luck.choice(files)
            path.write_bytes(bytes(path.stat().st_size))

    def change_ssd(self) -> None:
        """Refused."""

    def state(self) -> object:
        """Everything that must not differ between ranks."""
        cache, storage = self.cache, self.tree.storage
        nodes = [
            (
                (node.id, str(node.kv.form), int(tier_of(node)), node.lock_ref, node.kv.num_hits, node.kv.version),
                [(int(tier), str(copy.form), copy.num_slots, copy.begin) for tier, copy in node.kv.copies.items()],
                None if node.kv.layout is None else node.kv.layout.logical.tolist(),
                slots_of(node).tolist(),
            )
            for node in cache.nodes.values()
        ]
        journal = cache.parts.controller.journal
        last = journal.read(max(0, journal.next_number - 20), 20)
        counts = storage.num_pending_jobs, cache.host.arena.extents.used_bytes, cache.ssd.used_bytes, last
        counted = {what: number for what, number in storage.counts.items() if what != "late_layers"}  # each has its own
        is_dirty = self.tree.background_clock.is_dirty
        return nodes, RELEASE.free_pages(self.allocator).tolist(), cache.evictable_size_, counts, counted, is_dirty

    def check(self) -> None:
        states = self.tree.ranks.gathered(self.state())
        self.num_compared += 1
        for left, right in zip(*states, strict=True):
            assert left == right, f"after {self.num_compared} steps {self.last}"
        super().check()

    def check_nothing_leaks(self) -> None:
        super().check_nothing_leaks()
        assert self.cache.ssd._writing_bytes == 0


def walked(rank: int, folder: str, seed: int, page_size: int) -> None:
    os.environ[FAULTS_FLAG] = f"seed={seed},{FAULTS[rank]}"
    walk = RankWalk(seed, rank, page_size, Path(folder))
    walk.run(NUM_STEPS)
    counts = walk.tree.storage.counts
    print(dict(counts), dict(walk.tree.storage.errors), dict(walk.cache.host.faults.counts), flush=True)
    assert sum(walk.tree.ranks.gathered(walk.cache.host.faults.counts.total())) > 0
    num_failed = sum(count for error, count in walk.tree.storage.errors.items() if error.startswith("ssd_write_"))
    assert counts["released"] > 0 and counts["written"] + num_failed > 0
    assert walk.num_compared > NUM_STEPS
    walk.close()


def found_again(rank: int, folder: str, seed: int, page_size: int) -> None:
    """What a server kept on its disks is found by the next one, where both have it still."""
    os.environ.pop(FAULTS_FLAG, None)
    first = RankWalk(seed, rank, page_size, Path(folder))
    asked = [[first.rng.randrange(50) for _ in range(64)] for _ in range(NUM_QUESTIONS)]
    for tokens in asked:
        first.serve(tokens)
    first.press()
    for node in first.cache.nodes.values():
        first.copy_to(node, Tier.SSD)
    first.close()
    assert first.is_closed
    if rank == 1:
        path = next(path for path in (Path(folder) / "rank-1").glob("segment-*") if path.suffix != ".head")
        with path.open("r+b") as file:
            file.write(bytes(4096))  # of the first entry there
    second = RankWalk(seed, rank, page_size, Path(folder))
    for tokens in asked:
        second.serve([*tokens, 59])
        second.check()
    second.check_rows()
    counts, errors = second.tree.storage.counts, second.tree.storage.errors
    assert counts["found_again"] == NUM_QUESTIONS and counts["read"] >= NUM_QUESTIONS - 2, counts
    assert errors == {"ssd_checksum": 1}, errors  # on both, of what one has lost
    second.close()


def run_rank(rank: int, folder: str, task: Callable[..., None], arguments: tuple[int, ...]) -> None:
    torch.set_num_threads(1)
    admin.MOVE_WAIT_S = 0.02
    test_tiers_model._PLACE = test_tiers_model._PLACE + 8 * rank  # other heads
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    TierWalk.group = dist.group.WORLD
    is_done = False
    try:
        task(rank, folder, *arguments)
        dist.barrier()
        is_done = True
    finally:  # gloo's threads abort a process that ends orderly while the other rank closes its sockets
        if not is_done:
            traceback.print_exc()
        os._exit(0 if is_done else 1)


def run_ranks(folder: Path, task: Callable[..., None], *arguments: int, seconds: float = 300.0) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, str(folder), task, arguments)) for rank in range(2)]
    for process in ranks:
        process.start()
    deadline_s = time.monotonic() + seconds
    try:
        while any(process.exitcode is None for process in ranks):
            assert time.monotonic() < deadline_s, "a rank hangs"
            assert not any(process.exitcode for process in ranks), "a rank failed"
            time.sleep(0.05)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()


SOAK = pytest.mark.soak  # `make show-trust` makes all of them


@pytest.mark.parametrize(
    ("seed", "page_size"), [(1, 4), *(pytest.param(*walk, marks=SOAK) for walk in ((0, 1), (2, 1), (3, 4)))]
)
def test_ranks_with_faults_of_their_own_decide_alike_and_keep_every_row(
    tmp_path: Path, seed: int, page_size: int
) -> None:
    run_ranks(tmp_path, walked, seed, page_size)


@SOAK
def test_what_all_ranks_have_kept_is_found_again(tmp_path: Path) -> None:
    run_ranks(tmp_path, found_again, 0, 1)
