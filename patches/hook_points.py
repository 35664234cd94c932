"""Every name of SGLang that this plugin hooks, calls, overrides or reads. Strings only: nothing is imported.

Checked with ``inspect.signature`` before anything is touched (patches/install.py), and by the contract tests,
so that a rename upstream stops the server with one sentence rather than a wrong answer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SUPPORTED_SGLANG = ("0.5.15.post1",)


@dataclass(frozen=True, slots=True)
class HookPoint:
    """One name we rely on.

    ``kind``: seam (a registration point made for plugins), hook (wrapped through HookRegistry) or read
    (called, overridden or read as it is). ``process``: where it is used; the main process checks all
    rows, so that a mismatch is known before a model is loaded. ``parameters`` None: the name must be there.
    """

    path: str
    kind: Literal["seam", "hook", "read"]
    process: Literal["scheduler", "frontend"]
    parameters: tuple[str, ...] | None


_COMMON = "sglang.srt.mem_cache.common"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_RADIX = "sglang.srt.mem_cache.radix_cache.RadixCache"
_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
_KV_CACHE = "sglang.srt.mem_cache.memory_pool.KVCache"
_ALLOCATOR = "sglang.srt.mem_cache.allocator"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_ATTENTION = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"

HOOK_POINTS = (
    # rows: compact rows of req_to_token
    HookPoint(f"{_COMMON}.alloc_for_extend", "hook", "scheduler", ("batch",)),
    HookPoint(
        f"{_COMMON}.write_cache_indices",
        "hook",
        "scheduler",
        (
            "out_cache_loc",
            "req_pool_indices_tensor",
            "req_pool_indices_cpu",
            "prefix_lens_tensor",
            "prefix_lens_cpu",
            "seq_lens_tensor",
            "seq_lens_cpu",
            "extend_lens_tensor",
            "extend_lens_cpu",
            "prefix_tensors",
            "req_to_token_pool",
        ),
    ),
    HookPoint(f"{_COMMON}.alloc_for_decode", "hook", "scheduler", ("batch", "token_per_req")),
    # attention: the view of the batch, HOLES before CUDA-graph capture
    HookPoint(f"{_RUNNER}.init_attention_backend", "hook", "scheduler", ("self",)),
    HookPoint(
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new",
        "hook",
        "scheduler",
        ("batch", "model_runner"),
    ),
    HookPoint(f"{_ATTENTION}.init_forward_metadata", "read", "scheduler", ("self", "forward_batch")),
    HookPoint(
        f"{_ATTENTION}.init_forward_metadata_out_graph",
        "read",
        "scheduler",
        ("self", "forward_batch", "in_capture"),
    ),
    HookPoint(f"{_ATTENTION}.init_forward_metadata_in_graph", "read", "scheduler", ("self", "forward_batch")),
    # control messages
    HookPoint(f"{_SCHEDULER}.init_request_dispatcher", "hook", "scheduler", ("self",)),
    HookPoint(
        f"{_SCHEDULER}.__init__",
        "hook",
        "scheduler",
        (
            "self",
            "server_args",
            "port_args",
            "gpu_id",
            "tp_rank",
            "moe_ep_rank",
            "pp_rank",
            "attn_cp_rank",
            "moe_dp_rank",
            "dp_rank",
        ),
    ),
    # a clean stop
    HookPoint(f"{_SCHEDULER}.run_event_loop", "hook", "scheduler", ("self",)),
    HookPoint(f"{_SCHEDULER}.handle_shutdown", "read", "scheduler", ("self", "recv_req")),
    HookPoint(
        "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler",
        "hook",
        "frontend",
        ("self", "signum", "frame"),
    ),
    HookPoint("sglang.srt.entrypoints.engine.Engine.shutdown", "hook", "frontend", ("self",)),
    HookPoint("sglang.srt.managers.io_struct.ShutdownReq", "read", "frontend", None),
    HookPoint("sglang.srt.utils.watchdog.SubprocessWatchdog.stop", "read", "frontend", ("self",)),
    HookPoint("sglang.srt.utils.cudacore_pyspy_dump_utils.collect_scheduler_processes", "read", "frontend", ()),
    HookPoint(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._async_dispatch_to_scheduler",
        "read",
        "frontend",
        ("self", "obj"),
    ),
    # a request that would wait too long
    HookPoint(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_finish_reason",
        "hook",
        "frontend",
        ("self", "out", "state", "is_stream"),
    ),
    # a refusal, said last
    HookPoint(
        "sglang.srt.entrypoints.engine.Engine._launch_subprocesses",
        "hook",
        "frontend",
        (
            "server_args",
            "init_tokenizer_manager_func",
            "run_scheduler_process_func",
            "run_detokenizer_process_func",
            "port_args",
        ),
    ),
    HookPoint(
        "sglang.srt.entrypoints.http_server.launch_server",
        "hook",
        "frontend",
        (
            "server_args",
            "init_tokenizer_manager_func",
            "run_scheduler_process_func",
            "run_detokenizer_process_func",
            "execute_warmup_func",
            "launch_callback",
        ),
    ),
    HookPoint("sglang.srt.utils.kill_process_tree", "read", "frontend", None),
    # the clock, the queue and the times of batches
    HookPoint(
        "sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs",
        "hook",
        "scheduler",
        ("self",),
    ),
    HookPoint(f"{_SCHEDULER}._add_request_to_queue", "hook", "scheduler", ("self", "req", "is_retracted")),
    HookPoint(f"{_SCHEDULER}.get_next_batch_to_run", "hook", "scheduler", ("self",)),
    HookPoint(f"{_SCHEDULER}.on_idle", "hook", "scheduler", ("self",)),
    HookPoint(
        f"{_ADDER}.add_one_req", "hook", "scheduler", ("self", "req", "has_chunked_req", "truncation_align_size")
    ),
    # budgets of running requests
    HookPoint(f"{_SCHEDULER}.init_req_max_new_tokens", "hook", "scheduler", ("self", "req")),
    HookPoint(f"{_ADDER}.add_chunked_req", "hook", "scheduler", ("self", "req")),
    HookPoint(f"{_ADDER}._get_running_request_total_token_offset", "hook", "scheduler", ("self", "req")),
    HookPoint("sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend", "hook", "scheduler", ("self",)),
    HookPoint("sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS", "read", "scheduler", None),
    HookPoint(
        "sglang.srt.managers.schedule_batch.Req.set_finish_with_abort", "read", "scheduler", ("self", "error_msg")
    ),
    HookPoint(f"{_COMMON}.evict_from_tree_cache", "hook", "scheduler", ("tree_cache", "num_tokens")),
    HookPoint("sglang.srt.managers.schedule_policy.AddReqResult.CONTINUE", "read", "scheduler", None),
    HookPoint("sglang.srt.managers.schedule_policy.AddReqResult.NO_TOKEN", "read", "scheduler", None),
    HookPoint(f"{_SCHEDULER}.run_batch", "hook", "scheduler", ("self", "batch", "pp_proxy_tensors")),
    HookPoint(f"{_SCHEDULER}.process_batch_result", "hook", "scheduler", ("self", "batch", "result")),
    # the weights, and the adapters
    *(
        HookPoint(f"{_UPDATER}.{name}", "hook", "scheduler", ("self", "recv_req"))
        for name in (
            "update_weights_from_disk",
            "update_weights_from_distributed",
            "update_weights_from_tensor",
            "update_weights_from_ipc",
            "release_memory_occupation",
            "resume_memory_occupation",
            "check_weights",
        )
    ),
    HookPoint("sglang.srt.constants.GPU_MEMORY_ALL_TYPES", "read", "scheduler", None),
    HookPoint("sglang.srt.constants.GPU_MEMORY_TYPE_KV_CACHE", "read", "scheduler", None),
    HookPoint("sglang.srt.constants.GPU_MEMORY_TYPE_WEIGHTS", "read", "scheduler", None),
    HookPoint(f"{_UPDATER}.offload_tags", "read", "scheduler", None),
    HookPoint(f"{_SCHEDULER}.load_lora_adapter", "hook", "scheduler", ("self", "recv_req")),
    HookPoint(f"{_SCHEDULER}.load_lora_adapter_from_tensors", "hook", "scheduler", ("self", "recv_req")),
    HookPoint("sglang.srt.lora.lora_manager.LoRAManager", "read", "scheduler", None),
    HookPoint("sglang.srt.managers.io_struct.hook_custom_types", "seam", "scheduler", ("new_types",)),
    # profiling: requests of our own, sending them back, and giving them up
    HookPoint(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.release_req",
        "read",
        "scheduler",
        ("self", "idx", "remaing_req_count", "server_args"),
    ),
    HookPoint(
        "sglang.srt.managers.schedule_batch.ScheduleBatch.filter_batch",
        "read",
        "scheduler",
        ("self", "chunked_req_to_exclude", "keep_indices"),
    ),
    HookPoint("sglang.srt.managers.io_struct.AbortReq", "read", "scheduler", None),
    HookPoint("sglang.srt.managers.schedule_batch.FINISH_ABORT", "read", "scheduler", None),
    HookPoint("sglang.srt.managers.io_struct.GenerateReqInput", "read", "frontend", None),
    HookPoint(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "read",
        "frontend",
        ("self", "obj", "request"),
    ),
    HookPoint(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._dispatch_to_scheduler", "read", "frontend", None
    ),
    HookPoint(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.auto_create_handle_loop", "read", "frontend", ("self",)
    ),
    HookPoint(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "hook",
        "frontend",
        (
            "server_args",
            "tokenizer_manager",
            "template_manager",
            "port_args",
            "scheduler_infos",
            "subprocess_watchdog",
            "execute_warmup_func",
            "launch_callback",
        ),
    ),
    HookPoint("sglang.srt.entrypoints.http_server.app", "read", "frontend", None),
    HookPoint("sglang.srt.utils.auth.auth_level", "read", "frontend", ("level",)),
    # the cache
    HookPoint("sglang.srt.mem_cache.registry.register_radix_cache_backend", "seam", "scheduler", ("name", "factory")),
    HookPoint(f"{_RADIX}.__init__", "read", "scheduler", ("self", "params")),
    HookPoint(f"{_RADIX}.reset", "read", "scheduler", ("self",)),
    HookPoint(f"{_RADIX}.match_prefix", "read", "scheduler", ("self", "params")),
    HookPoint(f"{_RADIX}.insert", "read", "scheduler", ("self", "params")),
    HookPoint(f"{_RADIX}.evict", "read", "scheduler", ("self", "params")),
    HookPoint(f"{_RADIX}.cache_finished_req", "read", "scheduler", ("self", "req", "is_insert")),
    HookPoint(f"{_RADIX}.cache_unfinished_req", "read", "scheduler", ("self", "req", "chunked")),
    HookPoint(f"{_RADIX}.inc_lock_ref", "read", "scheduler", ("self", "node")),
    HookPoint(f"{_RADIX}.dec_lock_ref", "read", "scheduler", ("self", "node", "params")),
    HookPoint(f"{_RADIX}._match_prefix_helper", "read", "scheduler", ("self", "node", "key")),
    HookPoint(f"{_RADIX}._split_node", "read", "scheduler", ("self", "key", "child", "split_len")),
    HookPoint(f"{_RADIX}._delete_leaf", "read", "scheduler", ("self", "node")),
    HookPoint(f"{_RADIX}._update_leaf_status", "read", "scheduler", ("self", "node")),
    HookPoint("sglang.srt.mem_cache.radix_cache.TreeNode.__init__", "read", "scheduler", ("self", "id", "priority")),
    # loads, as the hierarchical cache has them
    HookPoint(
        "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache.init_load_back", "read", "scheduler", ("self", "params")
    ),
    HookPoint(f"{_KV_CACHE}.register_layer_transfer_counter", "read", "scheduler", ("self", "layer_transfer_counter")),
    # the pool and its allocators
    HookPoint(f"{_ALLOCATOR}.token.TokenToKVPoolAllocator.free", "read", "scheduler", ("self", "free_index")),
    HookPoint(f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator.free", "read", "scheduler", ("self", "free_index")),
    HookPoint(
        f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator.alloc_extend",
        "hook",
        "scheduler",
        (
            "self",
            "prefix_lens",
            "prefix_lens_cpu",
            "seq_lens",
            "seq_lens_cpu",
            "last_loc",
            "extend_num_tokens",
            "num_new_pages",
        ),
    ),
    HookPoint(
        f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator.alloc_decode",
        "hook",
        "scheduler",
        ("self", "seq_lens", "seq_lens_cpu", "last_loc"),
    ),
    HookPoint(f"{_POOL}._get_key_buffer", "read", "scheduler", ("self", "layer_id")),
    HookPoint(f"{_POOL}._get_value_buffer", "read", "scheduler", ("self", "layer_id")),
)
