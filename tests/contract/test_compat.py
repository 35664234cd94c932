"""Releases of SGLang: each has a module, and behaviour that signatures do not show is tried out at start."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import common, radix_cache

from sglang_evicpress.patches import hook_check, install
from sglang_evicpress.patches.cache.lifecycles import cache_class
from sglang_evicpress.patches.compat import probes, sglang_0_5_15, sglang_0_5_17, sglang_0_5_23
from sglang_evicpress.patches.compat.release import RELEASE, release_of
from sglang_evicpress.patches.hook_points import SUPPORTED_SGLANG, points_of

pytestmark = pytest.mark.sglang
MODULES = [sglang_0_5_15, sglang_0_5_17, sglang_0_5_23]


def test_the_installed_release_does_as_it_is_known_to() -> None:
    assert probes.behaviour_problem() is None
    assert hook_check.behaviour_problem() is None


def test_each_release_has_a_module_and_a_cache() -> None:
    assert [release_of(version) for version in SUPPORTED_SGLANG] == MODULES
    assert len({cache_class(version) for version in SUPPORTED_SGLANG}) == len(SUPPORTED_SGLANG)
    assert release_of(hook_check.sglang_version()) is RELEASE


def test_a_row_is_of_the_releases_that_it_names() -> None:
    old, new = (points_of(version) for version in ("0.5.15.post1", "0.5.17"))
    names = "sglang.srt.mem_cache.common.alloc_for_decode", "sglang.srt.mem_cache.allocation.alloc_for_decode"
    assert [point.path for point in old if point.path in names] == [names[0]]
    assert [point.path for point in new if point.path in names] == [names[1]]


def other_evict(tree_cache: Any, num_tokens: int) -> None:
    tree_cache.evict(SimpleNamespace(num_tokens=num_tokens + 1))


def key_of_more_fields(token_ids: object, extra_key: str, is_bigram: bool, limit: int, tenant: str) -> None: ...


class ShortRequest(schedule_batch.Req):
    """Lacks what we read."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.best_match_node


@pytest.mark.parametrize(
    ("module", "name", "changed", "said"),
    [
        (common, "evict_from_tree_cache", other_evict, "with 5 free slots asks the cache for 9 where 8 are wanted"),
        (
            radix_cache,
            "RadixKey",
            key_of_more_fields,
            "tells prefixes apart by (extra_key, is_bigram, limit, tenant, tok",
        ),
        (schedule_batch, "Req", ShortRequest, "Req has no best_match_node"),
    ],
    ids=["shortfall", "salts", "requests"],
)
def test_another_behaviour_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str, changed: object, said: str
) -> None:
    monkeypatch.setattr(module, name, changed)
    with pytest.raises(SystemExit) as stopped:
        install.install_scheduler()
    sentence = str(stopped.value.code)
    assert said in sentence and "\n" not in sentence
    assert hook_check.sglang_version() in sentence and "--kv-policy" in sentence


@pytest.mark.parametrize("release", MODULES, ids=lambda release: release.__name__.rsplit(".", 1)[-1])
def test_lengths_of_a_request(release: Any) -> None:
    lengths = {"req_pool_idx": 3, "kv_allocated_len": 20, "kv_committed_len": 20, "kv_committed_freed": False}
    request = SimpleNamespace(**lengths, kv=SimpleNamespace(**lengths))
    assert release.holds_kv(request) and release.allocated_len(request) == 20
    release.shorten(request, 8)
    record = request.kv if release is sglang_0_5_23 else request
    assert (release.allocated_len(request), record.kv_committed_len) == (12, 12)
    if release is sglang_0_5_23:
        request.kv.req_pool_idx = None
    else:
        request.kv_committed_freed, request.kv = True, None
    assert not release.holds_kv(request)


@pytest.mark.parametrize("release", MODULES, ids=lambda release: release.__name__.rsplit(".", 1)[-1])
def test_a_request_without_a_row_holds_nothing(release: Any) -> None:
    record = SimpleNamespace(req_pool_idx=None, kv_allocated_len=0)
    kv = record if release is sglang_0_5_23 else None
    assert not release.holds_kv(SimpleNamespace(**vars(record), kv=kv))
