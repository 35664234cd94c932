"""The outline of a tree, and several answers in one, of a walk's cache."""

from __future__ import annotations

from typing import Any

import pytest
from tests.contract.cache.test_radix_cache_model import Walk

from sglang_evicpress.introspect.arguments import PAGE_OUTLINE
from sglang_evicpress.introspect.operations import answer

pytestmark = pytest.mark.sglang


@pytest.fixture
def walked() -> Walk:
    walk = Walk(0, 1)
    walk.step(150)
    return walk


def ask(walk: Walk, op: str, **arguments: object) -> Any:
    status, body = answer(walk.cache.inspector, op, arguments)
    assert status == 200, body
    return body


def test_an_outline_has_a_row_for_each_node_as_the_tree_has_it(walked: Walk) -> None:
    outline, nodes = ask(walked, "outline"), {}
    after = 0
    while after is not None:
        page = ask(walked, "tree", after=after)
        nodes |= {node["id"]: node for node in page["nodes"]}
        after = page["next"]
    rows = [dict(zip(outline["columns"], row, strict=True)) for row in outline["nodes"]]
    assert len(rows) == len(nodes) > 5 and outline["next"] is None
    for row in rows:
        node = nodes[row["id"]]
        for name in ("parent_id", "num_tokens", "tier", "form", "num_hits"):
            assert row[name] == node[name], (name, row)
        assert row["is_locked"] == (node["lock_ref"] > 0)


def test_an_outline_is_read_in_pages(walked: Walk) -> None:
    whole, parts, after = ask(walked, "outline")["nodes"], [], 0
    while after is not None:
        page = ask(walked, "outline", after=after, limit=3)
        assert len(page["nodes"]) <= 3
        parts += page["nodes"]
        after = page["next"]
    assert parts == whole and len(whole) < PAGE_OUTLINE


@pytest.mark.parametrize("op", ["outline", "tree"])
def test_a_listing_goes_on_over_nodes_that_go_and_come_meanwhile(walked: Walk, op: str) -> None:
    """Whoever goes on by ``next`` sees no id twice, all that was there all the time, and what came after the first
    page."""

    def read(**arguments: object) -> tuple[list[int], int | None]:
        page = ask(walked, op, **arguments)
        return sorted(row[0] if op == "outline" else row["id"] for row in page["nodes"]), page["next"]

    whole = set(walked.cache.nodes)
    first, after = read(limit=3)
    walked.step(40)
    seen = list(first)
    while after is not None:
        ids, after = read(cursor=after, limit=3)
        seen += ids
    present = set(walked.cache.nodes)
    assert seen == sorted(set(seen)) and set(seen) - set(first) == {one for one in present if one > first[-1]}
    assert whole & present <= set(seen) and max(seen) > max(whole), "new nodes are at the end"


def test_news_are_what_is_asked_for(walked: Walk, monkeypatch: pytest.MonkeyPatch) -> None:
    news = ask(walked, "news", since=0, limit=5)
    assert news == {"decisions": ask(walked, "journal", since=0, limit=5)}
    monkeypatch.setattr(walked.cache.scheduler, "waiting_queue", [], raising=False)
    monkeypatch.setattr(walked.cache.scheduler, "running_batch", walked.cache.scheduler.last_batch)
    news = ask(walked, "news", since=0, limit=5, figures=True, requests=0)
    assert set(news) == {"decisions", "stats", "tiers", "requests"}
    assert news["tiers"] == ask(walked, "tiers") and news["requests"]["requests"] == []
    assert set(ask(walked, "stats")) - set(news["stats"]) == {"evictions", "threads"}


def test_decisions_are_counted_by_kind_and_reason(walked: Walk) -> None:
    stats = ask(walked, "stats")
    counted = stats["decisions"]["by_reason"]
    assert sum(counted.get("drop", {}).values()) == stats["decisions"]["dropped"]
    assert sum(counted.get("compress", {}).values()) == sum(stats["decisions"]["compressed"].values())
    assert sum(sum(reasons.values()) for reasons in counted.values()) == ask(walked, "journal")["num_decisions"] > 0
    compressible = next(
        node for node in ask(walked, "tree")["nodes"] if node["form"] == "exact" and not node["lock_ref"]
    )
    before = counted.get("compress", {}).get("asked", 0)
    status, _ = answer(walked.cache.inspector, "compress", {"node_id": compressible["id"], "form": "random@0.5"})
    after = ask(walked, "stats")["decisions"]["by_reason"].get("compress", {}).get("asked", 0)
    assert after == before + (status == 200)
