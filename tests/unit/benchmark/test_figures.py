"""The figures, run as a user runs them, on a folder whose figures are known."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
from tests.unit.benchmark.loads import good_runs, write_load
from tests.unit.benchmark.raw import request, requests, write_plan, write_run, write_scores

SYSTEMS = {
    "full-cache": ("full-cache", 0.05, 1.0),
    "prefill-only": ("prefill-only", 0.8, 1.0),
    "keydiff@0.2+lru": ("fixed", 0.2, 0.6),
    "keydiff@0.5+lru": ("fixed", 0.4, 0.9),
    "adaptcache": ("adaptcache", 0.15, 0.75),
    "evicpress a=1": ("evicpress", 0.1, 0.9),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two families, rates 0, 1 and 2: TTFT grows by its own value with each request/s, quality is always the same."""
    write_plan(tmp_path, {name: kind for name, (kind, _, _) in SYSTEMS.items()}, repetitions=1, rates=[0, 1, 2])
    tiers = {"device": 10, "host": 20, "storage": 30}
    scores = []
    for name, (kind, ttft_s, quality) in SYSTEMS.items():
        for rate in (0, 1, 2):
            lines = [
                request(
                    *(index, (1 + rate) * ttft_s),
                    **{"family": "notes" if index % 2 else "titles", "cached_tokens": 60, "cached_by_tier": tiers},
                )
                for index in range(4)
            ]
            held = {"gpu": {"exact": {"tokens": 10}, "keydiff@0.5": {"tokens": 30}}, "ssd": {"exact": {"tokens": 5}}}
            write_run(tmp_path, name, rate, lines, resident=held if kind == "evicpress" else None)
            scores += [(name, 0, float(rate), index, quality) for index in range(4)]
    write_scores(tmp_path, scores)
    return tmp_path


@pytest.fixture
def draw(folder: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Runs a script on the folder; the result is the text of a table it wrote, beside a picture."""

    def run(script: str, *options: str, table: str | None = None) -> str:
        monkeypatch.setattr(sys, "argv", [script, str(folder), *options])
        runpy.run_module(f"sglang_evicpress.benchmark.figures.{script}", run_name="__main__")
        name = table or script
        picture = (folder / "figures" / f"{name}.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000
        text = (folder / "figures" / f"{name}.md").read_text()
        for said in ("20 contexts, 50000 tokens", "GPU pool 4000 tokens (8 %)", "500 MB/s", "commit 0123abc"):
            assert said in text
        return text

    return run


def test_ttft_quality_has_a_row_for_each_setting_and_level(draw) -> None:  # type: ignore[no-untyped-def]
    text = draw("ttft_quality")
    assert "| one client | keydiff@0.5+lru | 0.900 | 400 | 8.00 (8.00 to 8.00) | yes |" in text
    assert "| 2 requests/s | keydiff@0.2+lru | 0.600 | 600 | 4.00 (4.00 to 4.00) | yes |" in text
    assert "| 1 requests/s | fixed | 0.900 to 0.900 | 4.00x to 4.00x | none | - |" in text


def test_families_are_shown_at_one_level(draw) -> None:  # type: ignore[no-untyped-def]
    text = draw("ttft_quality", "--rate", "2", table="families")
    assert text.startswith("2 requests/s.")
    for panel in ("all, 2 requests/s", "notes", "titles"):
        assert f"| {panel} | evicpress a=1 | 0.900 | 300 | 2.00 (2.00 to 2.00) | yes |" in text


def test_rates_leave_out_what_is_not_good_enough(draw) -> None:  # type: ignore[no-untyped-def]
    text = draw("rates")
    assert "keydiff@0.2+lru" not in text
    assert "adaptcache" not in text
    assert "| keydiff@0.5+lru | 2 | 1.00 | 1200 | 1200 | 100 | 0.900 |" in text
    assert "| evicpress a=1 | 0.00 | 1.00 |" in text  # 100 ms are the full cache's twice, and its own grow twofold by 1
    assert "| prefill-only | 0.00 | 1.00 |" in text


def test_hits_are_shown_by_tier(draw) -> None:  # type: ignore[no-untyped-def]
    assert "| adaptcache | 60.0 % | 10.0 % | 20.0 % | 30.0 % | 40.0 % | 0.750 | 300 |" in draw("hits")


def test_forms_are_shown_by_tier(draw) -> None:  # type: ignore[no-untyped-def]
    text = draw("forms")
    assert "| system | tier | tokens | mean kept fraction | exact | keydiff@0.5 |" in text
    assert "| evicpress a=1 | gpu | 40 | 0.62 | 25.0 % | 75.0 % |" in text
    assert "| evicpress a=1 | ssd | 5 | 1.00 | 100.0 % | 0.0 % |" in text


def test_adaptcache_is_compared_with_fixed_presses(draw) -> None:  # type: ignore[no-untyped-def]
    text = draw("adaptcache")
    assert "evicpress" not in text.replace("`evicpress bench serve`", "")
    # 0.75 is half-way between 0.6 in 0.4 s and 0.9 in 0.8 s; adaptcache takes 0.3 s
    assert "| all | fixed | 0.750 to 0.750 | 2.00x to 2.00x | none | - |" in text


def test_a_level_that_was_not_run_is_refused(draw) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(SystemExit, match="rate 7 was not run: expected one of 0, 1, 2"):
        draw("hits", "--rate", "7")


def test_load_is_drawn_against_what_is_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_load(tmp_path, good_runs(1))
    monkeypatch.setattr(sys, "argv", ["under_load", str(tmp_path)])
    runpy.run_module("sglang_evicpress.benchmark.figures.under_load", run_name="__main__")
    assert (tmp_path / "figures" / "under_load.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "figures" / "under_load.md").read_text()
    assert "## Under load: 8/s, 2 x saturation" in text and "| evicpress a=0.5 | 8.00 | 4.00 | 4.00 |" in text


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("adaptcache", "has no run of adaptcache: name it among the systems of the benchmark"),
        ("hits", "says of no request at rate 1 how much of it was cached"),
        ("forms", "does not say at rate 1 which forms were resident"),
        ("rates", "has no setting whose f1_full_cache is 0.8 at every rate"),
        ("under_load", "has no rates at multiples of saturation: expected a config with a load"),
    ],
)
def test_a_figure_without_its_data_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: str
) -> None:
    write_plan(tmp_path, {"lru": "lru"}, repetitions=1, rates=[1])
    monkeypatch.setattr(sys, "argv", [script, str(tmp_path)])
    with pytest.raises(SystemExit, match="has no complete run: expected one at least"):
        runpy.run_module(f"sglang_evicpress.benchmark.figures.{script}", run_name="__main__")
    write_run(tmp_path, "lru", 1, requests([None, None]))
    with pytest.raises(SystemExit, match=said):
        runpy.run_module(f"sglang_evicpress.benchmark.figures.{script}", run_name="__main__")


def test_of_one_kind_the_setting_with_the_lower_ttft_is_drawn_and_unknown_tiers_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(tmp_path, {"keydiff@0.8+lru": "fixed", "keydiff@0.9+lru": "fixed"}, repetitions=1, rates=[1])
    scores = []
    for system, ttft_s in (("keydiff@0.8+lru", 0.4), ("keydiff@0.9+lru", 0.3)):
        write_run(tmp_path, system, 1, requests([ttft_s] * 2, cached_tokens=50))
        scores += [(system, 0, 1.0, index, 1.0) for index in range(2)]
    write_scores(tmp_path, scores)
    for script in ("rates", "hits"):
        monkeypatch.setattr(sys, "argv", [script, str(tmp_path)])
        runpy.run_module(f"sglang_evicpress.benchmark.figures.{script}", run_name="__main__")
    text = capsys.readouterr().out
    assert "| keydiff@0.9+lru | 1 | 1.00 | 300 |" in text
    assert "| keydiff@0.8+lru | 50.0 % | - | - | - | 50.0 % |" in text
