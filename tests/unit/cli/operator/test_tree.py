"""Tree and options of a node, as a terminal shows them."""

from __future__ import annotations

from typing import Any

from sglang_evicpress.cli.operator.explain import options
from sglang_evicpress.cli.operator.tree import Shown, all_nodes, lines

ALL = Shown(depth=0, least_tokens=0)


def node(node_id: int, parent: int | None, num_tokens: int, **changed: Any) -> dict[str, Any]:
    known = {"num_slots": num_tokens, "tier": "gpu", "form": "exact", "lineage": "exact", "num_hits": 1}
    return {
        "id": node_id,
        "parent_id": parent,
        "num_tokens": num_tokens,
        "weight": 0.5,
        "lock_ref": 0,
        **known,
        **changed,
    }


NODES = [
    node(1, None, 10),
    node(2, 1, 300, form="keydiff@0.5", num_slots=150, lineage="lossy"),
    node(3, 1, 20, lock_ref=1),
]


class Pages:
    """A server whose tree comes in pages of one node."""

    def get(self, path: str) -> dict[str, Any]:
        after = int(path.partition("after=")[2].partition("&")[0])
        page = [each for each in NODES if each["id"] > after][:1]
        return {"nodes": page, "next": page[-1]["id"] if page and page[-1]["id"] < 3 else None}


def test_children_stand_below_their_parents_the_largest_first() -> None:
    head, *rows, _, total = lines(NODES, ALL)
    assert [row.split()[:3] for row in rows] == [["└", "1", "10"], ["├", "2", "300"], ["└", "3", "*"]]
    assert rows[1].startswith("  ├ 2") and rows[1].split()[2:6] == ["300", "150", "gpu", "keydiff@0.5"]
    assert head.split()[:2] == ["node", "tokens"] and total == "3 nodes, 330 tokens"


def test_a_path_of_many_nodes_is_shown() -> None:
    nodes = [node(number, number - 1 or None, 5) for number in range(1, 3001)]
    rows = lines(nodes, ALL)
    assert len(rows) == 3003 and rows[3000].split()[:2] == ["└", "3000"]


def test_small_and_deep_nodes_are_counted_in_one_line() -> None:
    assert [row.split()[:4] for row in lines(NODES, Shown(1, 0))[1:3]] == [
        ["└", "1", "10", "10"],
        ["└", "2", "more", "320"],
    ]
    rows = lines(NODES, Shown(0, 15))
    assert rows[1].split() == ["└", "1", "more", "10"]


def test_a_node_whose_parent_went_between_two_pages_is_still_shown() -> None:
    assert lines(NODES[1:], ALL)[1].split()[:3] == ["├", "2", "300"]
    assert lines([], ALL) == ["the tree is empty"]


def test_every_page_is_read() -> None:
    pages: Any = Pages()
    assert list(all_nodes(pages)) == NODES


def test_options_are_told_with_what_is_next_and_why() -> None:
    option = {"option": "exact/gpu", "num_bytes": 2_000_000, "q": 1.0, "d": 0.0, "U": 2.5, "drop_per_byte": None}
    answer = {
        **{
            "node_id": 7,
            "num_tokens": 300,
            "depth_tokens": 0,
            "weight": 2.0,
            "alpha": 1.0,
            "next": "drop",
            "why": "so",
        },
        "options": [{**option, "role": "held"}, {**option, "option": "drop", "drop_per_byte": 1e-6, "role": "next"}],
    }
    head, chosen, _, _, held, drop = options(answer)
    assert head == "node 7: 300 tokens behind 0, 2 uses/s, alpha 1" and chosen == "next: drop; so"
    assert held.split() == ["exact/gpu", "2.00", "MB", "1.000", "0.00", "ms", "2.5", "held"]
    assert drop.split()[-2:] == ["1", "next"]
    del answer["alpha"]  # as of every policy that weighs no quality by one
    assert options(answer)[0] == "node 7: 300 tokens behind 0, 2 uses/s"
