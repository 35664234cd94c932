"""Walks on a host tier whose memory comes in steps, and does not always come."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.contract.tiers.test_host_compression import HostWalk

from sglang_evicpress.patches.tiers import storage
from sglang_evicpress.tiers.host import arena as module
from sglang_evicpress.tiers.host.memory import Memory

STEP, SIZE = 64 << 10, 192 << 10
PLENTY = Memory(10**12, 10**12)


@pytest.mark.parametrize("has_ssd", [False, True])
def test_random_walk_on_a_tier_that_grows_cannot_and_can_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_ssd: bool
) -> None:
    memory = [PLENTY]
    monkeypatch.setattr(module, "read_memory", lambda: memory[0])
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    monkeypatch.setattr(storage, "STEP_BYTES", STEP)
    walk = HostWalk(5, 1, tmp_path if has_ssd else None, host_bytes=SIZE)
    walk.cost = None
    try:
        host = walk.cache.host
        memory[0] = Memory(10**12, 0)
        walk.run(50)
        host.arena.join_growth()
        assert host.arena.num_failed > 0 and host.num_bytes == host.arena.extents.num_bytes == STEP
        assert walk.tree.storage.counts["backed_up"] > 0
        memory[0] = PLENTY
        walk.run(120)
        host.arena.join_growth()
        assert host.num_bytes == SIZE and host.arena.extents.num_bytes > STEP
    finally:
        walk.close()
