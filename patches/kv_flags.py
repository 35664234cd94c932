"""The table of kv flags, and the settings that a ServerArgs with them stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.decode_budget.scores import SCORES
from sglang_evicpress.decode_budget.settings import METHODS
from sglang_evicpress.policy import SERVER_POLICY_NAMES


@dataclass(frozen=True, slots=True)
class KvFlag:
    """``name``: of the field of ServerArgs; ``text``: what --help says."""

    name: str
    kind: type[str] | type[int] | type[float] | type[bool]
    text: str


KV_FLAGS = (
    KvFlag(
        "kv_policy",
        str,
        "Decide by this policy what to compress or drop when the KV cache is full (default: off, "
        f"SGLang's own cache): {', '.join(SERVER_POLICY_NAMES)}. evicpress weighs quality against time to "
        "first token; the others are to compare with.",
    ),
    KvFlag(
        "kv_policy_config",
        str,
        "JSON file with settings of --kv-policy, or the policy itself; the other --kv flags win over it.",
    ),
    KvFlag("kv_alpha", float, "Weight of answer quality against time to first token (default: 1.0)."),
    KvFlag(
        "kv_half_life",
        float,
        "Seconds after which the use of a cached prefix counts half (default: learned from how soon "
        "prefixes are used again).",
    ),
    KvFlag(
        "kv_forms",
        str,
        "Forms that --kv-policy may choose, separated by commas: PRESS@KEPT, or exact "
        "(default: keydiff@0.8,keydiff@0.5,keydiff@0.2).",
    ),
    KvFlag("kv_min_tokens", int, "Never compress a cached prefix part shorter than this (default: 64)."),
    KvFlag("kv_sinks", int, "First tokens of a prompt that are always kept (default: 4)."),
    KvFlag(
        "kv_host_gb",
        float,
        "Host memory, in GB of 1e9 bytes, for the KV of prefixes that leave the GPU (default: 0, none; 1 with "
        "--kv-ssd-dir, as all goes through it).",
    ),
    KvFlag(
        "kv_ssd_dir",
        str,
        "Folder, on an SSD of this machine, for KV that leaves host memory; a later server with the same model "
        "finds it again (default: none). Needs --kv-ssd-gb.",
    ),
    KvFlag("kv_ssd_gb", float, "GB of 1e9 bytes that may be used in --kv-ssd-dir."),
    KvFlag(
        "kv_ssd_write_gb_per_day",
        float,
        "GB of 1e9 bytes that may be written to --kv-ssd-dir in a day, to spare the SSD (default: no limit).",
    ),
    KvFlag(
        "kv_ssd_sync",
        str,
        "When what was written to --kv-ssd-dir is made durable: none leaves it to the system, batch does it in "
        "the background, always before it counts as written (default: batch).",
    ),
    KvFlag(
        "kv_ssd_allow_dir",
        str,
        "Absolute folders, separated by commas, in which POST /evicpress/tiers/ssd may name one (default: none "
        "but the parent of --kv-ssd-dir).",
    ),
    KvFlag(
        "kv_ssd_key_file",
        str,
        "File of 32 to 4096 bytes, such as those of head -c 32 /dev/urandom, readable for its owner only: what "
        "is on the SSD is sealed with it, and what has no such seal is a miss (default: none).",
    ),
    KvFlag(
        "kv_prior",
        str,
        "JSON file with quality curves to go by while no context is profiled, such as "
        '{"keydiff": {"0.8": 0.99, "0.5": 0.9}} (default: none, and nothing is compressed until then).',
    ),
    KvFlag(
        "kv_profiles",
        str,
        "File that keeps the measured quality curves of contexts for later servers; made where it is missing "
        "(default: none, they are forgotten with the server).",
    ),
    KvFlag(
        "kv_drift",
        float,
        "Measure a context anew when the predicted quality of its answers exceeds the observed one by this "
        "much (default: 0.3).",
    ),
    KvFlag(
        "kv_no_recording",
        bool,
        "Do not keep the last questions about each context in memory; nothing is measured online then.",
    ),
    KvFlag(
        "kv_decode_budget",
        int,
        "Tokens of KV that a running request keeps at most (default: all). A request may ask for another "
        'budget, or 0 for none: "custom_params": {"kv_decode_budget": 1024}.',
    ),
    KvFlag(
        "kv_decode_method",
        str,
        f"How --kv-decode-budget is kept: {', '.join(METHODS)} (default: paged). paged frees whole pages, the "
        "others drop single tokens and move the rest together.",
    ),
    KvFlag(
        "kv_decode_score",
        str,
        f"What survives under --kv-decode-budget: {', '.join(SCORES)} (default: value_key_ratio).",
    ),
    KvFlag(
        "kv_decode_every",
        int,
        "Tokens that may come on top of --kv-decode-budget before repack, holefill and compact drop again "
        "(default: 128).",
    ),
    KvFlag(
        "kv_decode_protect",
        str,
        "Pages that paged never frees: first (all with sinks), newest, first,newest or none (default: first,newest).",
    ),
    KvFlag(
        "kv_decode_client_budgets",
        str,
        "Choice of budgets by requests, in their custom_params: off, on, or trace, which also lets them ask "
        "for the trace of their passes (default: on).",
    ),
    KvFlag(
        "kv_max_queue_seconds",
        float,
        "Answer 503 with Retry-After at once to a request that would wait longer than this for its turn "
        "(default: no limit).",
    ),
)
DEPENDENT_FLAGS = tuple(flag.name for flag in KV_FLAGS if flag.name != "kv_policy")
"""Those that do nothing without --kv-policy."""


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
