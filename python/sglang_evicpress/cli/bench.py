"""``evicpress bench serve``: from the words of the command line to the runs, and where they are."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sglang_evicpress.benchmark.config import Config, load_config
from sglang_evicpress.benchmark.contexts import Context, load_contexts
from sglang_evicpress.benchmark.model import kv_bytes_per_token
from sglang_evicpress.benchmark.quality import score_runs
from sglang_evicpress.benchmark.runs import run_all
from sglang_evicpress.benchmark.saturation import at_saturation
from sglang_evicpress.benchmark.server import ServerError
from sglang_evicpress.benchmark.systems import Sizes, System, expand, left_out, names_of, sizes_of
from sglang_evicpress.benchmark.tables import TABLES, write_report
from sglang_evicpress.cli.output import print_result
from sglang_evicpress.cli.parser import interrupted_status, say
from sglang_evicpress.cli.parsers import bench_serve as make_parser

FOLDER = Path("bench/out/serve")
_ROOM_TOKENS = 256
"""Around a context in the pool: the question, and what the server keeps for itself."""


def serve(argv: Sequence[str]) -> int:
    """Run what is missing and print where it is; the exit status. Raises ValueError for bad input."""
    args, command = make_parser().parse_args(argv), shlex.join(["evicpress", "bench", "serve", *argv])
    config = load_config(args.config)
    if args.repetitions is not None:
        if args.repetitions < 1:
            raise ValueError(f"--repetitions {args.repetitions}: expected at least 1")
        config = config.model_copy(update={"repetitions": args.repetitions})
    folder, has_begun_anew = (args.out or FOLDER / config.name).resolve(), False
    try:
        contexts = load_contexts(config, folder)
        sizes = sizes_of(config, sum(context.tokens for context in contexts), kv_bytes_per_token(config))
        check_pool(config, sizes, contexts)
        systems = expand(config, sizes, folder)
        chosen = systems if args.systems is None else choose(systems, args.systems)
        for name, why in left_out(config).items():
            say(f"{name} is left out: {why}")
        config = at_saturation(config, systems, contexts, sizes, folder, is_fresh=args.fresh)
        has_begun_anew = bool(args.fresh)  # from here on, --fresh would move away what is made now
        done = run_all(config, systems, chosen, contexts, sizes, folder, command=command, is_fresh=args.fresh)
        score_runs(folder, is_shown=sys.stderr.isatty())
        write_report(folder)
    except KeyboardInterrupt as interrupt:
        again = "the same command without --fresh" if has_begun_anew else "the same command"
        say(f"interrupted; every run that was complete is in {folder}, and {again} goes on")
        return interrupted_status(interrupt)
    except ServerError as error:
        say(f"error: {error}")
        return 1
    before = f"; {done.num_before} were there before" if done.num_before else ""
    failed = f"; {done.num_failed} requests failed" if done.num_failed else ""
    line = f"{done.num_runs} runs made{before}{failed}; tables: {folder / TABLES}; every request: {folder / 'runs'}"
    print_result(args, {**asdict(done), "tables": folder / TABLES, "runs": folder / "runs"}, [line])
    return 0


def choose(systems: Sequence[System], names: str) -> list[System]:
    """Systems with one of the names, or kinds, separated by commas. Raises ValueError for an unknown one."""
    wanted = [name.strip() for name in names.split(",")]
    known = names_of(systems)
    if unknown := [name for name in wanted if name not in known]:
        raise ValueError(f"--systems {unknown[0]!r}: expected some of {', '.join(known)}")
    return [system for system in systems if system.name in wanted or system.kind in wanted]


def check_pool(config: Config, sizes: Sizes, contexts: Sequence[Context]) -> None:
    """Raises ValueError where the longest context does not fit in the pool with its question and answer."""
    need = max(context.tokens for context in contexts) + config.workload.max_new_tokens + _ROOM_TOKENS
    if sizes.pool_tokens < need:
        raise ValueError(
            f"{config.path}: memory gpu {config.memory.gpu:g} of {sizes.working_set_tokens} tokens is a pool of "
            f"{sizes.pool_tokens}: expected at least {need}, for the longest context with a question and an answer"
        )
