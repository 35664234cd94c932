"""ServerArgs of SGLang 0.5.23: a struct whose fields are closed, resolved and sealed by ``resolve_once``.

The flags are attributes beside the fields, as SGLang's own bookkeeping is: they are pickled with it. The command line
and the keywords of ``sglang.Engine`` set them, and resolve at once, so that a refusal comes where it is expected; who
makes a ServerArgs sets ``kv_policy`` and what else it takes as attributes.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_evicpress.flags import FLAGS
from sglang_evicpress.patches.compat.arguments_0_5_15 import flag_fields

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

ENGINE = "sglang.srt.entrypoints.engine"
PLACEHOLDERS = ("none", "dummy")
"""Names instead of a model, for which SGLang resolves next to nothing."""


class Chosen:
    """Values in effect, by the names of ServerArgs' attributes: decisions are kept beside what was given."""

    __slots__ = ("_server_args",)

    def __init__(self, server_args: ServerArgs) -> None:
        self._server_args = server_args

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.arg_groups.overrides import resolution_result

        return resolution_result(self._server_args, name, getattr(self._server_args, name))


def add_flags(
    cls: type[ServerArgs],
    around_resolution: Callable[[Callable[[ServerArgs], None], ServerArgs], None],
    told: Callable[[Callable[[], ServerArgs]], ServerArgs],
) -> None:
    for flag in FLAGS:
        setattr(cls, flag.name, None)
    _wrap_resolution(cls, around_resolution)
    _wrap_command_line(cls, told)
    _wrap_engines()


def chosen(server_args: ServerArgs) -> Any:
    return Chosen(server_args)


def model_config(server_args: ServerArgs) -> Any:
    from sglang.srt.arg_groups.overrides import model_config_of

    return None if server_args.model_path.lower() in PLACEHOLDERS else model_config_of(server_args)


def _wrap_resolution(
    cls: type[ServerArgs], around_resolution: Callable[[Callable[[ServerArgs], None], ServerArgs], None]
) -> None:
    original = cls.resolve_once

    @functools.wraps(original)
    def resolve_once(self: ServerArgs) -> None:
        if getattr(self, "_resolution_finished", False) or getattr(self, "_resolution_failed", False):
            original(self)
            return
        is_accepted = False
        try:
            around_resolution(original, self)
            is_accepted = True
        finally:
            if not is_accepted and getattr(self, "_resolution_finished", False):  # refused for what SGLang chose
                self._resolution_finished, self._resolution_failed = False, True

    cls.resolve_once = resolve_once


def _wrap_command_line(cls: type[ServerArgs], told: Callable[[Callable[[], ServerArgs]], ServerArgs]) -> None:
    from sglang.srt.arg_groups.arg_utils import add_cli_args_from_dataclass

    add, make = cls.add_cli_args, cls.from_cli_args.__func__

    @functools.wraps(add)
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        add(parser)
        add_cli_args_from_dataclass(parser, flag_fields())

    @functools.wraps(make)
    def from_cli_args(cls: type[ServerArgs], args: argparse.Namespace) -> ServerArgs:
        return told(lambda: _with_flags(make(cls, args), vars(args)))

    cls.add_cli_args = staticmethod(add_cli_args)
    cls.from_cli_args = classmethod(from_cli_args)


def _with_flags(server_args: ServerArgs, given: Mapping[str, object]) -> ServerArgs:
    flags = {flag.name: given[flag.name] for flag in FLAGS if given.get(flag.name) is not None}
    for name, value in flags.items():
        setattr(server_args, name, value)
    if flags:
        server_args.resolve_once()
    return server_args


def _wrap_engines() -> None:
    """Each engine loads plugins before it looks at its keywords: those that are imported later do it through us."""
    from sglang.srt import plugins

    original = plugins.load_plugins

    @functools.wraps(original)
    def load_plugins() -> None:
        original()
        _let_engines_take_flags()

    plugins.load_plugins = load_plugins
    _let_engines_take_flags()


def _let_engines_take_flags() -> None:
    engine = getattr(sys.modules.get(ENGINE), "Engine", None)
    if engine is None or not isinstance(engine.server_args_class, type):
        return
    make = engine.server_args_class

    def server_args_class(**given: object) -> ServerArgs:
        flags = {flag.name: given.pop(flag.name) for flag in FLAGS if flag.name in given}
        return _with_flags(make(**given), flags)

    engine.server_args_class = staticmethod(server_args_class)
