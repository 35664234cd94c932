"""``evicpress search expand``: what a file of budgets keeps at another target."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_evicpress.cli.output import print_result
from sglang_evicpress.cli.parser import Parser, whole
from sglang_evicpress.cli.search.report import MAX_TARGET, layers
from sglang_evicpress.search.budget_file import read_budget_file
from sglang_evicpress.search.layer_budgets import expanded


def make_parser() -> Parser:
    parser = Parser.of(
        "search expand",
        "Show what a file of budgets keeps in each layer at another target, in tokens.",
        "Exit status: 0 shown, 2 bad input.\n",
    )
    parser.add_argument("file", metavar="FILE", help="what evicpress search wrote")
    parser.add_value("--target", whole(1, MAX_TARGET), "N", "tokens that a layer keeps on average", required=True)
    parser.add_json()
    return parser


def expand(argv: Sequence[str]) -> int:
    """Run ``evicpress search expand`` and give its exit status. Raises ValueError."""
    args = make_parser().parse_values(argv)
    budgets = expanded(read_budget_file(args.file).shares, args.target)
    print_result(args, {"target": args.target, "budgets": budgets}, [layers(budgets)])
    return 0
