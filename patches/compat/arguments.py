"""Our flags on ServerArgs as each release makes it, behind one interface; ``ARGUMENTS`` is of the installed one."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from sglang_evicpress.patches.compat import arguments_0_5_15, arguments_0_5_23
from sglang_evicpress.patches.hook_points import of_release

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

Resolution = Callable[["ServerArgs"], None]
AroundResolution = Callable[[Resolution, "ServerArgs"], None]
"""Called with SGLang's own resolution of a ServerArgs, and with that ServerArgs."""
Told = Callable[[Callable[[], "ServerArgs"]], "ServerArgs"]
"""Makes a ServerArgs for a command line, which is told what is refused."""


class Arguments(Protocol):
    """One module of this folder for all releases that share these answers."""

    def add_flags(self, cls: type[ServerArgs], around_resolution: AroundResolution, told: Told) -> None:
        """Let ServerArgs have the kv flags: None where they are not given. Called once in a process."""

    def chosen(self, server_args: ServerArgs) -> Any:
        """A resolved ServerArgs, with the values that are in effect as attributes."""

    def model_config(self, server_args: ServerArgs) -> Any:
        """SGLang's ModelConfig of a resolved ServerArgs; None for a placeholder instead of a model."""


def arguments_of(version: str) -> Arguments:
    """The module for a version."""
    choices: dict[str, Arguments] = {"0.5.15": arguments_0_5_15, "0.5.18": arguments_0_5_23}
    return of_release(version, choices)


ARGUMENTS = arguments_of(importlib.metadata.version("sglang"))
