"""The demo: the real server on a KV pool too small for its workload, once with lru and once with evicpress.

`make demo` runs it. Same model, same pool, same questions in the same order, fresh servers one after the
other. The lru run answers on exact KV, so its answers are what those of evicpress are compared with.
Everything the demo saw is kept in bench/out/demo.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import openai
from demo.load import Answer, Progress, ask, ask_all, connect, prefill_seconds_per_token, to_lines
from demo.report import Figures, figures, table, tree_picture
from testbed.curves import CURVES, commit, processor
from testbed.server import Server, ServerError
from testbed.workload import Turn, make_workload

OUT = Path(__file__).parent / "out" / "demo"
FORMS = ("keydiff@0.8", "keydiff@0.6", "keydiff@0.4", "keydiff@0.2")  # the best press of the curves at each fraction
_WARM_UP_SEED_OFFSET = 500_000  # warm-up contexts are not those of the workload


@dataclass(frozen=True, slots=True)
class Setting:
    """Setting of both servers. `pool_tokens` is the KV pool, in tokens of exact KV."""

    contexts: int
    questions: int
    context_tokens: int
    pool_tokens: int
    clients: int
    zipf: float
    alpha: float
    seed: int

    @property
    def working_set_tokens(self) -> int:
        return self.contexts * self.context_tokens

    def turns(self) -> list[Turn]:
        return make_workload(self.contexts, self.questions, self.context_tokens, self.seed, zipf=self.zipf)

    def warm_up(self) -> list[Turn]:
        return make_workload(5, 1, self.context_tokens, self.seed + _WARM_UP_SEED_OFFSET, zipf=0.0)


@dataclass(frozen=True, slots=True)
class Run:
    """Run of one server over the workload."""

    answers: list[Answer]
    total_s: float
    prefill_per_token_s: float
    stats: dict[str, Any]
    tree: dict[str, Any]


@contextmanager
def serving(*arguments: str) -> Iterator[Server]:
    """A server that is gone afterwards however the block, or its start, ends; its log stays on a failure."""
    server = Server(*arguments)
    keep_log = False
    try:
        server.start()
        yield server
    except (openai.OpenAIError, OSError, ServerError) as error:
        keep_log = True
        time.sleep(1.0)  # one that dies closes its connections first
        what = (
            "the server answered" if server.is_alive() else f"the server is gone, last it said:\n{server.log_tail()}\n"
        )
        raise ServerError(f"{what}: {error}\nthe whole log: {server.log}") from error
    finally:
        server.stop()
        if not keep_log:
            shutil.rmtree(server.log.parent, ignore_errors=True)


def run(policy: str, setting: Setting, turns: Sequence[Turn], *flags: str) -> Run:
    """Start a server, warm it up, ask everything, look inside, stop it."""
    begin = time.monotonic()
    print(f"{policy:<10}starting the server ...", flush=True)
    pool = ("--max-total-tokens", str(setting.pool_tokens), "--enable-cache-report")
    with serving("--kv-policy", policy, *pool, *flags) as server, connect(server.url) as client:
        ask(client, setting.warm_up()[0].messages)
        server.flush()
        costs_s = []
        for turn in setting.warm_up():
            costs_s.append(prefill_seconds_per_token(client, turn))
            server.flush()  # one at a time: the pool may hold no more, and decisions are counted from here on
        up_s = time.monotonic() - begin
        print(f"{policy:<10}up after {up_s:.0f} s; look inside with: curl -s {server.url}/evicpress/tree")
        begin = time.perf_counter()
        answers = ask_all(client, turns, setting.clients, Progress(policy, len(turns)))
        total_s = time.perf_counter() - begin
        integrity = server.post("/evicpress/check")
        if not integrity["ok"]:
            raise ServerError(f"the cache is inconsistent: {integrity['violations'][:5]}")
        stats, tree = server.get("/evicpress/stats"), server.get("/evicpress/tree")
    return Run(answers, total_s, max(1e-9, statistics.median(costs_s)), stats, tree)


def write_config(path: Path, setting: Setting, prefill_per_token_s: float) -> None:
    """The file that `--kv-policy-config` reads: alpha, forms, measured curves, measured prefill cost."""
    curves = json.loads(CURVES.read_text())["curves"]
    config = {
        "alpha": setting.alpha,
        "forms": list(FORMS),
        "prefill_per_token_s": prefill_per_token_s,
        "curves": curves,
    }
    path.write_text(json.dumps(config, indent=1) + "\n")


def explain(setting: Setting, turns: Sequence[Turn]) -> str:
    needed = setting.working_set_tokens
    return (
        f"{len(turns)} questions about {setting.contexts} contexts of {setting.context_tokens} tokens, "
        f"popularity rank^-{setting.zipf:g}, {setting.clients} clients, seed {setting.seed}.\n"
        f"KV pool: {setting.pool_tokens} tokens; all contexts together need {needed} "
        f"({needed / setting.pool_tokens:.1f} times the pool)."
    )


def environment() -> str:
    versions = ", ".join(
        f"{name} {importlib.metadata.version(name)}" for name in ("sglang", "torch", "sglang-evicpress")
    )
    load = os.getloadavg()[0]
    machine = f"{processor()}, {os.cpu_count()} CPUs, load average {load:.1f} before the start"
    return f"{versions}; commit {commit()}; {machine}"


def save(
    setting: Setting, machine: str, turns: Sequence[Turn], runs: dict[str, Run], summary: dict[str, Figures]
) -> None:
    for name, done in runs.items():
        (OUT / f"{name}_requests.jsonl").write_text("\n".join(to_lines(turns, done.answers)) + "\n")
        (OUT / f"{name}_tree.json").write_text(json.dumps(done.tree, indent=1) + "\n")
        (OUT / f"{name}_stats.json").write_text(json.dumps(done.stats, indent=1) + "\n")
    result = {
        "setting": asdict(setting),
        "environment": machine,
        "figures": {name: asdict(item) for name, item in summary.items()},
    }
    (OUT / "figures.json").write_text(json.dumps(result, indent=1) + "\n")


def demo(setting: Setting) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    machine = environment()
    turns = setting.turns()
    print(explain(setting, turns), flush=True)
    lru = run("lru", setting, turns)
    config = OUT / "config.json"
    write_config(config, setting, lru.prefill_per_token_s)
    evicpress = run("evicpress", setting, turns, "--kv-policy-config", str(config), "--kv-no-recording")
    size = setting.context_tokens
    summary = {
        name: figures(turns, done.answers, lru.answers, context_tokens=size, total_s=done.total_s)
        for name, done in (("lru", lru), ("evicpress", evicpress))
    }
    save(setting, machine, turns, {"lru": lru, "evicpress": evicpress}, summary)
    print(f"\n{explain(setting, turns)}")
    cost_ms = 1000 * lru.prefill_per_token_s
    print(f"alpha {setting.alpha:g}, prefill {cost_ms:.3f} ms per token (measured on the lru server),")
    print(f"quality curves measured on other contexts ({CURVES.name}).\n{machine}.\n")
    print(table(summary["lru"], summary["evicpress"], lru.stats, evicpress.stats))
    print("\nUncompressed answers are those of the lru run, which only drops. Recomputed tokens are those of")
    print("contexts that were asked about before. The tree as evicpress left it (GET /evicpress/tree):\n")
    print(tree_picture(evicpress.tree, size))
    print(f"\nEvery request, both trees and the config are in {OUT}. {time.monotonic() - begin:.0f} s in all.")


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The first Ctrl-C or SIGTERM ends the demo in order; further ones do not disturb that."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, default=40)
    parser.add_argument("--questions", type=int, default=8, help="per context, on average")
    parser.add_argument("--context-tokens", type=int, default=2000)
    parser.add_argument("--pool-tokens", type=int, default=20000, help="size of the KV pool")
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--zipf", type=float, default=1.0, help="contexts are asked about as often as rank^-zipf")
    parser.add_argument("--alpha", type=float, default=1.0, help="seconds that full quality is worth")
    parser.add_argument("--seed", type=int, default=1)
    sys.stdout.reconfigure(line_buffering=True)
    setting = Setting(**vars(parser.parse_args()))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    try:
        demo(setting)
    except ServerError as error:
        sys.exit(f"\ndemo failed: {error}")


if __name__ == "__main__":
    main()
