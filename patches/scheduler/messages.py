"""Messages between the HTTP process and the scheduler.

SGLang's IPC is a closed msgspec union: both types are added to it in both processes. Arguments and answers travel as
JSON bytes, because the union has no room for open dicts.
"""

from __future__ import annotations

from sglang.srt.managers.io_struct import BaseReq


class EvicPressReqInput(BaseReq):
    """The question ``rid``; ``payload`` is a JSON object of arguments."""

    op: str
    payload: bytes = b"{}"


class EvicPressReqOutput(BaseReq):
    """The answer to the question ``rid``: an HTTP status and a JSON body."""

    status: int
    payload: bytes
