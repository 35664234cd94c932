"""Handover between the main process and a scheduler process: ServerArgs one way, refusals the other.

SGLang spawns its processes with the pickled ServerArgs and loads plugins once they are unpickled. One with a kv policy
is restored by ``restore``, which leaves a mark in that process; so two engines of one process, or a stock one after one
with a policy, never mix. Standard library only.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

requested = False
refusal_file: str | None = None  # where this process says why it cannot serve; the main process reads it


def restore(cls: type[T], state: dict[str, object]) -> T:
    """Unpickle a ServerArgs that has a kv policy and note that this process was handed one."""
    global requested, refusal_file
    requested = True
    file = state.get("kv_refusal_file")
    refusal_file = None if file is None else str(file)
    server_args = cls.__new__(cls)
    server_args.__dict__.update(state)
    return server_args


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
