"""The size of the host tier, chosen where the pool is known."""

from __future__ import annotations

import pytest
import torch

from sglang_evicpress.config import GB, EvicPressConfig
from sglang_evicpress.patches.cache import factory
from sglang_evicpress.patches.tree.ranks import Ranks
from sglang_evicpress.tiers.host.memory import Memory

pytestmark = pytest.mark.sglang


def chosen(monkeypatch: pytest.MonkeyPatch, free_gb: float, **settings: object) -> EvicPressConfig:
    monkeypatch.setattr(factory, "read_memory", lambda: Memory(32 * GB, round(free_gb * GB)))
    return factory.with_host_size(EvicPressConfig("evicpress", **settings), GB)  # type: ignore[arg-type]


def test_auto_is_a_size_from_here_on_and_one_line_says_which(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger=factory.logger.name):
        assert chosen(monkeypatch, 20).host_bytes == 4 * GB
        assert not chosen(monkeypatch, 3).has_tiers
        assert chosen(monkeypatch, 3, host_gb=2.0).host_bytes == 2 * GB
    lines = [record.message for record in caplog.records]
    assert ["auto is 4.000" in line or "auto is 0.000" in line for line in lines] == [True, True]


def test_ranks_take_equal_shares_of_what_the_one_with_least_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Others(Ranks):
        def lowest(self, values: torch.Tensor) -> torch.Tensor:
            return values.clamp(max=GB)

    monkeypatch.setattr(factory, "read_memory", lambda: Memory(32 * GB, 20 * GB))
    config = EvicPressConfig("evicpress")
    assert factory.with_host_size(config, GB, Ranks(None), 4).host_bytes == 2 * GB
    assert factory.with_host_size(config, GB, Others(None), 4).host_bytes == GB


def test_an_ssd_without_memory_to_go_through_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, 5, ssd_dir="/kv", ssd_gb=1.0).host_bytes == GB // 2
    with pytest.raises(ValueError, match=r"host_gb is auto with ssd_dir '/kv', and only 3.0 GB are free, of which 4.0"):
        chosen(monkeypatch, 3, ssd_dir="/kv", ssd_gb=1.0)
