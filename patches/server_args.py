"""The kv flags, as real fields of SGLang's ServerArgs.

ServerArgs derives its command line from its dataclass fields and drops every other attribute, so the fields
are added to the class itself: class identity, pickling, ``--config``, Engine keywords, ``replace`` and
``asdict`` keep working. Without ``--kv-policy`` a ServerArgs goes through SGLang's own code only.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import logging
import os
from pathlib import Path
from typing import Annotated, Any

from sglang_evicpress import handover
from sglang_evicpress.config import EvicPressConfig, policy_in
from sglang_evicpress.decode.settings import METHODS, SCORES
from sglang_evicpress.patches import install, last_word, refusals
from sglang_evicpress.policy import SERVER_POLICY_NAMES

logger = logging.getLogger(__name__)

DEPENDENT_FLAGS = (
    *("kv_policy_config", "kv_alpha", "kv_half_life", "kv_forms", "kv_min_tokens", "kv_sinks"),
    *("kv_host_gb", "kv_ssd_dir", "kv_ssd_gb", "kv_ssd_write_gb_per_day", "kv_ssd_sync"),
    *("kv_ssd_allow_dir", "kv_ssd_key_file"),
    *("kv_prior", "kv_profiles", "kv_drift", "kv_no_recording"),
    *("kv_decode_budget", "kv_decode_method", "kv_decode_score", "kv_decode_every", "kv_decode_protect"),
    *("kv_decode_client_budgets", "kv_max_queue_seconds"),
)


def add_flags() -> None:
    """Add the kv flags to ServerArgs in this process, once. Without them a server stays as it is."""
    from sglang.srt.server_args import ServerArgs

    if "kv_policy" not in ServerArgs.__dataclass_fields__:
        names = _add_fields(ServerArgs)
        _wrap_init(ServerArgs, names)
        _wrap_post_init(ServerArgs)
        _wrap_from_cli_args(ServerArgs)
        _wrap_pickling(ServerArgs)


def config_of(server_args: Any) -> EvicPressConfig:
    """The checked settings of a ServerArgs that has ``kv_policy`` set. Raises ValueError, one sentence."""
    return EvicPressConfig.from_flags(
        server_args.kv_policy,
        server_args.kv_policy_config,
        server_args.kv_alpha,
        server_args.kv_half_life,
        server_args.kv_forms,
        server_args.kv_min_tokens,
        server_args.kv_sinks,
        host_gb=server_args.kv_host_gb,
        ssd_dir=server_args.kv_ssd_dir,
        ssd_gb=server_args.kv_ssd_gb,
        ssd_write_gb_per_day=server_args.kv_ssd_write_gb_per_day,
        ssd_sync=server_args.kv_ssd_sync,
        ssd_allow_dir=server_args.kv_ssd_allow_dir,
        ssd_key_file=server_args.kv_ssd_key_file,
        prior=server_args.kv_prior,
        profiles=server_args.kv_profiles,
        drift=server_args.kv_drift,
        recording=False if server_args.kv_no_recording else None,
        decode_budget=server_args.kv_decode_budget,
        decode_method=server_args.kv_decode_method,
        decode_score=server_args.kv_decode_score,
        decode_every=server_args.kv_decode_every,
        decode_protect=server_args.kv_decode_protect,
        decode_client_budgets=server_args.kv_decode_client_budgets,
        max_queue_seconds=server_args.kv_max_queue_seconds,
    )


def _add_fields(cls: Any) -> tuple[str, ...]:
    from sglang.srt.arg_groups.arg_utils import Arg

    def flag(name: str, kind: Any, text: str) -> tuple[str, Any, Any]:
        return name, Annotated[kind | None, Arg(help=text)], dataclasses.field(default=None)

    extra = dataclasses.make_dataclass(
        "KvFlags",
        (
            flag(
                "kv_policy",
                str,
                "Decide by this policy what to compress or drop when the KV cache is full (default: off, "
                f"SGLang's own cache): {', '.join(SERVER_POLICY_NAMES)}. evicpress weighs quality against time to "
                "first token; the others are to compare with.",
            ),
            flag(
                "kv_policy_config",
                str,
                "JSON file with settings of --kv-policy, or the policy itself; the other --kv flags win over it.",
            ),
            flag("kv_alpha", float, "Weight of answer quality against time to first token (default: 1.0)."),
            flag(
                "kv_half_life",
                float,
                "Seconds after which the use of a cached prefix counts half (default: learned from how soon "
                "prefixes are used again).",
            ),
            flag(
                "kv_forms",
                str,
                "Forms that --kv-policy may choose, separated by commas: PRESS@KEPT, or exact "
                "(default: keydiff@0.8,keydiff@0.5,keydiff@0.2).",
            ),
            flag("kv_min_tokens", int, "Never compress a cached prefix part shorter than this (default: 64)."),
            flag("kv_sinks", int, "First tokens of a prompt that are always kept (default: 4)."),
            flag(
                "kv_host_gb",
                float,
                "Host memory, in GB of 1e9 bytes, for the KV of prefixes that leave the GPU (default: 0, none; 1 with "
                "--kv-ssd-dir, as all goes through it).",
            ),
            flag(
                "kv_ssd_dir",
                str,
                "Folder, on an SSD of this machine, for KV that leaves host memory; a later server with the same model "
                "finds it again (default: none). Needs --kv-ssd-gb.",
            ),
            flag("kv_ssd_gb", float, "GB of 1e9 bytes that may be used in --kv-ssd-dir."),
            flag(
                "kv_ssd_write_gb_per_day",
                float,
                "GB of 1e9 bytes that may be written to --kv-ssd-dir in a day, to spare the SSD (default: no limit).",
            ),
            flag(
                "kv_ssd_sync",
                str,
                "When what was written to --kv-ssd-dir is made durable: none leaves it to the system, batch does it in "
                "the background, always before it counts as written (default: batch).",
            ),
            flag(
                "kv_ssd_allow_dir",
                str,
                "Absolute folders, separated by commas, in which POST /evicpress/tiers/ssd may name one (default: none "
                "but the parent of --kv-ssd-dir).",
            ),
            flag(
                "kv_ssd_key_file",
                str,
                "File of 32 to 4096 bytes, such as those of head -c 32 /dev/urandom, readable for its owner only: what "
                "is on the SSD is sealed with it, and what has no such seal is a miss (default: none).",
            ),
            flag(
                "kv_prior",
                str,
                "JSON file with quality curves to go by while no context is profiled, such as "
                '{"keydiff": {"0.8": 0.99, "0.5": 0.9}} (default: none, and nothing is compressed until then).',
            ),
            flag(
                "kv_profiles",
                str,
                "File that keeps the measured quality curves of contexts for later servers; made where it is missing "
                "(default: none, they are forgotten with the server).",
            ),
            flag(
                "kv_drift",
                float,
                "Measure a context anew when the predicted quality of its answers exceeds the observed one by this "
                "much (default: 0.3).",
            ),
            flag(
                "kv_no_recording",
                bool,
                "Do not keep the last questions about each context in memory; nothing is measured online then.",
            ),
            flag(
                "kv_decode_budget",
                int,
                "Tokens of KV that a running request keeps at most (default: all). A request may ask for another "
                'budget, or 0 for none: "custom_params": {"kv_decode_budget": 1024}.',
            ),
            flag(
                "kv_decode_method",
                str,
                f"How --kv-decode-budget is kept: {', '.join(METHODS)} (default: paged). paged frees whole pages, the "
                "others drop single tokens and move the rest together.",
            ),
            flag(
                "kv_decode_score",
                str,
                f"What survives under --kv-decode-budget: {', '.join(SCORES)} (default: value_key_ratio).",
            ),
            flag(
                "kv_decode_every",
                int,
                "Tokens that may come on top of --kv-decode-budget before repack, holefill and compact drop again "
                "(default: 128).",
            ),
            flag(
                "kv_decode_protect",
                str,
                "Pages that paged never frees: first (all with sinks), newest, first,newest or none (default: "
                "first,newest).",
            ),
            flag(
                "kv_decode_client_budgets",
                str,
                "Choice of budgets by requests, in their custom_params: off, on, or trace, which also lets them ask "
                "for the trace of their passes (default: on).",
            ),
            flag(
                "kv_max_queue_seconds",
                float,
                "Answer 503 with Retry-After at once to a request that would wait longer than this for its turn "
                "(default: no limit).",
            ),
        ),
    )
    for field in dataclasses.fields(extra):
        cls.__dataclass_fields__[field.name] = field
        cls.__annotations__[field.name] = field.type
        setattr(cls, field.name, field.default)
    return tuple(field.name for field in dataclasses.fields(extra))


def _wrap_init(cls: Any, names: tuple[str, ...]) -> None:
    original = cls.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in names:
            setattr(self, name, kwargs.pop(name, None))
        original(self, *args, **kwargs)

    cls.__init__ = __init__


def _wrap_post_init(cls: Any) -> None:
    original = cls.__post_init__

    @functools.wraps(original)
    def __post_init__(self: Any) -> None:
        if self.kv_policy is None and self.kv_policy_config is not None:
            self.kv_policy = _policy_of_file(self.kv_policy_config)
        if self.kv_policy is None:
            _refuse_without_policy(self)
            original(self)
            return
        config = _prepare(self)
        original(self)
        refusals.check(self, config)
        if hasattr(self, "model_config"):  # absent for the placeholder models 'none' and 'dummy'
            refusals.check_model_config(self.model_config)
        install.install_frontend()
        logger.info("%s", config)

    cls.__post_init__ = __post_init__


def _policy_of_file(config_file: str) -> str | None:
    try:
        return policy_in(config_file)
    except ValueError as error:
        raise refusals.RefusedError(str(error)) from None


def _refuse_without_policy(server_args: Any) -> None:
    for name in DEPENDENT_FLAGS:
        if getattr(server_args, name) is not None:
            flag = "--" + name.replace("_", "-")
            raise refusals.RefusedError(f"{flag} does nothing without --kv-policy: add it, or leave out {flag}")


def _prepare(server_args: Any) -> EvicPressConfig:
    """Refuse what was asked for and cannot work, then choose our cache and an attention backend."""
    problem = install.version_problem()
    if problem is not None:
        raise refusals.RefusedError(problem)
    try:
        config = config_of(server_args)
    except ValueError as error:
        raise refusals.RefusedError(str(error)) from None
    refusals.check(server_args, config)
    _check_profiles(config)
    _check_ssd(config)
    server_args.radix_cache_backend = refusals.BACKEND_NAME
    if server_args.attention_backend is None:
        is_deterministic = refusals.is_deterministic(server_args)
        server_args.attention_backend = _attention_backend(server_args.device, is_deterministic=is_deterministic)
        logger.info("kv policy %s: attention backend %s", config.policy, server_args.attention_backend)
    if server_args.grammar_backend is None:
        server_args.grammar_backend = _grammar_backend(server_args)
        if server_args.grammar_backend is not None:
            logger.info("kv policy %s: grammar backend %s", config.policy, server_args.grammar_backend)
    return config


def _check_ssd(config: EvicPressConfig) -> None:
    """A folder or key that cannot be used stops the start, before a model is loaded."""
    from sglang_evicpress.tiers.folder import Folder, StoreError
    from sglang_evicpress.tiers.key import Key

    try:
        if config.ssd_key_file is not None:
            Key.read(config.ssd_key_file)
        if config.ssd_dir is not None and os.path.lexists(config.ssd_dir):
            Folder.open(Path(config.ssd_dir), is_made=False)
    except (StoreError, ValueError) as error:
        raise refusals.RefusedError(str(error)) from None


def _check_profiles(config: EvicPressConfig) -> None:
    """A damaged file of profiles stops the start, before a model is loaded; a new one is made now."""
    if config.profiles is None:
        return
    from sglang_evicpress.profiler.lines import StoreError
    from sglang_evicpress.profiler.repair import check
    from sglang_evicpress.profiler.store import ProfileStore
    from sglang_evicpress.tiers.identity import KEY_BYTES

    try:
        ProfileStore(Path(config.profiles), bytes(KEY_BYTES)).close()
        check(Path(config.profiles))
    except (StoreError, ValueError) as error:
        raise refusals.RefusedError(str(error)) from None


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
    """As SGLang sees it, but for whether there is a GPU: that is asked of the device."""
    is_wanted = os.environ.get("SGLANG_IS_FLASHINFER_AVAILABLE", "true").lower() in ("true", "1")
    return is_wanted and importlib.util.find_spec("flashinfer") is not None


def _wrap_pickling(cls: Any) -> None:
    """Let a ServerArgs with a kv policy mark the processes it is handed to."""
    original = cls.__reduce_ex__

    @functools.wraps(original)
    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        if self.kv_policy is None:
            return original(self, protocol)
        return handover.restore, (type(self), dict(self.__dict__))

    cls.__reduce_ex__ = __reduce_ex__


def _wrap_from_cli_args(cls: Any) -> None:
    """On the command line a refusal is one line and exit status 2, as argparse's own errors are."""
    original = cls.from_cli_args.__func__

    @functools.wraps(original)
    def from_cli_args(cls: Any, args: argparse.Namespace) -> Any:
        try:
            return original(cls, args)
        except refusals.RefusedError as error:
            last_word.say(error)

    cls.from_cli_args = classmethod(from_cli_args)
