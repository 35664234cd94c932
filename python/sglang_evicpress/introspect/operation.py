"""An operation of ``/evicpress/*``: its route, its access, and the reader of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

from sglang_evicpress.introspect.arguments import Json, accept_only

Question: TypeAlias = Callable[[Any], Json]
"""Asks a cache, between two scheduler steps."""

Arguments: TypeAlias = Mapping[str, object]

MAX_BODY_BYTES = 65_536
MAX_PROFILE_BYTES = 1 << 20
MAX_CONTEXT_BYTES = 64 << 20  # of token ids as JSON, where the model's context length is not known


class Access(Enum):
    """Callers of a route.

    OPEN: totals, at a fixed cost. READ: what the cache holds, without prompts, in pages of a bounded cost. ACT: changes
    or full checks, for operators: whoever has the admin key, or, on a server without one, this machine's own users.
    PROMPT and FOLDER: users' prompts, and folders of this machine, never without an admin key.
    """

    OPEN = "open"
    READ = "read"
    ACT = "act"
    PROMPT = "prompt"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of ``OPERATIONS``.

    ``read`` checks the arguments (values from JSON or, as text, from a URL) without a cache; its result asks one.
    Without a ``path`` it has no route and only our own code asks it. ``may_conflict``: a ValueError of the cache means
    that it cannot be done now (409). ``takes_query``: a POST may give its arguments in the URL instead of a JSON body.
    """

    name: str
    read: Callable[[Arguments], Question]
    method: str = "GET"
    path: str = ""
    access: Access = Access.READ
    may_conflict: bool = False
    takes_query: bool = False
    max_body_bytes: int = MAX_BODY_BYTES


def asks(
    method: Callable[..., Json],
    *readers: tuple[str, Callable[[Arguments, str], object]],
    **given: Callable[[Arguments, str], object],
) -> Callable[[Arguments], Question]:
    """Reader of the arguments of ``method``, one of the protocols' here, which the question then calls.

    ``readers`` read its positional arguments by the names that requests give them; ``given`` those of its keywords that
    a request has.
    """

    def read(arguments: Arguments) -> Question:
        accept_only(arguments, *(name for name, _ in readers), *given)
        values = [reader(arguments, name) for name, reader in readers]
        named = {name: reader(arguments, name) for name, reader in given.items() if name in arguments}
        return lambda cache: getattr(cache, method.__name__)(*values, **named)

    return read


def by_name(*operations: Operation) -> dict[str, Operation]:
    return {operation.name: operation for operation in operations}
