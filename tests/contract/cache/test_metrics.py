"""Series in the way that SGLang's processes share them: written in one, read by a collector over their folder."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.metrics_reporter import SchedulerMetricsReporter
from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector

from sglang_evicpress.patches.cache.metrics import FigureReader, metrics_of

pytestmark = pytest.mark.sglang

PROGRAM = """
import json
from sglang_evicpress.patches.cache.metrics import INTERVAL_S, PAUSE_S, Metrics
from prometheus_client import CollectorRegistry, generate_latest, multiprocess

now_s, figures, num_read = 0.0, {}, 0

def read():
    global num_read
    num_read += 1
    if figures is None:
        raise OSError("the disk is full")
    return figures

def served():
    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]

metrics = Metrics({"model_name": "m", "tp_rank": 0}, read, lambda: now_s)
rounds = []
for number, (hits, forms) in enumerate([(3, {"exact": 5}), (7, {"keydiff@0.5": 2}), (2, {})]):
    figures = {
        "stats": {"served": {"tokens": {"gpu": {"exact": hits}}}, "quality": {"target": 0.97, "predicted": None}},
        "tiers": {"tiers": {"gpu": {"forms": {form: {"bytes": size} for form, size in forms.items()}}}},
    }
    now_s = number * INTERVAL_S
    metrics.publish_when_due()
    metrics.publish_when_due()
    rounds.append(served())
figures, now_s = None, 100.0
metrics.publish_when_due()  # fails, and is left alone for a while
now_s += PAUSE_S / 2
metrics.publish_when_due()
print(json.dumps({"rounds": rounds, "num_read": num_read}))
"""
MODEL, RANK = 'model_name="m"', 'tp_rank="0"'


def test_series_are_read_by_the_collector_of_sglangs_main_process(tmp_path: Path) -> None:
    env = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    first, second, third = told["rounds"]
    assert told["num_read"] == 3 + 1  # once a second at most
    assert "no series are published for 60 s: OSError('the disk is full')" in done.stderr
    hit = f'sglang_evicpress_hit_tokens_total{{form="exact",{MODEL},tier="gpu",{RANK}}}'
    assert f"{hit} 3.0" in first and f"{hit} 7.0" in second
    assert f"{hit} 9.0" in third  # a source that counts anew
    exact = f'sglang_evicpress_stored_bytes{{form="exact",{MODEL},tier="gpu",{RANK}}}'
    pressed = f'sglang_evicpress_stored_bytes{{form="keydiff@0.5",{MODEL},tier="gpu",{RANK}}}'
    assert f"{exact} 5.0" in first and f"{exact} 0.0" in second and f"{pressed} 2.0" in second
    assert f"sglang_evicpress_quality_target{{{MODEL},{RANK}}} 0.97" in first
    assert not any(line.startswith("sglang_evicpress_quality_predicted") for line in first)


def test_the_scheduler_has_what_is_read_of_it() -> None:
    assert "metrics_collector" in Scheduler.init_metrics_collector.__code__.co_names
    assert "metrics_reporter" in Scheduler.init_metrics_reporter.__code__.co_names
    assert "labels" in SchedulerMetricsCollector.__init__.__code__.co_names
    reporter = inspect.getsource(SchedulerMetricsReporter)
    assert "self.current_scheduler_metrics_enabled =" in reporter


@pytest.mark.parametrize("has_reporter", [False, True])
def test_a_server_without_metrics_has_no_series(has_reporter: bool) -> None:
    reporter = SimpleNamespace(current_scheduler_metrics_enabled=False) if has_reporter else None
    scheduler = SimpleNamespace(metrics_reporter=reporter, metrics_collector=None)
    assert metrics_of(scheduler, SimpleNamespace(), dict, {}) is None


def test_threads_are_read_by_their_names() -> None:
    stats = {"threads": [{"name": "load", "num_failures": 2}], "num_nodes": 1}
    reader = FigureReader(lambda: stats, lambda: {"queue": {}}, lambda: {"held_slots": 0}, {"profiled": 1})
    figures = reader()
    assert figures["threads"] == {"load": {"name": "load", "num_failures": 2}}
    assert set(figures) == {"stats", "tiers", "budgets", "profiler", "threads"}
