"""``evicpress fsck``: checks the entries in the folder of an SSD tier."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_evicpress.cli.output import print_result
from sglang_evicpress.cli.parsers import fsck as make_parser
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.ssd.folder import StoreError
from sglang_evicpress.tiers.ssd.fsck import fsck as check_folder


def fsck(argv: Sequence[str]) -> int:
    """Run ``evicpress fsck`` and give its exit status. Raises ValueError for a folder that cannot be checked."""
    args = make_parser().parse_args(argv)
    try:
        key = None if args.key_file is None else Key.read(args.key_file)
        report = check_folder(args.folder, repair=args.repair, key=key)
    except StoreError as error:
        raise ValueError(str(error)) from None
    print_result(args, report, report.lines())
    return 0 if report.is_clean else 1
