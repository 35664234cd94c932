"""Attaching SSD folders at run time, disks and loads that hang, entries under another key: on a real cache."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.tiers.test_tiers_model import SLOTS, Opened, TierWalk, blocked, cached, nodes_of, sent

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.flag_groups import StoreFlags
from sglang_evicpress.introspect.operations import answer
from sglang_evicpress.patches.tiers import loads
from sglang_evicpress.patches.tiers.placement import tier_of
from sglang_evicpress.survivors import survivor_bytes
from sglang_evicpress.tiers.entry.header import SHORTAGE, BadEntry
from sglang_evicpress.tiers.faults import Faults
from sglang_evicpress.tiers.ssd import health, tier
from sglang_evicpress.tiers.ssd.store import SsdStore

pytestmark = pytest.mark.sglang

SIZE_GB = 0.0005


def attach(walk: TierWalk, folder: Path, gb: float = SIZE_GB) -> tuple[int, str]:
    """The status of POST /evicpress/tiers/ssd, and its reason."""
    status, body = answer(walk.cache.inspector, "attach_ssd", {"dir": str(folder), "gb": gb})
    error = body.get("error")
    return status, error["reason"] if isinstance(error, dict) else ""


def allow(walk: TierWalk, ssd_dir: Path | None, *folders: Path) -> None:
    walk.cache.parts.ssd_attachment.config = replace(
        walk.cache.config,
        host_gb=1.0,
        ssd_dir=None if ssd_dir is None else str(ssd_dir),
        ssd_gb=None if ssd_dir is None else 1.0,
        ssd_allow_dirs=tuple(map(str, folders)),
    )


def test_without_a_flag_no_folder_can_be_attached(opened: Opened, tmp_path: Path) -> None:
    walk = opened(has_ssd=False)
    status, reason = attach(walk, tmp_path / "kv")
    assert status == 403 and "--kv-ssd-dir or --kv-ssd-allow-dir" in reason and str(tmp_path / "kv") in reason
    assert walk.cache.ssd is None and not (tmp_path / "kv").exists()


def test_a_folder_is_attached_only_where_the_command_line_allows_it(opened: Opened, tmp_path: Path) -> None:
    walk = opened(has_ssd=False)
    mine, allowed, outside = (tmp_path / name for name in ("mine", "allowed", "outside"))
    for folder in (mine, allowed, outside):
        folder.mkdir(mode=0o700)
    (allowed / "out").symlink_to(outside)
    allow(walk, mine / "kv", allowed)
    for refused in (
        outside,
        outside / "kv",
        tmp_path,
        tmp_path / "allowed-too",  # by names, not by letters
        allowed / ".." / "outside" / "kv",
        allowed / "out" / "kv",
        Path("/"),
        Path("/etc"),
    ):
        status, reason = attach(walk, refused)
        assert status == 403 and str(mine) in reason and str(allowed) in reason, refused
    assert not list(outside.iterdir()) and not (tmp_path / "allowed-too").exists()
    for accepted in (mine / "other", allowed, allowed / "a" / "b"):
        assert attach(walk, accepted) == (200, "")
        assert (accepted / "rank-0").stat().st_mode & 0o777 == 0o700
        walk.cache.parts.admin.detach_ssd()


def test_beside_a_folder_at_the_root_nothing_is_allowed(opened: Opened) -> None:
    walk = opened(has_ssd=False)
    allow(walk, Path("/evicpress-kv"))
    assert attach(walk, Path("/etc"))[0] == 403


def test_more_than_the_file_system_has_cannot_be_attached(opened: Opened, tmp_path: Path) -> None:
    walk = opened(has_ssd=False)
    allow(walk, None, tmp_path)
    status, reason = attach(walk, tmp_path / "kv", 1e9)
    assert status == 409 and "its file system has" in reason


def test_a_folder_that_does_not_answer_is_refused_and_serving_goes_on(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "ANSWER_S", 0.05)
    walk = opened(has_ssd=False)
    allow(walk, None, tmp_path)
    walk.cache.host.faults = Faults()
    may_go_on = walk.cache.host.faults.hang("names")
    status, reason = attach(walk, tmp_path / "kv")
    assert status == 409 and reason == f"SSD folder {tmp_path / 'kv'} did not answer within 0.05 s"
    assert walk.cache.ssd is None
    cached(walk, 50)
    may_go_on.set()
    monkeypatch.setattr(tier, "ANSWER_S", 30.0)
    walk.until(lambda: attach(walk, tmp_path / "kv")[0] == 200)  # once the late one has let go of it


def test_a_detach_from_a_disk_that_hangs_ends(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "ANSWER_S", 0.05)
    monkeypatch.setenv("SGLANG_EVICPRESS_FAULTS", "seed=1")
    walk = opened()
    tokens, node = cached(walk, 100, Tier.SSD)
    may_go_on = walk.cache.host.faults.hang("fdatasync")
    described = walk.cache.parts.admin.detach_ssd()
    assert "ssd" not in described["tiers"] and described["errors"]["ssd_close_deadline"] == 1
    walk.serve(tokens)
    walk.check()
    may_go_on.set()


def test_a_hung_disk_is_a_miss_for_requests_and_a_hit_again_later(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "ANSWER_S", 0.05)
    monkeypatch.setattr(health, "FRESH_S", 0.0)
    monkeypatch.setenv("SGLANG_EVICPRESS_FAULTS", "seed=1")
    walk = opened()
    tokens, node = cached(walk, 100, Tier.SSD)
    may_go_on = walk.cache.host.faults.hang("free_bytes")
    assert walk.cache.ssd.store.reserve(1) is None
    assert walk.serve([*tokens, 59]) == 0
    assert walk.tree.storage.counts["reads_of_a_hung_ssd"] > 0
    assert walk.cache.parts.admin.describe_tiers()["errors"]["ssd_store_deadline"] > 0
    walk.check_rows()
    may_go_on.set()
    walk.until(lambda: walk.cache.ssd.store.is_answering)
    walk.settle()


def test_an_entry_stays_where_files_or_memory_were_short(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = opened()
    tokens, node = cached(walk, 100, Tier.SSD)
    read, failed = SsdStore.read, list[object]()

    def short(*asked: object) -> None:
        if not failed:
            failed.append(asked)
            raise BadEntry(SHORTAGE, "too many open files")
        read(*asked)

    monkeypatch.setattr(SsdStore, "read", short)
    assert walk.serve([*tokens, 59]) == 100
    assert failed and walk.tree.storage.errors["ssd_shortage"] == 1
    walk.check_rows()


def test_nobody_waits_for_a_disk_that_is_known_to_hang(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for what it was reading then, nor for another entry."""
    monkeypatch.setattr(health, "ANSWER_S", 0.05)
    monkeypatch.setattr(health, "FRESH_S", 0.0)
    monkeypatch.setenv("SGLANG_EVICPRESS_FAULTS", "seed=1")
    walk = opened()
    (tokens, _), (others, _) = cached(walk, 100, Tier.SSD), cached(walk, 80, Tier.SSD)
    may_go_on = [walk.cache.host.faults.hang(name) for name in ("preadv", "free_bytes")]
    request = walk.wait([*tokens, 59])
    assert walk.tiers.ssd_io.reads and walk.tiers.prefetcher.is_prefetching(request)
    assert walk.cache.ssd.store.reserve(1) is None and not walk.cache.ssd.is_answering
    for late in (walk.wait([*tokens, 58]), walk.wait([*others, 59])):
        assert not walk.tiers.prefetcher.is_prefetching(late)
    for event in may_go_on:
        event.set()
    walk.until(lambda: walk.cache.ssd.store.is_answering)
    walk.settle()


@pytest.mark.parametrize("page_size", [1, 4])
def test_slots_of_a_load_that_hangs_are_set_apart_by_a_flush(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, page_size: int
) -> None:
    monkeypatch.setattr(loads, "END_S", 0.02)
    walk = opened(page_size=page_size)
    tokens, node = cached(walk, 100, Tier.HOST)
    (block,) = blocked(walk, "load")
    request = walk.ready([*tokens, 59])
    assert walk.admit(request) == 100
    (load,) = walk.tiers.loads
    slots = load.parts[0].slots
    walk.reset()
    walk.check()
    assert walk.allocator.available_size() == SLOTS - 100 and walk.cache.protected_size() == 100
    assert walk.tree.storage.errors["load_deadline"] == 1 and not walk.tiers.loads
    assert walk.cache.parts.admin.describe_tiers()["slots_set_apart"] == 100
    assert walk.cache.host.num_entries == 1  # what it reads from
    for _ in range(3):  # others get none of these slots, and their rows stay right
        _, other = cached(walk, 80)
        assert not set(other.value.tolist()) & set(slots.tolist())
    walk.check_rows()
    walk.reset()  # once more while it still hangs
    assert walk.allocator.available_size() == SLOTS - 100
    _, other = cached(walk, 80)
    walk.go_on(block)
    walk.check_rows()
    walk.reset()
    walk.settle()
    walk.check()
    assert walk.allocator.available_size() == SLOTS and walk.cache.host.num_entries == 0
    assert walk.cache.parts.admin.describe_tiers()["slots_set_apart"] == 0 and walk.cache.protected_size() == 0


def test_positions_of_nodes_that_only_the_ssd_has_are_packed(opened: Opened) -> None:
    before = survivor_bytes()
    walk = opened(num_slots=768, host_bytes=1 << 20, ssd_bytes=8 << 20)
    tokens, node = cached(walk, 400)
    walk.cache.inspector.compress_node(node.id, Form("random", 0.5))
    expected = node.kv.layout.positions.clone()
    numbers = survivor_bytes()["open_bytes"] - before["open_bytes"]
    assert numbers == 4 * expected.numel() + 8 * node.kv.layout.num_slots
    sent(walk, node, Tier.SSD)
    layout = node.kv.layout
    after = walk.cache.parts.admin.describe_tiers()["survivors"]
    assert after["open_bytes"] - before["open_bytes"] == 8 * layout.num_slots
    assert after["packed_bytes"] - before["packed_bytes"] <= 4 * expected.numel() / 8
    assert layout.positions.equal(expected)
    assert walk.serve([*tokens, 59]) == 400 and tier_of(node) == Tier.GPU
    walk.check()
    walk.check_rows()
    del expected, node, layout
    walk.reset()
    walk.settle()
    assert not nodes_of(walk)


def test_a_server_with_another_key_finds_nothing_and_the_same_key_all(opened: Opened, tmp_path: Path) -> None:
    keys = [tmp_path.parent / f"{tmp_path.name}-{name}.key" for name in ("one", "two")]
    for number, path in enumerate(keys):
        path.write_bytes(bytes([number]) * 32)
        path.chmod(0o600)
    tokens: list[int] = []
    for key, num_found in ((0, 0), (1, 0), (None, 0), (0, 100)):
        walk = opened(stores=StoreFlags(key_file=None if key is None else str(keys[key])))
        if not tokens:
            tokens, node = cached(walk, 100, Tier.SSD)
        else:
            assert walk.serve([*tokens, 59]) == num_found, key
        walk.check_rows()
        is_counted = walk.cache.ssd.store.errors["key"] > 0
        assert is_counted == (key != 0)
        assert str(bytes([0]) * 32) not in str(walk.cache.parts.admin.describe_tiers()) + repr(walk.cache.config)
        if key != 0:  # what it has computed it does not leave behind
            walk.cache.parts.admin.flush_tier(Tier.GPU)
        walk.close()
