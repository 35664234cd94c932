"""Forms with layer budgets on the menu of real servers: which lie on the measured hulls of contexts, and TTFT at equal
quality beside the same menu without them. Runs that are there already are not made again."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import orjson

from evicbench.budgets.questions import testbed
from evicbench.paths import BENCH
from evicbench.report import Line
from evicbench.serving.runs import folder_of, serve
from sglang_evicpress.benchmark.config import Config, load_config
from sglang_evicpress.benchmark.curves import curve, gaps
from sglang_evicpress.benchmark.results import read_results
from sglang_evicpress.benchmark.summary import Cell, Summary, summarise
from sglang_evicpress.benchmark.tables import setting_lines, write_report
from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.policy.hull import upper_hull
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.search.form_budgets import name_budgets
from sglang_evicpress.search.menu_budgets import layer_groups

CONFIG = "layer-budgets"
WITH, WITHOUT = ("evicpress",), ("evicpress-uniform",)
MAX_COUNTS = 4
QUALITIES = (0.9, 0.95, 0.97)


def measure_serving() -> Iterator[Line]:
    serve(CONFIG)
    write_report(folder_of(CONFIG))
    config = load_config(BENCH / "configs" / f"{CONFIG}.yaml")
    profiles = profiles_in(folder_of(CONFIG) / "profiles.log")
    yield from hull_lines(config, profiles)
    yield from bytes_lines(config, profiles)
    summary = summarise(read_results(folder_of(CONFIG)))
    for line in setting_lines(summary.results):
        print(f"    {line}", flush=True)
    yield equal_quality(summary)
    yield resident(summary)


def profiles_in(path: Path) -> list[Profile]:
    with closing(sqlite3.connect(path)) as database:
        return [Profile.from_json(orjson.loads(text)) for (text,) in database.execute("SELECT profile FROM profiles")]


def menu_of(config: Config) -> Menu:
    names, shares = name_budgets(config.forms.split(","), None)
    forms = tuple(map(Form.parse_stored, names))
    return Menu(
        forms, (Tier.GPU, Tier.HOST), 1000, groups=layer_groups(forms, shares, testbed().num_layers, MAX_COUNTS)
    )


def hull_of(menu: Menu, profile: Profile, tier: Tier) -> set[Form]:
    """Forms on the hull of a context by bytes on a tier and measured quality, from the exact one down to nothing."""
    sizes = menu.sizes(profile.num_tokens, 4, tier)
    points = [
        (size, 1.0 if form == EXACT else profile.forms[form].mean, index)
        for index, (form, size) in enumerate(zip(menu.forms, sizes, strict=True))
        if form == EXACT or form in profile.forms
    ]
    return {menu.forms[index] for _, _, index in upper_hull([*points, (0, 0.0, -1)]) if index >= 0}


def hull_lines(config: Config, profiles: list[Profile]) -> Iterator[Line]:
    """A form that is on the hulls of few contexts lies there by chance of eight questions."""
    menu = menu_of(config)
    for tier, where in ((Tier.GPU, "GPU, where a node takes the slots of its fullest layer"), (Tier.HOST, "below it")):
        hulls = [hull_of(menu, profile, tier) for profile in profiles]
        counts = {form: sum(form in hull for hull in hulls) for form in menu.forms[1:]}
        told = ", ".join(f"{_short(form)} {counts[form]}" for form in menu.forms[1:])
        yield Line(
            f"forms on the measured hulls of {len(profiles)} contexts, {where}",
            "reported",
            f"{told}; with layer budgets on {sum(any(f.is_uneven for f in hull) for hull in hulls)}",
            bool(profiles),
        )


def bytes_at(menu: Menu, profiles: list[Profile], tier: Tier, quality: float, *, has_budgets: bool) -> float:
    """Share of the exact bytes at which the hull of the means over all contexts has a quality: between two forms of it
    some contexts are in the one, some in the other."""
    points = list[tuple[int, float, int]]()
    for index, form in enumerate(menu.forms):
        size = sum(menu.sizes(profile.num_tokens, 4, tier)[index] for profile in profiles)
        qualities = [1.0 if form == EXACT else profile.forms[form].mean for profile in profiles]
        if has_budgets or not form.is_uneven:
            points.append((size, sum(qualities) / len(qualities), index))
    hull = upper_hull([*points, (0, 0.0, -1)])[::-1]
    return float(np.interp(quality, [point[1] for point in hull], [point[0] for point in hull])) / hull[-1][0]


def bytes_lines(config: Config, profiles: list[Profile]) -> Iterator[Line]:
    menu = menu_of(config)
    for tier, where in ((Tier.GPU, "slots on the GPU"), (Tier.HOST, "bytes below the GPU")):
        pairs = {
            quality: [bytes_at(menu, profiles, tier, quality, has_budgets=has_budgets) for has_budgets in (True, False)]
            for quality in QUALITIES
        }
        told = ", ".join(f"{quality:g}: {ours:.0%} and {theirs:.0%}" for quality, (ours, theirs) in pairs.items())
        yield Line(
            f"{where}, of those of exact KV, with and without layer budgets, at equal mean quality of {len(profiles)} "
            "contexts",
            "fewer with them" if tier != Tier.GPU else "reported",
            told,
            tier == Tier.GPU or all(ours < theirs for ours, theirs in pairs.values()),
        )


def equal_quality(summary: Summary) -> Line:
    ours, theirs = curve(summary, WITH, 0.0), curve(summary, WITHOUT, 0.0)
    found = gaps(ours, theirs)
    told = ", ".join(
        f"{gap.ratio:.2f}x at {gap.quality:.3f} ({1e3 * gap.ttft_s:.0f} and {1e3 * gap.other_ttft_s:.0f} ms)"
        for gap in found
    )
    points = "; ".join(_point(cell) for cell in summary.at(0.0))
    return Line(
        "mean TTFT of the menu without layer budgets over that of the one with them, at equal token F1, one client",
        "reported",
        f"{told or 'no quality that both reach'}; {points}",
        bool(ours.points) and bool(theirs.points),
    )


def resident(summary: Summary) -> Line:
    """Share of the tokens held that are in such forms, by alpha."""
    told = []
    for cell in summary.at(0.0):
        if cell.kind in WITH:
            tokens = [(form, each) for forms in (cell.held.forms or {}).values() for form, each in forms.items()]
            total = sum(each for _, each in tokens)
            uneven = sum(each for form, each in tokens if ":" in form)
            told.append(f"{cell.system} {uneven / total if total else 0.0:.0%}")
    return Line("tokens resident in forms with layer budgets after the runs", "reported", ", ".join(told), bool(told))


def _point(cell: Cell) -> str:
    ttft, quality = cell.ttft.mean_s, cell.quality("f1_full_cache")
    shown = "?" if ttft is None else f"{1e3 * ttft:.0f} ms"
    return f"{cell.system} {shown}, F1 {'?' if quality is None else f'{quality:.3f}'}"


def _short(form: Form) -> str:
    """Without the hash of its budget's shares."""
    return str(form).rpartition("-")[0] if form.is_uneven and "-" in form.budget else str(form)
