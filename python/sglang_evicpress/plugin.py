"""The ``sglang.srt.plugins`` entry point. Every SGLang process imports it, flag or no flag."""

from __future__ import annotations

import multiprocessing
import os


def load() -> None:
    """Add the kv flags in the main process; in a child of a server that uses them, install its hooks.

    ``SGLANG_EVICPRESS=attention``, set by hand, gives a server without kv policy our CPU attention and nothing else:
    the stock half of a paired measurement.

    SGLang logs what a plugin raises and goes on, but for SystemExit: what goes wrong in a child becomes one.
    """
    from sglang_evicpress.patches import install, server_args

    if multiprocessing.parent_process() is None:
        server_args.add_flags()
    elif (mode := os.environ.get(install.ENVIRONMENT_FLAG)) in ("1", "attention"):
        try:
            install.install_scheduler() if mode == "1" else install.install_attention()
        except Exception as error:
            raise SystemExit(
                f"sglang-evicpress could not install its hooks in this process ({error!r}): "
                "start without --kv-policy and report this"
            ) from error
