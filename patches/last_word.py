"""Refusals by scheduler processes, as the last thing that the main process prints.

A scheduler that cannot serve leaves one sentence in a file and ends (``spawn.refusal``); SGLang then raises in the
main process over a scheduler that died, with a traceback that blames the OOM killer. Here ``sglang.Engine`` raises a
UnsupportedError with the sentence instead, and the command prints it and exits with status 2. Touches
``Engine._launch_subprocesses`` and ``http_server.launch_server``.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

from sglang_evicpress.patches.unsupported import UnsupportedError

LAUNCH_SUBPROCESSES = "sglang.srt.entrypoints.engine.Engine._launch_subprocesses"
LAUNCH_SERVER = "sglang.srt.entrypoints.http_server.launch_server"
STATUS = 2


def say(error: UnsupportedError) -> NoReturn:
    """Print a refusal as the last line of this process, and end it with status 2, as argparse does."""
    logging.getLogger("sglang.srt.utils.common").setLevel(logging.WARNING)  # it logs that it ends all processes
    print(f"sglang: error: {error}", file=sys.stderr, flush=True)
    raise SystemExit(STATUS)


def around_launch_subprocesses(original: Callable[..., Any], cls: Any, server_args: Any, *args: Any, **kw: Any) -> Any:
    """AROUND ``Engine._launch_subprocesses``, a class method: raises UnsupportedError where a scheduler refused."""
    if server_args.kv_policy is None:
        return original(cls, server_args, *args, **kw)
    others = set(multiprocessing.active_children())
    with tempfile.TemporaryDirectory(prefix="evicpress-") as folder:
        refusal = Path(folder) / "refusal"
        vars(server_args)["kv_refusal_file"] = str(refusal)  # it may be sealed
        try:
            return original(cls, server_args, *args, **kw)
        except RuntimeError:
            if not refusal.exists():
                raise
            _end([child for child in multiprocessing.active_children() if child not in others])
            raise UnsupportedError(refusal.read_text(encoding="utf-8")) from None
        finally:
            del vars(server_args)["kv_refusal_file"]


def around_launch_server(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND ``http_server.launch_server``."""
    try:
        return original(*args, **kwargs)
    except UnsupportedError as error:
        say(error)


def _end(children: list[BaseProcess]) -> None:
    """Other ranks may wait for the one that refused, and nobody may print behind it."""
    from sglang.srt.utils import kill_process_tree

    for child in children:
        kill_process_tree(child.pid)
        child.join()
