"""The settings that a ServerArgs with kv flags stands for."""

from __future__ import annotations

from typing import Any

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.flags import FLAGS

DEPENDENT_FLAGS = tuple(flag.name for flag in FLAGS if flag.name != "kv_policy")
"""Those that do nothing without --kv-policy."""


def config_of(server_args: Any) -> EvicPressConfig:
    """The checked settings of a ServerArgs that has ``kv_policy`` set. Raises ValueError, one sentence."""
    flags: dict[str, Any] = {flag.name.removeprefix("kv_"): getattr(server_args, flag.name) for flag in FLAGS}
    is_silent = flags.pop("disable_online_profiling")
    return EvicPressConfig.from_flags(
        flags.pop("policy"), flags.pop("policy_config"), online_profiling=False if is_silent else None, **flags
    )
