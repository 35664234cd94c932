"""A soak: many clients stream from a server with everything on, which is killed twice and started again on its folder.

`make soak SECONDS=1800` prints the seed; `SEED=N` repeats what its clients draw.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from evicbench.report import Line, run_measurements
from evicbench.stress import CHECKS
from evicbench.testbed.contexts import generate
from evicbench.testbed.server import MODEL
from evicbench.testbed.tasks import FAMILIES, ONE_QUESTION
from evicbench.testbed.vocabulary import ASK, load_vocabulary
from evicbench.tiers.inputs import scratch
from evicbench.tiers.prompts import Question, answered, reference
from evicbench.tiers.restart import Stoppable
from evicbench.trust.clients import NUM_CLIENTS, SSD_GB, TIMEOUT_S, Life
from evicbench.trust.memory import slope
from sglang_evicpress.quantiles import quantile

SECONDS = 1800.0
LIVES = (0.15, 0.15, 0.7)
"""Shares of the time; all but the last end by SIGKILL."""

WARM_UP_S, LEAST_S = 180.0, 60.0
"""Of a life: what its memory does after the former is judged if that is as long as the latter. By then what is bounded
has filled: the journal, and the arenas of the allocator."""

MOST_MB_PER_MINUTE = 1.0
MOST_P99 = 10.0  # medians
LEAST_F1 = 0.9
NUM_CONTEXTS, NUM_QUESTIONS, LENGTHS = 40, 3, (300, 700, 1100, 1500)
NUM_NEW = 20
POOL_SLOTS = 8192
FORMS = "keydiff@0.8,keydiff@0.5,snapkv@0.5,exact+int8,exact+int4,keydiff@0.8+int8,keydiff@0.5+int4"


def arguments(folder: Path) -> tuple[str, ...]:
    """Everything on, and far less memory than is asked for on every tier."""
    return (
        *("--kv-policy", "evicpress", "--kv-forms", FORMS, "--skip-tokenizer-init"),
        *("--kv-quality-curves", str(MODEL.with_name("guess.json")), "--kv-profile-path", str(folder / "profiles")),
        *("--max-total-tokens", str(POOL_SLOTS), "--max-running-requests", "24", "--chunked-prefill-size", "512"),
        *("--kv-host-gb", "0.016", "--kv-ssd-dir", str(folder / "ssd"), "--kv-ssd-gb", str(SSD_GB)),
        *("--kv-slot-checks", "0.02"),
    )


def draw_questions(seed: int) -> list[Question]:
    """Questions about contexts that share nothing but their first word, with the answers of the full computation."""
    families = [family for family in FAMILIES if family not in ONE_QUESTION]
    vocabulary = load_vocabulary()
    prompts = [
        tuple(vocabulary.encode(" ".join((*context.tokens, ASK, each.text))))
        for context in generate(NUM_CONTEXTS, LENGTHS, NUM_QUESTIONS, seed, families)
        for each in context.questions[:NUM_QUESTIONS]
    ]
    with reference(MODEL) as server:
        return answered(server, prompts, [NUM_NEW] * len(prompts))


def soak(seconds: float, seed: int) -> tuple[list[Life], list[int]]:
    """Lives of the server, and how many entries each found on its SSD."""
    questions, lives, found = draw_questions(seed), list[Life](), list[int]()
    print(f"    {len(questions)} questions with sure answers", flush=True)
    with scratch(1 << 29) as folder:
        for number, share in enumerate(LIVES):
            with Stoppable(*arguments(folder), env=CHECKS) as server:
                found.append(server.get("/evicpress/tiers")["tiers"]["ssd"]["num_entries"])
                lives.append(Life(server, questions, folder / "ssd", f"{seed}-{number}", share * seconds))
                lives[-1].run(is_killed=number + 1 < len(LIVES))
            print(f"    life {number + 1}, {found[-1]} entries found: {_told(lives[-1])}", flush=True)
            for problem in lives[-1].problems[:20]:
                print(f"    {problem[:400]}", flush=True)
    return lives, found


def _told(life: Life) -> str:
    sizes = [f"{size / 1e6:.0f}" for _, size in life.memory.whole[:: max(1, len(life.memory.whole) // 8)]]
    return (
        f"{life.num_requests} requests, {life.num_cut} cut off, {life.num_torn} torn, sources {dict(life.sources)}, "
        f"moves {dict(life.moves)}, profiles {life.last.get('profiles', {}).get('counts')}, MB {', '.join(sizes)}"
    )


def _total(lives: Sequence[Life], count: str) -> int:
    return sum(getattr(life, count) for life in lives)


def lines(lives: Sequence[Life], found: Sequence[int], seconds: float, seed: int) -> Iterator[Line]:
    what = f"soak of {seconds:g} s, seed {seed}"
    problems = [problem for life in lives for problem in life.problems]
    is_wrong = [problem.startswith("wrong") for problem in problems]
    num_exact, num_wrong = (_total(lives, name) for name in ("num_exact", "num_wrong"))
    f1s = {kind: [each for life in lives for each in life.f1s[kind]] for kind in ("any", "budget")}
    means = {kind: sum(each) / max(1, len(each)) for kind, each in f1s.items()}
    lossy, cut = (f"{means[kind]:.3f} of {len(f1s[kind])}" for kind in ("any", "budget"))
    first = f"; first: {problems[is_wrong.index(True)][:300]}" if any(is_wrong) else ""
    yield Line(
        f"{what}: answers of {NUM_CLIENTS} streaming clients",
        f"exact ones token by token those of the full computation, others a mean token F1 >= {LEAST_F1:g}",
        f"{num_exact} exact, {num_wrong} wrong, {sum(is_wrong)} such problems; "
        f"F1 {lossy} over lossy KV, {cut} cut by budgets{first}",
        not any(is_wrong) and num_exact > 0 and bool(f1s["any"]) and means["any"] >= LEAST_F1,
    )
    others = [problem for problem, wrong in zip(problems, is_wrong, strict=True) if not wrong]
    came = sum((life.sources for life in lives), Counter[str]())
    attached = sum(life.moves["attached"] for life in lives)
    yield Line(
        f"{what}: aborts, {len(lives) - 1} kill -9, SSD detached and attached",
        "no other problem, entries found again after each kill, tokens from GPU, host and SSD",
        f"{_total(lives, 'num_requests')} requests, {_total(lives, 'num_cut')} left by clients, "
        f"{_total(lives, 'num_torn')} torn by kills; {attached} times attached; entries found {found}; "
        f"tokens {dict(came)}; {len(others)} problems{f', first: {others[0][:300]}' if others else ''}",
        not others and min(found[1:]) > 0 and attached > 0 and min(came["device"], came["host"], came["storage"]) > 0,
    )
    rests, checks = _total(lives, "num_rests"), _total(lives, "num_checks")
    accounted = [problem for problem in others if problem.startswith(("at rest", "after the flush", "check"))]
    yield Line(
        f"{what}: slots and bytes at rest, and after a flush",
        "all accounted for, every check clean",
        f"{rests} times at rest, {checks} checks, {len(accounted)} problems",
        not accounted and rests > 0 and checks > 0,
    )
    judged = [life.memory for life in lives if life.memory.whole[-1][0] >= WARM_UP_S + LEAST_S]
    slopes = {
        name: [slope(samples, WARM_UP_S) for samples in of]
        for name, of in {
            "scheduler": [memory.scheduler for memory in judged],
            "all processes": [memory.whole for memory in judged],
        }.items()
    }
    yield Line(
        f"{what}: resident memory after {WARM_UP_S:g} s, least squares",
        f"< {MOST_MB_PER_MINUTE:g} MB a minute in each life of {WARM_UP_S + LEAST_S:g} s or more",
        "; ".join(f"{name} " + " / ".join(f"{each:+.2f}" for each in of) for name, of in slopes.items()),
        max(max(of) for of in slopes.values()) < MOST_MB_PER_MINUTE if judged else None,
    )
    first_s = [each for life in lives for each in life.first_s]
    median, p99 = (quantile(first_s, share) for share in (0.5, 0.99))
    num_hung = _total(lives, "num_hung")
    yield Line(
        f"{what}: time to first token, {NUM_CLIENTS} at once",
        f"p99 <= {MOST_P99:g} medians, none above {TIMEOUT_S:g} s",
        f"median {median:.2f} s, p99 {p99:.2f} s ({p99 / median:.1f} medians), most {max(first_s):.2f} s, "
        f"{num_hung} hung",
        p99 <= MOST_P99 * median and num_hung == 0,
    )
    counts = [life.last.get("profiles", {}).get("num_profiles", 0) for life in lives]
    forms = Counter[str]()
    for life in lives:
        for tier in life.last.get("tiers", {}).get("tiers", {}).values():
            forms.update({form: shown["nodes"] for form, shown in tier["forms"].items()})
    yield Line(
        f"{what}: what was on",
        "contexts measured online, forms with and without a codec held",
        f"profiles at the end of each life {counts}; forms held then {dict(sorted(forms.items()))}",
        counts[-1] > 0 and any("+" in form for form in forms) and any("@" in form for form in forms),
    )


def measure(seconds: float = SECONDS, seed: int | None = None) -> Iterator[Line]:
    chosen = random.SystemRandom().randrange(1 << 16) if seed is None else seed
    print(f"    seed {chosen}", flush=True)
    lives, found = soak(seconds, chosen)
    yield from lines(lives, found, seconds, chosen)


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--seed", type=int, help="default: drawn, and printed")
    options = parser.parse_args(given)
    return run_measurements({"soak": partial(measure, options.seconds, options.seed)})


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that servers are stopped
    sys.exit(main())
