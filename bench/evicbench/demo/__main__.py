"""LRU without and with tiers below the GPU, EvicPress over the same tiers, and a cache that holds everything.

`make demo` runs it: the serving benchmark of bench/configs/demo.yaml, four servers one after the other under the same
requests. It ends with a table and a chart; page, answers and server logs stay in bench/out/demo. One that was
interrupted goes on; one that came to its end begins anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from evicbench.demo.page import PAGE, write_page
from evicbench.demo.report import opening, report
from evicbench.paths import BENCH, OUT
from sglang_evicpress.benchmark.config import load_config
from sglang_evicpress.benchmark.results import read_results
from sglang_evicpress.benchmark.summary import summarise
from sglang_evicpress.cli.bench import serve


def main() -> int:
    """Exit status of the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--config", type=Path, default=BENCH / "configs" / "demo.yaml", help="of the benchmark (default: %(default)s)")
    add("--out", type=Path, default=OUT / "demo", help="folder for all that is kept (default: %(default)s)")
    add("--fresh", action="store_true", help="begin anew after an interruption, too")
    args = parser.parse_args()
    out, begin = args.out.resolve(), time.monotonic()
    try:
        print("\n".join(opening(load_config(args.config), out)), flush=True)
        fresh = args.fresh or (out / PAGE).exists()
        (out / PAGE).unlink(missing_ok=True)
        if status := serve(["--config", str(args.config), "--out", str(out), *(["--fresh"] if fresh else [])]):
            return status
        summary = summarise(read_results(out))
    except ValueError as error:
        sys.exit(f"demo: {error}")
    page = write_page(summary)
    print("\n".join(report(summary, page, time.monotonic() - begin)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
