"""``evicpress completion``: a script by which a shell completes commands, flags and choices."""

from __future__ import annotations

from collections.abc import Sequence

import shtab

from sglang_evicpress.cli.command import make_parser
from sglang_evicpress.cli.parsers import completion as completion_parser


def completion(argv: Sequence[str]) -> int:
    """Print the script and give the exit status. Raises ValueError for a shell that is not known."""
    args = completion_parser().parse_args(argv)
    print(shtab.complete(make_parser(with_flags=True), shell=args.shell))
    return 0
