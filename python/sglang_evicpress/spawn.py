"""Handover between the main process and a scheduler process: ServerArgs one way, refusals the other.

SGLang spawns its processes with the pickled ServerArgs and loads plugins once they are unpickled. One with a kv policy
is restored by ``restore``, which leaves a mark in that process; so two engines of one process, or a stock one after one
with a policy, never mix. Standard library only.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

OTHER_PROCESSES = (
    "run_detokenizer_process",
    "run_multi_detokenizer_router_process",
    "run_data_parallel_controller_process",
)
"""Functions that SGLang starts processes with, other than schedulers; from 0.5.22 on they load plugins."""

requested = False
refusal_file: str | None = None  # where this process says why it cannot serve; the main process reads it


def restore(make: Callable[..., T], arguments: tuple[object, ...], file: str | None) -> T:
    """Unpickle a ServerArgs that has a kv policy, as it would be without us, and note that this process was handed one.
    ``file``: where it may say why it cannot serve."""
    global requested, refusal_file
    requested, refusal_file = True, file
    return make(*arguments)


def serves_kv() -> bool:
    """False in a process that SGLang has started for other work: it may load plugins too, and has nothing to hook."""
    target = getattr(multiprocessing.current_process(), "_target", None)
    return getattr(target, "__name__", "") not in OTHER_PROCESSES


def refusal(sentence: str) -> SystemExit:
    """To be raised by a process that cannot serve. The main process prints the ``sentence``, last of all
    (patches/last_word.py); where there is none that reads it, Python does when this process ends."""
    if refusal_file is None:
        return SystemExit(sentence)
    unfinished = Path(f"{refusal_file}.{os.getpid()}")
    try:
        unfinished.write_text(sentence, encoding="utf-8")
        unfinished.replace(refusal_file)  # of several ranks any one may be heard
    except OSError:
        return SystemExit(sentence)
    return SystemExit(2)
