"""``evicpress explain``: the options of a node of a server."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_evicpress.cli.operator.server import Json, Server, connected_parser
from sglang_evicpress.cli.output import print_result
from sglang_evicpress.cli.parser import Parser, naming, whole
from sglang_evicpress.cli.replay.units import show_bytes
from sglang_evicpress.tables import aligned


def make_parser() -> Parser:
    parser = connected_parser(
        "explain", "Show what may become of a node: every option with its bytes, quality and utility."
    )
    parser.add_argument("node", metavar="NODE", help="its id, as `evicpress tree` shows it")
    return parser


def explain(argv: Sequence[str]) -> int:
    """Run ``evicpress explain`` and give its exit status. Raises ValueError."""
    args = make_parser().parse_args(argv)
    with naming("NODE"):
        node_id = whole(0)(args.node)
    answer = Server.of(args).get(f"explain/{node_id}")
    print_result(args, answer, options(answer))
    return 0


def options(answer: Json) -> list[str]:
    """The options of a node as lines of text."""
    rows = [("option", "bytes", "quality", "delay", "utility", "lost per MB freed", "")]
    for option in answer["options"]:
        loss = option["drop_per_byte"]
        rows.append(
            (
                option["option"],
                show_bytes(option["num_bytes"]),
                f"{option['q']:.3f}",
                f"{1e3 * option['d']:.2f} ms",
                f"{option['U']:.4g}",
                "" if loss is None else f"{1e6 * loss:.3g}",
                option["role"],
            )
        )
    head = (
        f"node {answer['node_id']}: {answer['num_tokens']} tokens behind {answer['depth_tokens']}, "
        f"{answer['weight']:.3g} uses/s"
    )
    if answer.get("alpha") is not None:  # of a policy that weighs quality by one
        head += f", alpha {answer['alpha']:g}"
    chosen = f"next: {answer['next']}" if answer.get("next") else "nothing is next"
    return [head, f"{chosen}; {answer['why']}", "", *aligned(rows)]
