"""Walks of the contract tests: how they are opened, and what is seen to when a test ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.contract.tiers.test_tiers_model import TierWalk


@pytest.fixture(autouse=True)
def sound() -> Iterator[None]:
    """Every walk that a test leaves open holds what it must hold, and is closed."""
    from tests.contract.cache.test_radix_cache_model import Walk

    Walk.made.clear()
    yield
    try:
        for walk in Walk.made:
            if walk.is_sound and not walk.is_closed:
                walk.check()
                walk.check_rows()
    finally:
        for walk in Walk.made:
            walk.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., TierWalk]]:
    """Makes walks; ``has_ssd``: in the test's folder, one at a time."""
    import torch
    from tests.contract.tiers.test_tiers_model import TierWalk

    from sglang_evicpress.patches.tiers import admin

    monkeypatch.setattr(admin, "MOVE_WAIT_S", 0.02)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the rows are few
    yield lambda seed=0, page_size=1, *, has_ssd=True, **options: TierWalk(
        seed, page_size, tmp_path if has_ssd else None, **options
    )
    torch.set_num_threads(num_threads)


@pytest.fixture
def walk(opened: Callable[..., TierWalk]) -> TierWalk:
    return opened()
