"""Our own format: a header line, then one line for each request.

``{"format": "evicpress-trace", "version": 1, "block_tokens": N, "name": "..."}`` and then
``{"t": seconds, "tokens": N, "blocks": [ids], "out": N}``; ``name`` and ``out`` may be left out. Unlike the
other formats it knows full blocks only, and takes ``t`` as it stands.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from sglang_evicpress.files import WholeFile
from sglang_evicpress.traces.base import Request, Trace, count, ids, member, number, short, text

FORMAT = "evicpress-trace"
VERSION = 1


class Jsonl:
    """One line, one request; the header is given when it is made. ValueError when the header is not ours."""

    relative = False

    def __init__(self, header: Mapping[str, object]) -> None:
        if header["format"] != FORMAT:
            raise ValueError(f"'format' is {short(header['format'])}: expected {FORMAT!r}")
        version = member(header, "version")
        if version != VERSION or isinstance(version, bool):
            raise ValueError(f"'version' is {short(version)}: expected {VERSION}")
        self.block_tokens = count(header, "block_tokens", least=1)
        self.name = text(header, "name") if "name" in header else None
        self._shared: dict[int, int] = {}

    def requests(self, record: Mapping[str, object]) -> Sequence[Request]:
        arrival_s = float(number(record, "t"))
        num_tokens = count(record, "tokens")
        output_tokens = count(record, "out") if "out" in record else 0
        blocks = ids(record, "blocks")
        if len(blocks) * self.block_tokens > num_tokens:
            raise ValueError(
                f"'blocks' has {len(blocks)} full blocks of {self.block_tokens} tokens "
                f"for a prompt of {num_tokens} tokens"
            )
        shared = tuple(map(self._shared.setdefault, blocks, blocks))
        return (Request(arrival_s, shared, num_tokens, output_tokens),)


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write ``trace`` so that ``read_trace`` gives it back (``num_skipped`` apart).

    The file appears whole or not at all. ValueError when the trace has no request, or one that could not be read back,
    and for a path that ``WholeFile`` refuses; then nothing is left behind.
    """
    if not trace.requests:
        raise ValueError(f"trace {trace.name!r} has no requests: nothing to write to {path}")
    header = {"format": FORMAT, "version": VERSION, "block_tokens": trace.block_tokens, "name": trace.name}
    check = Jsonl(header)
    with WholeFile(os.fspath(path)) as file:
        file.write(header)
        for index, request in enumerate(trace.requests):
            record = {
                "t": float(request.arrival_s),
                "tokens": request.num_tokens,
                "blocks": list(request.blocks),
                "out": request.output_tokens,
            }
            try:
                check.requests(record)
            except ValueError as error:
                raise ValueError(f"request {index} of trace {trace.name!r}: {error}") from None
            file.write(record)
        file.commit()
