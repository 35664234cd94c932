"""EvicPress with codecs beside LRU with the best fixed codec, simulated on the traces of `make show-policy`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from evicbench.policy.rivals import QUALITY
from evicbench.policy.runs import LIMITS, Run, load, replay_all, trace_file
from evicbench.report import Line
from sglang_evicpress.core import Form

FIXED = ("exact+int8+lru", "exact+int4+lru")
SIZES = ((0.5, 2.0, 10.0), (1.0, 4.0, 20.0), (3.0, 10.0, 50.0))
"""GPU, host and SSD in percent of the working set."""

MENU = tuple(
    Form(press, kept, codec)
    for press, kept in ((None, 1.0), ("keydiff", 0.8), ("keydiff", 0.6), ("keydiff", 0.4))
    for codec in ("raw", "int8", "int4")
)
ALPHAS = {"mooncake": (0.1, 0.2, 0.4, 0.8, 1.6), "miniswe": (0.1, 0.2, 0.4, 0.8, 1.6), "weka": (60.0, 100.0, 200.0)}
MOST = 1.01
ENDLESS = (1e4, 0.0, 0.0)
SHARED, LEAST_SHARE = ("mooncake", (1.0, 4.0, 20.0)), 0.95


def beside_fixed(trace: str, limit: int | None = None) -> Iterator[Line]:
    """A line for each mix of sizes; the alpha is the one that is quickest of those that keep the quality. Of WEKA's
    trace a quarter of the sessions is replayed."""
    limit = limit or LIMITS.get(trace)
    data, _ = load(trace, limit)
    print(f"    {trace}: {trace_file(trace).rsplit('/', 1)[-1]}, {len(data.requests)} requests")
    for sizes in SIZES:
        run = Run(trace, "lru", sizes, limit=limit, forms=())
        fixed = [replace(run, policy=policy, may_recompute=may) for policy in FIXED for may in (True, False)]
        ours = [replace(run, policy="evicpress", alpha=alpha, forms=MENU) for alpha in ALPHAS[trace]]
        exact, endless, *found = replay_all([run, replace(run, sizes=ENDLESS), *fixed, *ours])
        rivals, tried = found[: len(fixed)], found[len(fixed) :]
        best = min(rivals, key=lambda result: result.ttft_s)
        good = [result for result in tried if result.quality_of_hits >= QUALITY]
        mine = min(good, key=lambda result: result.ttft_s, default=None)
        name = "/".join(f"{size:g}" for size in sizes)
        what, target = f"{trace} {name} %: mean TTFT beside lru + the best fixed codec", f"<= {MOST - 1:+.0%}"
        if mine is None:
            yield Line(what, target, f"no alpha of {ALPHAS[trace]} keeps quality {QUALITY}", False)
            continue
        ratio = mine.ttft_s / best.ttft_s
        share = (exact.ttft_s - mine.ttft_s) / (exact.ttft_s - endless.ttft_s)
        figure = (
            f"{ratio - 1:+.1%} ({mine.ttft_s:.4f} s, alpha {mine.run.alpha:g}, quality {mine.quality_of_hits:.3f}; "
            f"{best.run.policy} {best.ttft_s:.4f} s, quality {best.quality_of_hits:.3f}; lru {exact.ttft_s:.4f} s); "
            f"{share:.0%} of what an endless GPU cache saves"
        )
        yield Line(what, f"{target}, at quality >= {QUALITY}", figure, ratio <= MOST)
        if (trace, sizes) == SHARED:
            what = f"{trace} {name} %: of the time that an endless GPU cache saves beside lru"
            yield Line(what, f">= {LEAST_SHARE:.0%}, at quality >= {QUALITY}", f"{share:.0%}", share >= LEAST_SHARE)
