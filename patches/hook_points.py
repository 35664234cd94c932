"""Every name of SGLang that this plugin hooks, calls, overrides or reads. Strings only: nothing is imported.

Checked with ``inspect.signature`` before anything is touched (patches/install.py), and by the contract tests,
so that a rename upstream stops the server with one sentence rather than a wrong answer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeVar

SUPPORTED_SGLANG = ("0.5.15.post1", "0.5.17", "0.5.23")
DEFAULT_SGLANG = "0.5.23"
"""The release that the repository's own environment has."""

T = TypeVar("T")
Kind = Literal["seam", "hook", "read"]
Process = Literal["scheduler", "frontend"]


@dataclass(frozen=True, slots=True)
class HookPoint:
    """One name we rely on.

    ``kind``: seam (a registration point made for plugins), hook (wrapped through HookRegistry) or read
    (called, overridden or read as it is). ``process``: where it is used; the main process checks all
    rows, so that a mismatch is known before a model is loaded. ``parameters`` None: the name must be there.
    The row is of releases from ``since`` on and before ``until``; "" sets no limit.
    """

    path: str
    kind: Kind
    process: Process
    parameters: tuple[str, ...] | None
    since: str = ""
    until: str = ""


def of_release(version: str, choices: Mapping[str, T]) -> T:
    """The last of ``choices``, by the release that they are from on, oldest first; the first where all are newer. A
    version that is not supported gets the nearest: it is refused elsewhere."""
    chosen = next(iter(choices.values()))
    for since, choice in choices.items():
        if number_of(version) >= number_of(since):
            chosen = choice
    return chosen


def number_of(version: str) -> tuple[int, ...]:
    """The first three numbers of a version, to compare by."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def is_within(version: str, since: str, until: str) -> bool:
    """True for a release from ``since`` on and before ``until``; "" sets no limit."""
    number = number_of(version)
    return (not since or number >= number_of(since)) and (not until or number < number_of(until))


def points_of(version: str) -> tuple[HookPoint, ...]:
    """The rows of a release."""
    return tuple(point for point in HOOK_POINTS if is_within(version, point.since, point.until))


_COMMON = "sglang.srt.mem_cache.common"
_ALLOCATION = "sglang.srt.mem_cache.allocation"
_EXECUTOR = "sglang.srt.model_executor"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_FORWARD = "sglang.srt.model_executor.forward_batch_info.ForwardBatch"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_RADIX = "sglang.srt.mem_cache.radix_cache.RadixCache"
_BASE_CACHE = "sglang.srt.mem_cache.base_prefix_cache.BasePrefixCache"
_POOL = "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool"
_KV_CACHE = "sglang.srt.mem_cache.memory_pool.KVCache"
_ALLOCATOR = "sglang.srt.mem_cache.allocator"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_ARGUMENTS = "sglang.srt.server_args.ServerArgs"
_ENGINE = "sglang.srt.entrypoints.engine.Engine"
_BATCH = "sglang.srt.managers.schedule_batch"
_ATTENTION = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend"


def _point(
    kind: Kind,
    path: str,
    parameters: str | None = None,
    *,
    process: Process = "scheduler",
    since: str = "",
    until: str = "",
) -> HookPoint:
    """``parameters`` with a space between them; None: the name must be there."""
    return HookPoint(path, kind, process, None if parameters is None else tuple(parameters.split()), since, until)


_hook, _read, _seam = partial(_point, "hook"), partial(_point, "read"), partial(_point, "seam")


def _allocation(module: str, *, since: str = "", until: str = "") -> tuple[HookPoint, ...]:
    """The functions that give a batch its slots."""
    of = partial(_hook, since=since, until=until)
    return (
        of(f"{module}.alloc_for_extend", "batch"),
        of(
            f"{module}.write_cache_indices",
            "out_cache_loc req_pool_indices_tensor req_pool_indices_cpu prefix_lens_tensor prefix_lens_cpu "
            "seq_lens_tensor seq_lens_cpu extend_lens_tensor extend_lens_cpu prefix_tensors req_to_token_pool",
        ),
        of(f"{module}.alloc_for_decode", "batch token_per_req"),
    )


def _struct_arguments(*, since: str) -> tuple[HookPoint, ...]:
    """What ServerArgs is made and resolved with, where fields cannot be added to it."""
    of = partial(_read, process="frontend", since=since)
    return (
        of(f"{_ARGUMENTS}.resolve_once", "self"),
        of(f"{_ARGUMENTS}.add_cli_args", "parser"),
        of(f"{_ARGUMENTS}.from_cli_args", "args"),
        of("sglang.srt.arg_groups.arg_utils.add_cli_args_from_dataclass", "parser cls fields"),
        of("sglang.srt.arg_groups.overrides.resolution_result", "server_args field default"),
        of("sglang.srt.arg_groups.overrides.model_config_of"),
        of("sglang.srt.plugins.load_plugins", ""),
        of(f"{_ENGINE}.server_args_class"),
        of("sglang.srt.managers.io_struct.GenerateReqInput.cache_salt"),
        of("sglang.srt.managers.detokenizer_manager.run_detokenizer_process"),
    )


HOOK_POINTS = (
    # rows: compact rows of req_to_token
    *_allocation(_COMMON, until="0.5.16"),
    *_allocation(_ALLOCATION, since="0.5.16"),
    # attention: the view of the batch, HOLES before CUDA-graph capture
    _hook(f"{_RUNNER}.init_attention_backends", "self"),
    _hook(f"{_FORWARD}.init_new", "batch model_runner", until="0.5.16"),
    _hook(
        f"{_FORWARD}.init_new",
        "batch model_runner capture_hidden_mode return_hidden_states_before_norm",
        since="0.5.16",
        until="0.5.22",
    ),
    _hook(
        f"{_FORWARD}.init_new",
        "batch model_runner capture_hidden_mode return_hidden_states_before_norm extend_position_info "
        "spec_mrope_positions kv_loc_plan write_cols",
        since="0.5.22",
    ),
    _hook(f"{_ALLOCATION}._prefix_kv_indices", "batch req", since="0.5.22"),
    _hook("sglang.srt.beam_search.coordinator.BeamCoordinator.validate_and_init", "self req recv_req", since="0.5.22"),
    # rows that differ between layers: those batches are not replayed from graphs
    _hook(f"{_EXECUTOR}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.can_run_graph", "self forward_batch"),
    _hook(f"{_EXECUTOR}.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.can_run_graph", "self forward_batch"),
    _hook(f"{_EXECUTOR}.cpu_graph_runner.CPUGraphRunner.can_run_graph", "self forward_batch"),
    _read(f"{_ATTENTION}.init_forward_metadata", "self forward_batch"),
    _read(f"{_ATTENTION}.init_forward_metadata_out_graph", "self forward_batch in_capture"),
    _read(f"{_ATTENTION}.init_forward_metadata_in_graph", "self forward_batch"),
    # what wakes an idle scheduler up
    _read(
        "sglang.srt.managers.scheduler_components.ipc_channels.SchedulerIpcChannels",
    ),
    # control messages
    _hook(f"{_SCHEDULER}.init_request_dispatcher", "self"),
    _hook(
        f"{_SCHEDULER}.__init__",
        "self server_args port_args gpu_id tp_rank moe_ep_rank pp_rank attn_cp_rank moe_dp_rank dp_rank",
        until="0.5.21",
    ),
    _hook(f"{_SCHEDULER}.__init__", "self server_args port_args", since="0.5.21"),
    # series of ours, with SGLang's labels
    _read("sglang.srt.observability.metrics_collector.SchedulerMetricsCollector"),
    _read("sglang.srt.managers.scheduler_components.metrics_reporter.SchedulerMetricsReporter"),
    # a clean stop
    _hook(f"{_SCHEDULER}.run_event_loop", "self"),
    _read(f"{_SCHEDULER}.handle_shutdown", "self recv_req"),
    _hook(
        "sglang.srt.managers.tokenizer_manager.SignalHandler.running_phase_sigquit_handler",
        "self signum frame",
        process="frontend",
    ),
    _hook(f"{_ENGINE}.shutdown", "self", process="frontend"),
    _read("sglang.srt.managers.io_struct.ShutdownReq", process="frontend"),
    _read("sglang.srt.utils.watchdog.SubprocessWatchdog.stop", "self", process="frontend"),
    _read("sglang.srt.utils.cudacore_pyspy_dump_utils.collect_scheduler_processes", "", process="frontend"),
    _read(f"{_TOKENIZER}._async_dispatch_to_scheduler", "self obj", process="frontend"),
    # what answers say of the KV that was served
    _hook(f"{_TOKENIZER}.generate_request", "self obj request", process="frontend"),
    _read("sglang.srt.managers.io_struct.BatchTokenIDOutput.customized_info"),
    _hook(
        "sglang.srt.managers.scheduler_components.output_streamer.SchedulerOutputStreamer."
        "is_request_level_customized_info_key",
        "self key",
        since="0.5.22",
    ),
    # salts, where they are concatenated with extra keys
    _hook(
        "sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase._compute_extra_key",
        "self request",
        process="frontend",
        until="0.5.18",
    ),
    # a request that would wait too long
    _hook(f"{_TOKENIZER}._handle_abort_finish_reason", "self out state is_stream", process="frontend"),
    # the flags, where ServerArgs is a struct
    *_struct_arguments(since="0.5.22"),
    # a refusal, said last
    _hook(
        f"{_ENGINE}._launch_subprocesses",
        "server_args init_tokenizer_manager_func run_scheduler_process_func run_detokenizer_process_func port_args",
        process="frontend",
        until="0.5.22",
    ),
    _hook(
        f"{_ENGINE}._launch_subprocesses",
        "server_args init_tokenizer_manager_func run_scheduler_process_func run_detokenizer_process_func port_args "
        "placement_group",
        process="frontend",
        since="0.5.22",
    ),
    _hook(
        "sglang.srt.entrypoints.http_server.launch_server",
        "server_args init_tokenizer_manager_func run_scheduler_process_func run_detokenizer_process_func "
        "execute_warmup_func launch_callback",
        process="frontend",
    ),
    _read("sglang.srt.utils.kill_process_tree", process="frontend"),
    # the clock, the queue and the times of batches
    _hook("sglang.srt.managers.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs", "self"),
    _hook(f"{_SCHEDULER}._add_request_to_queue", "self req is_retracted"),
    _hook(f"{_SCHEDULER}.get_next_batch_to_run", "self", until="0.5.16"),
    _hook(f"{_SCHEDULER}.get_next_batch_to_run", "self running_batch last_batch", since="0.5.16"),
    _hook(f"{_SCHEDULER}.on_idle", "self"),
    _hook(f"{_ADDER}.add_one_req", "self req has_chunked_req truncation_align_size"),
    # budgets of running requests
    _hook(f"{_SCHEDULER}.init_req_max_new_tokens", "self req"),
    _hook(f"{_ADDER}.add_chunked_req", "self req"),
    _hook(f"{_ADDER}._get_running_request_total_token_offset", "self req"),
    _hook(f"{_BATCH}.ScheduleBatch.prepare_for_extend", "self"),
    _read("sglang.srt.managers.schedule_policy.CLIP_MAX_NEW_TOKENS"),
    _read(f"{_BATCH}.Req.set_finish_with_abort", "self error_msg", until="0.5.19"),
    _read(f"{_BATCH}.Req.set_finish_with_abort", "self error_msg status_code err_type", since="0.5.19"),
    _hook(f"{_COMMON}.evict_from_tree_cache", "tree_cache num_tokens"),
    _read("sglang.srt.managers.schedule_policy.AddReqResult.CONTINUE"),
    _read("sglang.srt.managers.schedule_policy.AddReqResult.NO_TOKEN"),
    _hook(f"{_SCHEDULER}.run_batch", "self batch pp_proxy_tensors"),
    _hook(f"{_SCHEDULER}.process_batch_result", "self batch result"),
    # the weights, and the adapters
    *(
        _hook(f"{_UPDATER}.{name}", "self recv_req")
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
    _hook(f"{_UPDATER}.begin_weight_update", "self recv_req", since="0.5.22"),
    _hook(f"{_UPDATER}.end_weight_update", "self recv_req", since="0.5.22"),
    _read("sglang.srt.constants.GPU_MEMORY_ALL_TYPES"),
    _read("sglang.srt.constants.GPU_MEMORY_TYPE_KV_CACHE"),
    _read("sglang.srt.constants.GPU_MEMORY_TYPE_WEIGHTS"),
    _read(f"{_UPDATER}.offload_tags"),
    _hook(f"{_SCHEDULER}.load_lora_adapter", "self recv_req"),
    _hook(f"{_SCHEDULER}.load_lora_adapter_from_tensors", "self recv_req"),
    _read("sglang.srt.lora.lora_manager.LoRAManager"),
    _seam("sglang.srt.managers.io_struct.hook_custom_types", "new_types"),
    # profiling: requests of our own, sending them back, and giving them up
    _read(f"{_BATCH}.ScheduleBatch.release_req", "self idx remaing_req_count server_args", until="0.5.18"),
    _read(f"{_BATCH}.ScheduleBatch.release_req", "self idx remaing_req_count offload_kv", since="0.5.18"),
    _read(f"{_BATCH}.ScheduleBatch.filter_batch", "self chunked_req_to_exclude keep_indices", until="0.5.22"),
    _read(f"{_BATCH}.ScheduleBatch.filter_batch", "self reqs_to_exclude keep_indices", since="0.5.22"),
    _read("sglang.srt.managers.io_struct.AbortReq"),
    _read(f"{_BATCH}.FINISH_ABORT"),
    _read("sglang.srt.managers.io_struct.GenerateReqInput", process="frontend"),
    _read(f"{_TOKENIZER}._dispatch_to_scheduler", process="frontend"),
    _read(f"{_TOKENIZER}.auto_create_handle_loop", "self", process="frontend"),
    _hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "server_args tokenizer_manager template_manager port_args scheduler_infos subprocess_watchdog "
        "execute_warmup_func launch_callback",
        process="frontend",
    ),
    _read("sglang.srt.entrypoints.http_server.app", process="frontend"),
    _read("sglang.srt.utils.auth.auth_level", "level", process="frontend"),
    # the cache
    _seam("sglang.srt.mem_cache.registry.register_radix_cache_backend", "name factory"),
    _read(f"{_RADIX}.__init__", "self params"),
    _read(f"{_RADIX}.reset", "self"),
    _read(f"{_RADIX}.match_prefix", "self params"),
    _read(f"{_RADIX}.insert", "self params"),
    _read(f"{_RADIX}.evict", "self params"),
    _read(f"{_RADIX}.cache_finished_req", "self req is_insert", until="0.5.16"),
    _read(f"{_RADIX}.cache_finished_req", "self req is_insert kv_len_to_handle", since="0.5.16", until="0.5.21"),
    _read(f"{_RADIX}.cache_unfinished_req", "self req chunked", until="0.5.22"),
    _read(f"{_RADIX}.checkpoint", "self req up_to", since="0.5.22"),
    _read(f"{_BASE_CACHE}.claim_kv_row", "self req", since="0.5.22"),
    _read(f"{_BASE_CACHE}.free_kv_row", "self kv ranges", since="0.5.22"),
    _read(f"{_BASE_CACHE}.prefix_device_indices", "self req", since="0.5.22"),
    _read(f"{_BASE_CACHE}.touch_prefix", "self key", since="0.5.22"),
    _read(f"{_BASE_CACHE}.lock", "self node", since="0.5.22"),
    _read(f"{_BASE_CACHE}.unlock", "self lock", since="0.5.22"),
    _read(f"{_RADIX}.inc_lock_ref", "self node"),
    _read(f"{_RADIX}.dec_lock_ref", "self node params"),
    _read(f"{_RADIX}._match_prefix_helper", "self node key"),
    _read(f"{_RADIX}._split_node", "self key child split_len"),
    _read(f"{_RADIX}._delete_leaf", "self node"),
    _read(f"{_RADIX}._update_leaf_status", "self node"),
    _read("sglang.srt.mem_cache.utils.compute_node_hash_values", "node page_size"),
    _read("sglang.srt.mem_cache.radix_cache.TreeNode.__init__", "self id priority"),
    # loads, as the hierarchical cache has them
    _read(f"{_BASE_CACHE}.init_load_back", "self params"),
    _read(f"{_KV_CACHE}.register_layer_transfer_counter", "self layer_transfer_counter"),
    # the storage backends of the hierarchical cache, for the external store
    _read("sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory.create_backend"),
    _read("sglang.srt.mem_cache.hicache_storage.HiCacheStorageConfig"),
    _read("sglang.srt.mem_cache.hicache_storage.HiCacheStorage.exists", "self key"),
    _read("sglang.srt.mem_cache.hicache_storage.HiCacheStorage.get", "self key target_location target_sizes"),
    _read("sglang.srt.mem_cache.hicache_storage.HiCacheStorage.set", "self key value target_location target_sizes"),
    # the pool and its allocators
    _read(f"{_ALLOCATOR}.token.TokenToKVPoolAllocator.free", "self free_index"),
    _read(f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator.free", "self free_index"),
    _read(f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator.free_page_ids", "self page_ids", since="0.5.22"),
    _read(f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator.get_all_free_pages", "self", since="0.5.22"),
    _hook(
        f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator.alloc_extend",
        "self prefix_lens prefix_lens_cpu seq_lens seq_lens_cpu last_loc extend_num_tokens num_new_pages",
    ),
    _hook(f"{_ALLOCATOR}.paged.PagedTokenToKVPoolAllocator.alloc_decode", "self seq_lens seq_lens_cpu last_loc"),
    _read(f"{_POOL}._get_key_buffer", "self layer_id"),
    _read(f"{_POOL}._get_value_buffer", "self layer_id"),
)
