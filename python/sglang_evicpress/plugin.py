"""The ``sglang.srt.plugins`` entry point. Every SGLang process imports it, flag or no flag."""

from __future__ import annotations

import os


def load() -> None:
    """Add the kv flags; in a process that was handed a ServerArgs with a kv policy, install its hooks.

    ``SGLANG_EVICPRESS=attention``, set by hand, gives a server without kv policy our CPU attention and nothing else:
    the stock half of a paired measurement. SGLang logs what a plugin raises and goes on, but for SystemExit: what goes
    wrong with the hooks becomes one.
    """
    from sglang_evicpress import spawn
    from sglang_evicpress.patches import install, server_args

    server_args.add_flags()
    attention_only = os.environ.get(install.ENVIRONMENT_FLAG) == "attention"
    if not spawn.serves_kv() or not (spawn.requested or attention_only):
        return
    try:
        install.install_scheduler() if spawn.requested else install.install_attention()
    except Exception as error:
        raise spawn.refusal(
            f"sglang-evicpress could not install its hooks in this process ({error!r}): "
            "start without --kv-policy and report this"
        ) from error
