"""When requests arrive: the timestamps of a public trace, stretched or squeezed into a run."""

from __future__ import annotations

import random
from datetime import datetime
from pathlib import Path

AZURE = Path(__file__).resolve().parents[4] / "shared/data/traces-azure-llm-2023/AzureLLMInferenceTrace_conv.csv"
"""Beside the repository, where it is there at all: https://github.com/Azure/AzurePublicDataset (CC-BY-4.0)."""

SHAPE = 0.5
"""Of the gamma distribution of made-up gaps: burstier than a Poisson process, as arrivals at chat services are."""


def arrivals(count: int, seconds: float, trace: Path = AZURE) -> tuple[list[float], str]:
    """``count`` times from 0 to ``seconds``, in order, and in words where they are from.

    The first rows of the trace; made up, the same every time, where it is not there or has not as many. Raises
    ValueError for a row that is none of the trace's, or fewer than two times.
    """
    if count < 2 or not seconds > 0.0:
        raise ValueError(f"{count} arrivals in {seconds} s: expected at least two in some time")
    found = read_times(trace, count) if trace.is_file() else []
    if len(found) == count and found[-1] > found[0]:
        took_s = found[-1] - found[0]
        origin = f"the first {count} arrivals of the Azure conversation trace, {took_s:.0f} s made {seconds:.0f} s"
        return _scaled(found, seconds), origin
    draw = random.Random("arrivals")
    times = [0.0]
    for _ in range(count - 1):
        times.append(times[-1] + draw.gammavariate(SHAPE, 1.0))
    return _scaled(times, seconds), f"{count} made-up arrivals (the Azure trace is not there), {seconds:.0f} s"


def read_times(trace: Path, count: int) -> list[float]:
    """Unix seconds of the first rows, at most ``count``, in order."""
    times = []
    with trace.open(encoding="utf-8") as file:
        next(file, None)  # the names of the columns
        for number, line in enumerate(file, start=2):
            if len(times) == count:
                break
            moment, _, _ = line.partition(",")
            try:
                times.append(datetime.fromisoformat(moment[:26]).timestamp())
            except ValueError:
                raise ValueError(f"{trace} line {number} begins with {moment!r:.40}: expected a timestamp") from None
    return sorted(times)


def _scaled(times: list[float], seconds: float) -> list[float]:
    return [(time - times[0]) / (times[-1] - times[0]) * seconds for time in times]
