"""Traces as files of our own format."""

from __future__ import annotations

from pathlib import Path

import orjson

from sglang_evicpress.traces import Trace


def write_trace(trace: Trace, path: Path) -> None:
    """``read_trace`` gives it back, ``num_skipped`` apart."""
    header = {"format": "evicpress-trace", "version": 1, "block_tokens": trace.block_tokens, "name": trace.name}
    lines = [
        {"t": request.arrival_s, "tokens": request.num_tokens, "blocks": request.blocks, "out": request.output_tokens}
        for request in trace.requests
    ]
    path.write_bytes(b"\n".join(map(orjson.dumps, (header, *lines))) + b"\n")
