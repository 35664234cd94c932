"""The demo on a folder whose figures are known: its table, its bars, its page and its tree."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import orjson
import pytest
from evicbench.demo import __main__ as demo
from evicbench.demo.page import PAGE, tree, write_page
from evicbench.demo.report import opening, report, rows, stacked
from evicbench.paths import BENCH
from tests.unit.benchmark.raw import requests, write_plan, write_run, write_scores

from sglang_evicpress.benchmark.config import load_config
from sglang_evicpress.benchmark.results import read_results
from sglang_evicpress.benchmark.summary import Summary, summarise
from sglang_evicpress.cli.parsers import bench_serve

CONFIG = BENCH / "configs" / "demo.yaml"
SYSTEMS = {
    "full-cache+attention": ("full-cache+attention", 0.01, 1.0, {"device": 100}),
    "lru+attention": ("lru+attention", 0.4, 1.0, {"device": 20}),
    "tiers-lru": ("tiers-lru", 0.2, 1.0, {"device": 20, "host": 30, "storage": 40}),
    "evicpress a=1": ("evicpress", 0.1, 0.5, {"device": 50, "host": 40}),
}
NODES: list[dict[str, Any]] = [
    {
        "id": 1,
        "parent_id": None,
        "start": 0,
        "num_tokens": 100,
        "num_hits": 1,
        "form": "knorm@0.5+int4",
        "tier": "host",
    },
    {"id": 2, "parent_id": 1, "start": 100, "num_tokens": 80, "num_hits": 1, "form": "exact", "tier": "gpu"},
    {"id": 3, "parent_id": 1, "start": 100, "num_tokens": 300, "num_hits": 1, "form": "exact", "tier": "ssd"},
    {"id": 4, "parent_id": 3, "start": 400, "num_tokens": 9, "num_hits": 1, "form": "exact", "tier": "gpu"},
]


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    write_plan(tmp_path, {name: kind for name, (kind, *_) in SYSTEMS.items()}, repetitions=1, rates=[0])
    for name, (kind, ttft_s, _, tiers) in SYSTEMS.items():
        answers = ["the same"] * 3 + ["another" if kind == "evicpress" else "the same"]
        lines = requests([ttft_s] * 4, answers, cached_tokens=sum(tiers.values()), cached_by_tier=tiers)
        path = write_run(tmp_path, name, 0, lines)
        if kind == "evicpress":
            path.with_suffix(".tree.json").write_bytes(orjson.dumps(NODES))
    write_scores(tmp_path, [(name, 0, 0, i, quality) for name, (_, _, quality, _) in SYSTEMS.items() for i in range(4)])
    return summarise(read_results(tmp_path))


def test_the_table_has_a_row_for_each_of_four(summary: Summary) -> None:
    assert rows(summary) == [
        ["lru", "400", "400", "20.0 %", "1.000", "100.0 %"],
        ["lru over tiers", "200", "200", "90.0 %", "1.000", "100.0 %"],
        ["evicpress", "100", "100", "90.0 %", "0.500", "75.0 %"],
        ["full cache", "10.0", "10.0", "100.0 %", "1.000", "100.0 %"],
    ]


def test_the_report_says_where_evicpress_is_slower_too(summary: Summary) -> None:
    text = "\n".join(report(summary, Path("index.html"), 300.0))
    for ratio, name in (("0.25", "lru"), ("0.50", "lru over tiers"), ("10.00", "full cache")):
        assert f"mean TTFT of evicpress is {ratio} times that of {name} (95 %" in text
    bars = dict(re.findall(r"^  (\S[\w ]+?) +(█+) \d", text, re.MULTILINE))
    assert [len(bars[name]) for name in ("lru", "lru over tiers", "evicpress", "full cache")] == [48, 24, 12, 1]
    assert "index.html" in text and "tables.md" in text and "300 s in all" in text


def test_a_bar_of_parts_has_the_width_of_the_whole() -> None:
    assert stacked({"gpu": 0.5, "host": 0.25, "ssd": 0.0, "computed": 0.25}) == "█" * 24 + "▓" * 12 + "·" * 12
    assert len(stacked({"gpu": 1 / 3, "host": 1 / 3, "ssd": 1 / 3, "computed": 0.0})) == 48


def test_the_page_needs_no_network_and_shows_table_plots_and_tree(summary: Summary) -> None:
    text = write_page(summary).read_text()
    assert not re.search(r"(src|href)=.?(https?:)?//|@import|<script", text)
    assert "<td>evicpress<td>100<td>100<td>90.0 %" in text
    assert text.count("<svg") == 2 and "token F1 with the answer of the full cache" in text


def test_a_node_spans_its_leaves_and_shows_what_it_kept() -> None:
    shapes = re.findall(r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" height="(\d+)" fill="([^"]+)"', tree(NODES))
    wide = [(float(x), int(y), round(float(width)), int(height)) for x, y, width, height, _ in shapes]
    assert wide == [
        *((240.0, 0, 191, 12), (240.0, 0, 191, 12)),
        *((240.0, 14, 719, 12), (240.0, 14, 719, 12)),
        *((0.0, 0, 239, 26), (0.0, 0, 120, 26)),
    ]
    assert len({colour for *_, colour in shapes}) == 3
    assert "3 nodes; 1 of fewer than 64 tokens" in tree(NODES)


def test_what_begins_is_said_with_the_sizes_of_the_config() -> None:
    config = load_config(CONFIG)
    text = "\n".join(opening(config, Path("/out")))
    assert (
        f"{config.workload.requests} questions" in text and f"SSD ({config.memory.ssd:.0%})" in text and "/out" in text
    )


def test_it_runs_the_benchmark_by_words_that_its_command_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[argparse.Namespace] = []

    def serve(argv: Sequence[str]) -> int:
        given.append(bench_serve().parse_args(argv))
        return 3

    monkeypatch.setattr(demo, "serve", create_autospec(demo.serve, side_effect=serve))
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path)])
    assert demo.main() == 3
    (tmp_path / PAGE).touch()
    assert demo.main() == 3
    assert [(args.out, args.fresh) for args in given] == [(tmp_path, False), (tmp_path, True)]
    assert given[0].config.name == "demo.yaml" and str(tmp_path) in capsys.readouterr().out
