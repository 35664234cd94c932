"""SGLang 0.5.17: ``req.kv`` is there while a request holds KV, and a round answers with a plan; else as before."""

from __future__ import annotations

from typing import Any, Protocol

from sglang_evicpress.patches.compat.sglang_0_5_15 import BEAMS as BEAMS
from sglang_evicpress.patches.compat.sglang_0_5_15 import KEY_FIELDS as KEY_FIELDS
from sglang_evicpress.patches.compat.sglang_0_5_15 import PREFIX_SLOTS as PREFIX_SLOTS
from sglang_evicpress.patches.compat.sglang_0_5_15 import SENT_ONCE as SENT_ONCE
from sglang_evicpress.patches.compat.sglang_0_5_15 import UPDATE_SESSIONS as UPDATE_SESSIONS
from sglang_evicpress.patches.compat.sglang_0_5_15 import event_salt as event_salt
from sglang_evicpress.patches.compat.sglang_0_5_15 import free_pages as free_pages
from sglang_evicpress.patches.compat.sglang_0_5_15 import give_back_pages as give_back_pages
from sglang_evicpress.patches.compat.sglang_0_5_15 import loaded as loaded
from sglang_evicpress.patches.compat.sglang_0_5_15 import match_result as match_result
from sglang_evicpress.patches.compat.sglang_0_5_15 import prefix_len as prefix_len
from sglang_evicpress.patches.compat.sglang_0_5_15 import protected_len as protected_len
from sglang_evicpress.patches.compat.sglang_0_5_15 import relock as relock
from sglang_evicpress.patches.compat.sglang_0_5_15 import row_of as row_of
from sglang_evicpress.patches.compat.sglang_0_5_15 import send_back as send_back
from sglang_evicpress.patches.compat.sglang_0_5_15 import set_prefix as set_prefix
from sglang_evicpress.patches.compat.sglang_0_5_15 import set_protected_len as set_protected_len
from sglang_evicpress.patches.compat.sglang_0_5_15 import set_total_offset as set_total_offset
from sglang_evicpress.patches.compat.sglang_0_5_15 import tell_removed as tell_removed
from sglang_evicpress.patches.compat.sglang_0_5_15 import tell_stored as tell_stored
from sglang_evicpress.patches.compat.sglang_0_5_15 import total_offset as total_offset
from sglang_evicpress.patches.tree.types import Batch

ALLOCATION = "sglang.srt.mem_cache.allocation"
EVICTS_SHORTFALL = True
REQUEST_FIELDS = frozenset(
    {
        *("req_pool_idx", "cache_protected_len", "kv_committed_len", "kv"),
        *("prefix_indices", "last_node", "best_match_node", "host_hit_length", "storage_hit_length"),
    }
)
KV_FIELDS = frozenset({"kv_allocated_len"})


class KVInfo(Protocol):
    """SGLang's ReqKvInfo."""

    kv_allocated_len: int


class RequestWithKV(Protocol):
    """SGLang's Req."""

    kv: KVInfo | None
    kv_committed_len: int


class ParallelState(Protocol):
    """Ranks of a process."""

    tp_rank: int
    tp_size: int


class Ranked(Protocol):
    """SGLang's ModelRunner."""

    ps: ParallelState


class NextBatchPlan(Protocol):
    """SGLang's NextBatchPlan."""

    batch_to_run: Batch | None


class SchedulerWithBatch(Protocol):
    """SGLang's Scheduler."""

    cur_batch_for_debug: object


def holds_kv(req: RequestWithKV) -> bool:
    return req.kv is not None


def allocated_len(req: RequestWithKV) -> int:
    return 0 if req.kv is None else req.kv.kv_allocated_len


def shorten(req: RequestWithKV, num_tokens: int) -> None:
    req.kv_committed_len -= num_tokens
    if req.kv is not None:
        req.kv.kv_allocated_len -= num_tokens


def ranks_of(runner: Ranked) -> tuple[int, int]:
    return runner.ps.tp_rank, runner.ps.tp_size


def batch_of(plan: NextBatchPlan) -> Batch | None:
    return plan.batch_to_run


def current_batch(scheduler: SchedulerWithBatch) -> Any:
    return scheduler.cur_batch_for_debug
