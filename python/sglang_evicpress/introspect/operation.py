"""An operation of ``/evicpress/*``: its route, its access, its arguments and its answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from sglang_evicpress.introspect.arguments import IntrospectionError, Json, accept_only

Question: TypeAlias = Callable[[Any], Json]
"""Asks a cache, between two scheduler steps."""

Arguments: TypeAlias = Mapping[str, object]

PREFIX = "/evicpress"
VERSION = "v1"
"""Of paths, arguments and answers: within one, nothing that is there goes or changes its meaning."""

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


def stable_path(path: str) -> str:
    """The path with its version in it, which ``path`` is short for."""
    return f"{PREFIX}/{VERSION}{path.removeprefix(PREFIX)}"


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument: its reader, which raises IntrospectionError 400, and what is published of it.

    ``schema`` is JSON Schema, ``other_name`` a second name that is accepted for it.
    """

    name: str
    read: Callable[[Arguments, str], object]
    schema: Json
    text: str
    is_required: bool = False
    other_name: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, self.other_name) if self.other_name else (self.name,)

    def name_in(self, arguments: Arguments) -> str:
        """The name that a request uses. Raises IntrospectionError 400 where it uses both."""
        used = [name for name in self.names if name in arguments]
        if len(used) > 1:
            raise IntrospectionError(400, f"{' and '.join(used)} are two names of one argument: expected one of them")
        return used[0] if used else self.name


@dataclass(frozen=True, slots=True)
class Operation:
    """One row of ``OPERATIONS``.

    ``read`` checks the arguments (values from JSON or, as text, from a URL) without a cache; its result asks one.
    Without a ``path`` it has no route and only our own code asks it. ``may_conflict``: a ValueError of the cache means
    that it cannot be done now (409). ``takes_query``: a POST may give its arguments in the URL instead of a JSON body.
    ``text`` and ``answer``, a JSON Schema, are what is published of it, with ``more_statuses`` beyond the usual ones.
    """

    name: str
    read: Callable[[Arguments], Question]
    method: str = "GET"
    path: str = ""
    access: Access = Access.READ
    may_conflict: bool = False
    takes_query: bool = False
    max_body_bytes: int = MAX_BODY_BYTES
    text: str = ""
    answer: Json = field(default_factory=dict)
    more_statuses: tuple[int, ...] = ()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """Arguments that its reader says it takes."""
        return self.read.arguments if isinstance(self.read, Reader) else ()


@dataclass(frozen=True, slots=True)
class Reader:
    """Reader of the arguments of ``method``, one of the protocols' here, which the question then calls.

    ``always`` are read whether they are given or not, as its positional arguments; ``named`` those of its keywords that
    a request has. ``check`` refuses what does not go together.
    """

    method: Callable[..., Json]
    always: tuple[Argument, ...] = ()
    named: tuple[Argument, ...] = ()
    check: Callable[[Arguments], None] | None = None

    @property
    def arguments(self) -> tuple[Argument, ...]:
        return (*self.always, *self.named)

    def __call__(self, arguments: Arguments) -> Question:
        others = (each.other_name for each in self.arguments if each.other_name)
        accept_only(arguments, *(each.name for each in self.arguments), *others)
        if self.check is not None:
            self.check(arguments)
        values = [each.read(arguments, each.name_in(arguments)) for each in self.always]
        given = [(each, each.name_in(arguments)) for each in self.named]
        named = {each.name: each.read(arguments, name) for each, name in given if name in arguments}
        return lambda cache: getattr(cache, self.method.__name__)(*values, **named)


def asks(
    method: Callable[..., Json],
    *always: Argument,
    named: tuple[Argument, ...] = (),
    check: Callable[[Arguments], None] | None = None,
) -> Reader:
    """See ``Reader``."""
    return Reader(method, always, named, check)


def by_name(*operations: Operation) -> dict[str, Operation]:
    return {operation.name: operation for operation in operations}
