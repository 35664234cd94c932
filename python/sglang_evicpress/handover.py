"""How a scheduler process learns that its server has a kv policy: from the very ServerArgs it is handed.

SGLang spawns its processes with the pickled ServerArgs and loads plugins once they are unpickled. One with a kv policy
is restored by ``restore``, which leaves a mark in that process; so two engines of one process, or a stock one after one
with a policy, never mix. Standard library only.
"""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")

requested = False


def restore(cls: type[T], state: dict[str, object]) -> T:
    """Unpickle a ServerArgs that has a kv policy and note that this process was handed one."""
    global requested
    requested = True
    server_args = cls.__new__(cls)
    server_args.__dict__.update(state)
    return server_args
