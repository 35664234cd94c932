"""ServerArgs up to SGLang 0.5.17: a dataclass that is resolved when it is made.

It derives its command line from its fields and drops every other attribute, so the flags become fields of the class
itself: class identity, pickling, ``--config``, Engine keywords, ``replace`` and ``asdict`` keep working.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

from sglang_evicpress.flags import FLAGS, Flag

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs


def flag_fields() -> type[Any]:
    """A dataclass with a field for each flag, from which SGLang derives a command line."""
    from sglang.srt.arg_groups.arg_utils import Arg

    def field_of(flag: Flag) -> tuple[str, Any, Any]:
        return flag.name, Annotated[flag.kind | None, Arg(help=flag.help)], dataclasses.field(default=None)

    return dataclasses.make_dataclass("KvFlags", map(field_of, FLAGS))


def add_flags(
    cls: type[ServerArgs],
    around_resolution: Callable[[Callable[[ServerArgs], None], ServerArgs], None],
    told: Callable[[Callable[[], ServerArgs]], ServerArgs],
) -> None:
    for field in dataclasses.fields(flag_fields()):
        cls.__dataclass_fields__[field.name] = field
        cls.__annotations__[field.name] = field.type
        setattr(cls, field.name, field.default)
    _wrap_init(cls)
    _wrap_post_init(cls, around_resolution)
    _wrap_from_cli_args(cls, told)


def chosen(server_args: ServerArgs) -> Any:
    return server_args


def model_config(server_args: ServerArgs) -> Any:
    return getattr(server_args, "model_config", None)


def _wrap_init(cls: type[ServerArgs]) -> None:
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: ServerArgs, *args: Any, **kwargs: Any) -> None:
        for flag in FLAGS:
            setattr(self, flag.name, kwargs.pop(flag.name, None))
        original(self, *args, **kwargs)

    cls.__init__ = __init__


def _wrap_post_init(
    cls: type[ServerArgs], around_resolution: Callable[[Callable[[ServerArgs], None], ServerArgs], None]
) -> None:
    original = cls.__post_init__

    @functools.wraps(original)
    def __post_init__(self: ServerArgs) -> None:
        around_resolution(original, self)

    cls.__post_init__ = __post_init__


def _wrap_from_cli_args(cls: type[ServerArgs], told: Callable[[Callable[[], ServerArgs]], ServerArgs]) -> None:
    original = cls.from_cli_args.__func__

    @functools.wraps(original)
    def from_cli_args(cls: type[ServerArgs], args: argparse.Namespace) -> ServerArgs:
        return told(lambda: original(cls, args))

    cls.from_cli_args = classmethod(from_cli_args)
