"""Request traces: what asked for which blocks of tokens, and when. Read from files or made up."""

from __future__ import annotations

from sglang_evicpress.traces.base import Reading, Request, Trace
from sglang_evicpress.traces.reader import read_trace

__all__ = ["Reading", "Request", "Trace", "read_trace"]
