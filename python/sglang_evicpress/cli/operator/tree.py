"""``evicpress tree``: the radix tree of a server in a terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sglang_evicpress.cli.operator.server import Json, Server, connected_parser
from sglang_evicpress.cli.output import print_result
from sglang_evicpress.cli.parser import Parser, whole
from sglang_evicpress.tables import aligned

PAGE_NODES = 500
_HEAD = ("node", "tokens", "slots", "tier", "form", "KV", "hits", "uses/s")


@dataclass(frozen=True, slots=True)
class Shown:
    """Nodes that are shown: those of at most ``depth`` levels (0: all) and of at least ``least_tokens``."""

    depth: int
    least_tokens: int


def make_parser() -> Parser:
    parser = connected_parser("tree", "Show the radix tree of a server: every node with its tokens, tier and form.")
    parser.add_value("--depth", whole(1), "N", "levels below the root that are shown (default: all)")
    parser.add_value("--least-tokens", whole(0), "N", "leave out smaller nodes, counted in one line", "0")
    return parser


def tree(argv: Sequence[str]) -> int:
    """Run ``evicpress tree`` and give its exit status. Raises ValueError."""
    args = make_parser().parse_values(argv)
    nodes = list(all_nodes(Server.of(args)))
    print_result(args, nodes, [] if args.json else lines(nodes, Shown(args.depth or 0, args.least_tokens)))
    return 0


def all_nodes(server: Server) -> Iterator[Json]:
    """Every node of the tree, read in pages."""
    after: int | None = 0
    while after is not None:
        page = server.get(f"tree?after={after}&limit={PAGE_NODES}")
        yield from page["nodes"]
        after = page.get("next")


def lines(nodes: Sequence[Json], shown: Shown) -> list[str]:
    """The tree as lines of text, children below their parents, the largest first."""
    if not nodes:
        return ["the tree is empty"]
    children = defaultdict[int | None, list[Json]](list)
    known = {node["id"] for node in nodes}
    for node in nodes:
        parent = node["parent_id"]
        children[parent if parent in known else None].append(node)
    rows = [_HEAD, *_rows(children, shown)]
    num_tokens = sum(node["num_tokens"] for node in nodes)
    return [*aligned(rows), "", f"{len(nodes)} nodes, {num_tokens} tokens"]


def _rows(children: Mapping[int | None, list[Json]], shown: Shown) -> Iterator[tuple[str, ...]]:
    """Rows of all levels; a path may have more of them than Python takes calls."""
    levels = [_level(children, None, "", 0, shown)]
    while levels:
        row, below = next(levels[-1], (None, None))
        if row is None:
            levels.pop()
            continue
        yield row
        if below is not None:
            node_id, indent = below
            levels.append(_level(children, node_id, indent, len(levels), shown))


def _level(
    children: Mapping[int | None, list[Json]], parent: int | None, indent: str, depth: int, shown: Shown
) -> Iterator[tuple[tuple[str, ...], tuple[int, str] | None]]:
    """Rows of the children of a node, each with its id and the indent of what lies below it."""
    below = sorted(children.get(parent, ()), key=lambda node: (-node["num_tokens"], node["id"]))
    if shown.depth and depth == shown.depth:
        if below:
            yield _left_out(below, indent), None
        return
    large = [node for node in below if node["num_tokens"] >= shown.least_tokens]
    small = below[len(large) :]
    for number, node in enumerate(large):
        is_last = number == len(large) - 1 and not small
        yield _row(node, f"{indent}{'└' if is_last else '├'} "), (node["id"], f"{indent}{' ' if is_last else '│'} ")
    if small:
        yield _left_out(small, indent), None


def _row(node: Json, indent: str) -> tuple[str, ...]:
    return (
        f"{indent}{node['id']}{' *' if node['lock_ref'] else ''}",
        str(node["num_tokens"]),
        str(node["num_slots"]),
        node["tier"],
        node["form"],
        node["lineage"],
        str(node["num_hits"]),
        f"{node['weight']:.3g}",
    )


def _left_out(nodes: Sequence[Json], indent: str) -> tuple[str, ...]:
    num_tokens = str(sum(node["num_tokens"] for node in nodes))
    return (f"{indent}└ {len(nodes)} more", num_tokens, *[""] * (len(_HEAD) - 2))
