"""Tenants with limits, over the real cache and tiers, with the harness of the random walks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contract.tiers.test_tiers_model import DEAR, DIM, HEADS, LAYERS, TierWalk

from sglang_evicpress.config import GB, EvicPressConfig
from sglang_evicpress.core import Form, Tier
from sglang_evicpress.patches.tree.namespaces import salted_key

pytestmark = pytest.mark.sglang

ACME, LAW = salted_key("s-1", ""), salted_key("s-2", "")
SLOT_BYTES = 2 * LAYERS * HEADS * DIM * 4
GPU_SLOTS, HOST_SLOTS = 60, 30


class TenantWalk(TierWalk):
    """A walk whose requests are those of two tenants with limits and of everybody else."""

    namespaces = (None, ACME, LAW)

    def configured(self, policy: str, settings: dict[str, object]) -> EvicPressConfig:
        gpu_gb, host_gb = GPU_SLOTS * SLOT_BYTES / GB, HOST_SLOTS * SLOT_BYTES / GB
        tenants = {
            "acme": {"cache_salt": "s-1", "gpu_gb": gpu_gb, "host_gb": host_gb},
            "law": {"cache_salt": "s-2", "gpu_gb": gpu_gb, "kv_quality": 0.8},
        }
        return super().configured(policy, {"tenants": tenants, **settings})

    def held(self, name: str, tier: Tier = Tier.GPU) -> int:
        """Slots, or what they take below the GPU, that a tenant holds."""
        return self.tree.policy.tenant_plans.held_bytes(name, tier) // SLOT_BYTES

    def go_rounds(self, num_rounds: int = 12) -> None:
        for _ in range(num_rounds):
            self.stamp(DEAR)
            self.tick()
            self.settle()

    def decided(self) -> dict[str, dict[str, int]]:
        return self.cache.inspector.describe_stats()["decisions"]["by_reason"]

    def forms_of(self, namespace: str | None) -> set[tuple[Tier, Form]]:
        nodes = [node for node in self.cache.nodes.values() if node.key.extra_key == namespace]
        return {(Tier.GPU if node.value is not None else Tier.HOST, node.kv.form) for node in nodes}


@pytest.fixture
def opened(opened: Callable[..., TierWalk], tmp_path: Path) -> Callable[..., TenantWalk]:
    return lambda seed=0, page_size=1, *, has_ssd=False, **options: TenantWalk(
        seed, page_size, tmp_path if has_ssd else None, **options
    )


def test_what_a_tenant_holds_too_much_is_compressed_first(opened: Callable[..., TenantWalk]) -> None:
    walk = opened()
    others, own = list(range(50)), list(range(100))
    walk.serve(others)
    walk.serve(own, ACME)
    assert walk.held("acme") == 100
    walk.go_rounds()
    assert walk.held("acme") <= GPU_SLOTS and walk.held("acme", Tier.HOST) == 0
    assert walk.decided() == {"compress": {"over_limit": 1}}
    assert all(form.is_exact for _, form in walk.forms_of(None)) and not any(
        form.is_exact for _, form in walk.forms_of(ACME)
    )
    assert walk.match(own, ACME) == 100 == 2 * walk.held("acme")  # all of it is served
    assert walk.cache.inspector.describe_stats()["tenants"]["acme"] == {
        "held_bytes": {"gpu": walk.held("acme") * SLOT_BYTES, "host": 0},
        "limit_bytes": {"gpu": GPU_SLOTS * SLOT_BYTES, "host": HOST_SLOTS * SLOT_BYTES},
    }


def test_what_may_not_shrink_so_far_leaves_the_gpu(opened: Callable[..., TenantWalk]) -> None:
    walk = opened()
    for first in range(0, 150, 50):
        walk.serve(list(range(first, first + 50)), LAW)
    walk.go_rounds()
    assert walk.held("law") <= GPU_SLOTS < walk.held("law") + walk.held("law", Tier.HOST)
    assert {kind for kind, reasons in walk.decided().items() if "over_limit" in reasons} == {"compress", "demote"}
    assert all(node.kv.form.is_exact or walk.tree.quality.quality_of(node) >= 0.8 for node in walk.cache.nodes.values())


def test_without_room_below_it_is_dropped_and_nobody_else_is(opened: Callable[..., TenantWalk]) -> None:
    walk = opened(is_exact=True)
    walk.serve(list(range(50)))
    for first in range(0, 300, 50):
        walk.serve(list(range(first, first + 50)), ACME)
        walk.go_rounds()
    assert walk.held("acme") <= GPU_SLOTS and walk.held("acme", Tier.HOST) <= HOST_SLOTS
    assert walk.decided()["drop"]["over_limit"] > 0
    assert walk.match(list(range(50))) == 50


def test_running_requests_keep_what_they_use(opened: Callable[..., TenantWalk]) -> None:
    walk = opened()
    request = walk.ready(list(range(100)), ACME)
    walk.admit(request)
    walk.go_rounds(3)
    assert walk.held("acme") == 100 and walk.decided() == {}
    walk.end(request)
    walk.go_rounds()
    assert walk.held("acme") <= GPU_SLOTS


def test_room_that_is_only_counted_as_free_below_is_made(opened: Callable[..., TenantWalk]) -> None:
    walk = opened(is_exact=True)
    for token in range(44):  # each takes a page of host memory of its own, and fills an eighth of it
        walk.serve([token])
    for node in list(walk.cache.nodes.values()):
        walk.cache.parts.admin.demote_node(node.id, Tier.HOST)
        walk.settle()
    walk.serve(list(range(100, 200)), LAW)
    assert walk.tree.storage.host.free_bytes < 100 * SLOT_BYTES < walk.tiers.host_room.room()[Tier.HOST]
    for _ in range(6):
        walk.go_rounds(1)
        while walk.tree.background_clock.is_dirty:  # until the next look at the limits nothing is left to be done
            walk.tick()
    assert walk.held("law") <= GPU_SLOTS
    assert walk.decided()["demote"]["over_limit"] > 0 and walk.match(list(range(100, 200)), LAW) == 0


def test_what_is_promoted_together_fits_the_limit_together(opened: Callable[..., TenantWalk]) -> None:
    walk = opened(is_exact=True)
    walk.serve(list(range(200, 240)), LAW)
    walk.stamp(DEAR)
    for first in (0, 100):  # of more worth, as they are younger
        walk.serve(list(range(first, first + 14)), LAW)
        walk.cache.parts.admin.demote_node(max(walk.cache.nodes), Tier.HOST)
        walk.settle()
    policy, free = walk.tree.policy, 100 * SLOT_BYTES  # each would fit beside the 40 slots there
    while not policy.look_for_promotions(()):
        pass
    decisions = policy.plan_promotions(free, {**walk.tiers.host_room.room(), Tier.GPU: free}, ())
    assert walk.held("law") == 40 and [decision.option.num_bytes for decision in decisions] == [14 * SLOT_BYTES]


@pytest.mark.parametrize(("seed", "page_size", "has_ssd"), [(0, 1, True), (1, 4, False), (2, 16, True)])
def test_random_walks_hold_the_limits_and_every_row(
    opened: Callable[..., TenantWalk], seed: int, page_size: int, has_ssd: bool
) -> None:
    walk = opened(seed, page_size, has_ssd=has_ssd)
    for _ in range(2):
        walk.step(150)
        walk.end_all()
        walk.settle()
        walk.go_rounds(40)
        assert walk.held("acme") <= GPU_SLOTS and walk.held("law") <= GPU_SLOTS
        assert walk.held("acme", Tier.HOST) <= HOST_SLOTS
        walk.check()
        walk.check_rows()
    assert sum(reasons.get("over_limit", 0) for reasons in walk.decided().values()) > 0
