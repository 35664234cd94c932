"""The command ``evicpress``. Nothing but argparse is imported until a command has something to do."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from sglang_evicpress.cli.command import COMMANDS, make_parser, split_name
from sglang_evicpress.cli.parser import interrupted_status, say


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit status.

    0 is good, 1 that something was found or failed, 2 bad input or no server, 130 Ctrl-C, 143 SIGTERM. ``--help`` and
    ``--version`` exit.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names of files need not fit the terminal's encoding
    try:
        if (found := split_name(words)) is None:
            make_parser().parse_args(words)  # says what is wrong, or helps
            return 2
        name, rest = found
        if {"-h", "--help"} & set(rest):
            COMMANDS[name].load_parser().parse_args(rest)  # ends here, before what the command runs is imported
        return COMMANDS[name].load_run()(rest)
    except ValueError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt as interrupt:
        say("interrupted")  # while reading the trace, or while writing
        return interrupted_status(interrupt)
    except BrokenPipeError:  # such as `| head`: whoever read the table has gone
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(str(error), 1)


def _fail(message: str, status: int) -> int:
    say(f"error: {message}")
    return status
