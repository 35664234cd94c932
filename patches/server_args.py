"""The kv flags on SGLang's ServerArgs: what they refuse, and what they choose before SGLang does.

How a ServerArgs has them differs by release (``compat/arguments.py``). Without ``--kv-policy`` it goes through SGLang's
own code only.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from sglang_evicpress import spawn
from sglang_evicpress.config import AUTO, EvicPressConfig, policy_in
from sglang_evicpress.geometry import file as geometry_file
from sglang_evicpress.patches import install, last_word, unsupported
from sglang_evicpress.patches.compat.arguments import ARGUMENTS
from sglang_evicpress.patches.hook_check import version_problem
from sglang_evicpress.patches.kv_flags import DEPENDENT_FLAGS, config_of
from sglang_evicpress.quality.store import ProfileStore
from sglang_evicpress.tiers.entry.identity import KEY_BYTES
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.ssd import folder

logger = logging.getLogger(__name__)


def add_flags() -> None:
    """Add the kv flags to ServerArgs in this process, once. Without them a server stays as it is."""
    from sglang.srt.server_args import ServerArgs

    if not hasattr(ServerArgs, "kv_policy"):
        ARGUMENTS.add_flags(ServerArgs, _around_resolution, _told)
        _wrap_pickling(ServerArgs)


def _around_resolution(original: Callable[[Any], None], server_args: Any) -> None:
    """AROUND the resolution of a ServerArgs: what was given is checked before it, and what SGLang chose behind it."""
    if server_args.kv_policy is None and server_args.kv_policy_config is not None:
        server_args.kv_policy = _policy_of_file(server_args.kv_policy_config)
    if server_args.kv_policy is None:
        _refuse_without_policy(server_args)
        original(server_args)
        return
    config = _prepare(server_args)
    original(server_args)
    chosen = ARGUMENTS.chosen(server_args)
    config = _without_refused_tiers(server_args, chosen, config)
    unsupported.check(chosen, config)
    model_config = ARGUMENTS.model_config(server_args)
    if model_config is not None:
        unsupported.check_model_config(model_config)
    install.install_frontend()
    logger.info("%s", config)


def _policy_of_file(config_file: str) -> str | None:
    try:
        return policy_in(config_file)
    except ValueError as error:
        raise unsupported.UnsupportedError(str(error)) from None


def _refuse_without_policy(server_args: Any) -> None:
    for name in DEPENDENT_FLAGS:
        if getattr(server_args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise unsupported.UnsupportedError(f"{flag} does nothing without --kv-policy: add it, or leave out {flag}")


def _prepare(server_args: Any) -> EvicPressConfig:
    """Refuse what was asked for and cannot work, then choose our cache and an attention backend."""
    problem = version_problem()
    if problem is not None:
        raise unsupported.UnsupportedError(problem)
    try:
        config = config_of(server_args)
    except ValueError as error:
        raise unsupported.UnsupportedError(str(error)) from None
    config = _without_refused_tiers(server_args, server_args, config)
    unsupported.check(server_args, config)
    _check_profiles(config)
    _check_ssd(config)
    _check_geometry(config)
    server_args.radix_cache_backend = unsupported.BACKEND_NAME
    if server_args.attention_backend is None:
        is_deterministic = unsupported.is_deterministic(server_args)
        server_args.attention_backend = _attention_backend(server_args.device, is_deterministic=is_deterministic)
        logger.info("kv policy %s: attention backend %s", config.policy, server_args.attention_backend)
    if server_args.grammar_backend is None:
        server_args.grammar_backend = _grammar_backend(server_args)
        if server_args.grammar_backend is not None:
            logger.info("kv policy %s: grammar backend %s", config.policy, server_args.grammar_backend)
    return config


def _without_refused_tiers(server_args: Any, chosen: Any, config: EvicPressConfig) -> EvicPressConfig:
    """Take ``--kv-host-gb auto`` for 0 where there can be no tier by what is ``chosen``, for all processes, and say so
    in the log."""
    reason = unsupported.no_tiers_reason(chosen, config)
    if reason is None or config.host_gb != AUTO or config.ssd_dir is not None or config.stores.backend is not None:
        return config
    vars(server_args)["kv_host_gb"] = "0"  # a ServerArgs may be sealed by now
    logger.info("evicpress: --kv-host-gb auto is 0, no host tier, as one %s", reason)
    return replace(config, host_gb=0.0)


def _check_ssd(config: EvicPressConfig) -> None:
    """A folder or key that cannot be used stops the start, before a model is loaded."""
    try:
        if config.stores.key_file is not None:
            Key.read(config.stores.key_file)
        if config.ssd_dir is not None and os.path.lexists(config.ssd_dir):
            folder.Folder.open(Path(config.ssd_dir), is_made=False)
    except (folder.StoreError, ValueError) as error:
        raise unsupported.UnsupportedError(str(error)) from None


def _check_profiles(config: EvicPressConfig) -> None:
    """A file of profiles that cannot be used stops the start, before a model is loaded; a damaged one is set aside."""
    if config.profiles.path is None:
        return
    try:
        ProfileStore(Path(config.profiles.path), bytes(KEY_BYTES))
    except ValueError as error:
        raise unsupported.UnsupportedError(str(error)) from None


def _check_geometry(config: EvicPressConfig) -> None:
    """A file that is no geometry stops the start, before a model is loaded."""
    if config.geometry is None:
        return
    try:
        geometry_file.read(config.geometry)
    except ValueError as error:
        raise unsupported.UnsupportedError(str(error)) from None


def _device_kind(device: str | None) -> str:
    from sglang.srt.utils import get_device

    return (device or get_device()).split(":")[0]


def _attention_backend(device: str | None, *, is_deterministic: bool = False) -> str | None:
    """Our default, where SGLang's own may not read compact rows (intel_amx, trtllm_mha)."""
    from sglang.srt.utils import is_hip

    kind = _device_kind(device)
    if kind == "cuda":
        return "triton" if is_deterministic or is_hip() or not _has_flashinfer() else "flashinfer"
    return "torch_native" if kind == "cpu" else None


def _grammar_backend(server_args: Any) -> str | None:
    """Our default on the CPU, where the first request with a grammar ends a server that has SGLang's own (xgrammar).

    outlines needs no C++ compiler, as llguidance does there, and takes every tokenizer; EBNF is all it lacks.
    """
    if _device_kind(server_args.device) != "cpu" or server_args.enable_strict_thinking:
        return None
    return next((name for name in ("outlines", "llguidance") if importlib.util.find_spec(name) is not None), None)


def _has_flashinfer() -> bool:
    """True if flashinfer can be used as SGLang sees it, whether or not there is a GPU: the device tells that."""
    is_wanted = os.environ.get("SGLANG_IS_FLASHINFER_AVAILABLE", "true").lower() in ("true", "1")
    return is_wanted and importlib.util.find_spec("flashinfer") is not None


def _wrap_pickling(cls: Any) -> None:
    """Let a ServerArgs with a kv policy mark the processes it is handed to."""
    original = cls.__reduce_ex__

    @functools.wraps(original)
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        if self.kv_policy is None:
            return original(self, protocol)
        make, arguments, *state = original(self, protocol)
        return spawn.restore, (make, arguments, vars(self).get("kv_refusal_file")), *state

    cls.__reduce_ex__ = __reduce_ex__


def _told(make: Callable[[], Any]) -> Any:
    """On the command line an error is one line and exit status 2, as argparse's own errors are."""
    try:
        return make()
    except unsupported.UnsupportedError as error:
        last_word.say(error)
