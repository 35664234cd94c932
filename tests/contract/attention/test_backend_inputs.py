"""Inputs of attention backends that see the physical view: indptr, indices, page tables, lengths.

No attention kernel runs. SGLang's own planning code builds its inputs from the view, with its Triton index builders
(interpreted on the CPU), and each is compared with the slots that the rows hold.
"""

from __future__ import annotations

import copy
import importlib
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.attention import flashinfer_backend, triton_backend
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.attention.flashinfer_backend import (
    FlashInferAttnBackend,
    FlashInferIndicesUpdaterDecode,
    FlashInferIndicesUpdaterPrefill,
    WrapperDispatch,
)
from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from tests.contract.releases import ROW_KERNEL

from sglang_evicpress.patches.attention.physical_lengths import _show_views, physical_view
from sglang_evicpress.patches.attention.request_holes import RequestHoles
from sglang_evicpress.patches.compat import sglang_0_5_15, sglang_0_5_23
from sglang_evicpress.patches.compat.release import RELEASE
from sglang_evicpress.patches.scheduler import paged_allocator

write_req_to_token_pool_triton = pkgutil.resolve_name(ROW_KERNEL)

pytestmark = [
    pytest.mark.sglang,
    # Triton's interpreter turns arrays of one element into a Python int.
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]

NUM_ROWS, CONTEXT = 12, 640  # wider than one block of the index builders (512)
KV_HEADS, Q_HEADS, HEAD_DIM = 2, 4, 16


@dataclass(frozen=True, slots=True)
class Request:
    """Logical lengths: ``prefix`` tokens in the cache (``holes`` of them without a slot), ``new`` ones to compute."""

    row: int
    prefix: int
    holes: int
    new: int

    @property
    def logical(self) -> int:
        return self.prefix + self.new

    @property
    def held(self) -> int:
        return self.prefix - self.holes

    @property
    def physical(self) -> int:
        return self.logical - self.holes


DECODES = {
    "with and without holes": (Request(3, 40, 25, 1), Request(7, 9, 0, 1), Request(1, 600, 17, 1)),
    "more than one block": (Request(2, 639, 96, 1),),
    "one slot": (Request(5, 32, 32, 1), Request(6, 0, 0, 1)),
}
EXTENDS = {
    "with and without holes": (Request(3, 40, 25, 6), Request(7, 9, 0, 4), Request(1, 0, 0, 11)),
    "next chunk of a prompt": (Request(4, 560, 30, 64),),
    "one prefix without slots": (Request(2, 32, 32, 5), Request(3, 48, 16, 3)),
    "no prefix has a slot": (Request(2, 32, 32, 5), Request(3, 16, 16, 7)),
}
PAGED_DECODES = {
    "with and without holes": (Request(3, 53, 32, 1), Request(7, 9, 0, 1), Request(1, 600, 64, 1)),
    "page begins": (Request(3, 64, 48, 1), Request(2, 32, 0, 1)),
}
PAGED_EXTENDS = {
    "with and without holes": (Request(3, 64, 48, 6), Request(7, 16, 0, 40), Request(1, 0, 0, 11)),
    "no prefix has a slot": (Request(2, 32, 32, 5), Request(3, 16, 16, 17)),
}


def cases(table: dict[str, tuple[Request, ...]]) -> Any:
    return pytest.mark.parametrize("requests", table.values(), ids=table.keys())


@dataclass(slots=True)
class World:
    """Compact rows as the hooks write them, their slots per row, and the table of holes. Free cells hold junk."""

    rows: torch.Tensor
    slots: dict[int, list[int]]
    table: RequestHoles
    device: str

    @classmethod
    def of(cls, requests: tuple[Request, ...], device: str, page_size: int = 1) -> World:
        rows = torch.full((NUM_ROWS, CONTEXT), 99_999, dtype=torch.int32)
        rows[0] = 0  # the row of padding
        pages = torch.randperm(400) + 1 if page_size > 1 else torch.randperm(8_000) + 1
        slots, taken = {}, 0
        for request in requests:
            num_pages = -(-request.physical // page_size)
            every = pages[taken : taken + num_pages, None] * page_size + torch.arange(page_size)
            taken += num_pages
            slots[request.row] = every.reshape(-1)[: request.physical].tolist()
            rows[request.row, : request.physical] = every.reshape(-1)[: request.physical].to(torch.int32)
            rows[request.row, request.physical : request.logical] = 0
        table = RequestHoles(NUM_ROWS, device)
        where = torch.tensor([request.row for request in requests])
        table.write(where.to(device), where, [request.holes for request in requests])
        table.begin_batch(where)
        return cls(rows.to(device), slots, table, device)

    def batch(self, requests: tuple[Request, ...], mode: ForwardMode, **fields: Any) -> Any:
        """Batch as SGLang hands it to a backend, in logical lengths."""
        lens = torch.tensor([request.logical for request in requests])
        prefix_lens = [request.prefix for request in requests]
        new = [request.new for request in requests]
        extend = mode.is_extend()
        batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=len(requests),
            req_pool_indices=torch.tensor([request.row for request in requests], device=self.device),
            seq_lens=lens.to(self.device),
            seq_lens_cpu=lens,
            seq_lens_sum=int(lens.sum()),
            extend_prefix_lens=torch.tensor(prefix_lens, dtype=torch.int32, device=self.device) if extend else None,
            extend_prefix_lens_cpu=prefix_lens if extend else None,
            extend_seq_lens=torch.tensor(new, dtype=torch.int32, device=self.device) if extend else None,
            extend_seq_lens_cpu=new if extend else None,
            positions=torch.zeros(sum(new), dtype=torch.int64, device=self.device),
            out_cache_loc=None,
            encoder_lens=None,
            spec_info=None,
            cross_attention_custom_mask=None,
            global_num_tokens_cpu=None,
            mamba_track_indices=None,
            max_seq_len_host=None,
            max_seq_len_override=None,
            lora_ids=None,
            can_run_decode_cuda_graph=True,
        )
        vars(batch).update(fields)
        translator = translator_over(self)
        if translator is not None:
            translator.own_plan(batch).bind(batch, translator)
        return batch

    def see(self, requests: tuple[Request, ...], mode: ForwardMode) -> Any:
        return physical_view(self.batch(requests, mode), self.table)


def translator_over(world: World, page_size: int = 1) -> Any:
    """SGLang 0.5.23's own reader of rows, over a pool whose slots are what kernels read; None in older releases."""
    if RELEASE is not sglang_0_5_23:
        return None
    from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

    translator = KVIndexTranslator(
        req_to_token=world.rows,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=page_size,
        device=world.device,
    )
    assert not translator.reads_are_translated
    return translator


def indptr(lengths: list[int]) -> list[int]:
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return sums


def assert_ragged(world: World, kv_indptr: torch.Tensor, kv_indices: torch.Tensor, wanted: list[list[int]]) -> None:
    """``wanted``: the slots of each sequence, in order."""
    assert kv_indptr.tolist() == indptr([len(slots) for slots in wanted])
    assert kv_indices[: int(kv_indptr[-1])].tolist() == [slot for slots in wanted for slot in slots]


# ---- Triton


def triton_backend_over(world: World) -> TritonAttnBackend:
    backend = object.__new__(TritonAttnBackend)
    vars(backend).update(
        req_to_token=world.rows,
        device=world.device,
        kv_indptr=torch.zeros(NUM_ROWS + 1, dtype=torch.int32, device=world.device),
        qo_indptr=torch.zeros(NUM_ROWS + 1, dtype=torch.int64, device=world.device),
        window_kv_indptr=None,
        sliding_window_size=None,
        use_sliding_window_kv_pool=False,
        _translate_kv_loc=None,
        kv_index_translator=translator_over(world),
        is_draft_runner=False,
        num_draft_tokens=None,
        _verify_mask=None,
        dllm_attention=None,
        lean_total_programs=1,
        lean_block_m=16,
        swa_v_head_dim=None,
        skip_prefill=True,
        dcp_size=1,
        dcp_rank=0,
        num_head=Q_HEADS,
        num_kv_head=KV_HEADS,
        v_head_dim=HEAD_DIM,
        max_context_len=CONTEXT,
        max_kv_splits=8,
        static_kv_splits=False,
        enable_deterministic=False,
        split_tile_size=None,
        device_core_count=132,
    )
    return backend


class TestTriton:
    @cases(DECODES | PAGED_DECODES)
    def test_decode(self, requests: tuple[Request, ...], device: str) -> None:
        world = World.of(requests, device)
        backend = triton_backend_over(world)
        backend.init_forward_metadata(world.see(requests, ForwardMode.DECODE))
        plan = backend.forward_metadata
        assert_ragged(world, plan.kv_indptr, plan.kv_indices, list(world.slots.values()))
        assert len(plan.kv_indices) == sum(request.physical for request in requests)
        assert (plan.num_kv_splits >= 1).all()

    @cases(EXTENDS | PAGED_EXTENDS)
    def test_extend(self, requests: tuple[Request, ...], device: str) -> None:
        world = World.of(requests, device)
        backend = triton_backend_over(world)
        backend.init_forward_metadata(world.see(requests, ForwardMode.EXTEND))
        plan = backend.forward_metadata
        wanted = [world.slots[request.row][: request.held] for request in requests]
        assert_ragged(world, plan.kv_indptr, plan.kv_indices, wanted)
        assert plan.qo_indptr.tolist() == indptr([request.new for request in requests])
        assert plan.max_extend_len == max(request.new for request in requests)

    @cases(DECODES)
    def test_replay_of_a_padded_graph(self, requests: tuple[Request, ...], device: str) -> None:
        world = World.of(requests, device)
        backend = triton_backend_over(world)
        backend.init_cuda_graph_state(8, 8)
        bucket = replay_view(world, requests, bucket=4)
        backend.init_forward_metadata_out_graph(physical_view(bucket, world.table))
        padding = [[0]] * (4 - len(requests))
        assert_ragged(world, backend.kv_indptr[:5], backend.cuda_graph_kv_indices, [*world.slots.values(), *padding])

    def test_without_host_lengths_the_indices_are_still_exact(self, device: str) -> None:
        """Triton may opt out of host lengths; the buffer is then sized by the logical sum, which is enough."""
        requests = DECODES["with and without holes"]
        world = World.of(requests, device)
        backend = triton_backend_over(world)
        batch = world.batch(requests, ForwardMode.DECODE, seq_lens_cpu=None)
        backend.init_forward_metadata(physical_view(batch, world.table))
        plan = backend.forward_metadata
        assert_ragged(world, plan.kv_indptr, plan.kv_indices, list(world.slots.values()))


def replay_view(world: World, requests: tuple[Request, ...], bucket: int, fill: int = 1) -> Any:
    """SGLang's own SimpleNamespace over static buffers, padded to ``bucket`` with row 0."""
    batch = world.batch(requests, ForwardMode.DECODE)
    lens = torch.full((8,), fill)
    lens[: len(requests)] = batch.seq_lens_cpu
    where = torch.zeros(8, dtype=torch.int64)
    where[: len(requests)] = batch.req_pool_indices.cpu()
    buffers = SimpleNamespace(
        input_ids=torch.zeros(8, dtype=torch.int64, device=world.device),
        positions=torch.zeros(8, dtype=torch.int64, device=world.device),
        req_pool_indices=where.to(world.device),
        seq_lens=lens.to(world.device),
        seq_lens_cpu=lens,
        encoder_lens=None,
        mamba_track_indices=None,
    )
    later = {"global_num_tokens_cpu": None} if RELEASE is sglang_0_5_23 else {}
    return build_replay_fb_view(
        forward_batch=batch,
        buffers=buffers,
        bs=bucket,
        raw_bs=len(requests),
        num_tokens=bucket,
        seq_len_fill_value=fill,
        capture_forward_mode=ForwardMode.DECODE,
        is_encoder_decoder=False,
        **later,
    )


# ---- FlashInfer


class Wrapper:
    """Stands for a FlashInfer wrapper: remembers what it was told to plan."""

    def __init__(self, graph_indices: torch.Tensor | None = None) -> None:
        self.is_cuda_graph_enabled = graph_indices is not None
        self._paged_kv_indices_buf = graph_indices
        self.arguments: tuple[Any, ...] = ()
        self.keywords: dict[str, Any] = {}

    def begin_forward(self, *arguments: Any, **keywords: Any) -> None:
        self.arguments, self.keywords = arguments, keywords


@pytest.fixture
def host_as_cuda(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """FlashInfer's decode planning names "cuda" itself; where there is none, it gets the CPU."""
    empty = torch.empty

    def on_device(*size: Any, **keywords: Any) -> torch.Tensor:
        if keywords.get("device") == "cuda":
            keywords["device"] = device
        return empty(*size, **keywords)

    monkeypatch.setattr(torch, "empty", on_device)


def flashinfer_backend_over(world: World) -> Any:
    """The backend with one paged wrapper per kind; its two index updaters are SGLang's, built by their constructors."""
    backend = object.__new__(FlashInferAttnBackend)
    zeros = {"dtype": torch.int32, "device": world.device}
    vars(backend).update(
        dispatch_reason=None,
        kv_index_translator=translator_over(world),
        prefill_uses_dequant_workspace=False,
        num_wrappers=1,
        kv_indptr=[torch.zeros(NUM_ROWS + 1, **zeros)],
        qo_indptr=[torch.zeros(NUM_ROWS + 1, **zeros)],
        kv_last_page_len=torch.ones(NUM_ROWS, **zeros),
        prefill_wrapper_ragged=Wrapper(),
        prefill_wrappers_paged=[Wrapper()],
        decode_wrappers=[Wrapper()],
        decode_cuda_graph_metadata={},
        use_sliding_window_kv_pool=False,
        _swa_kv_pool=None,
        is_multimodal=False,
        enable_mis=False,
        enable_deterministic=False,
        use_paged=False,
        prefill_split_tile_size=None,
        decode_split_tile_size=None,
        disable_cuda_graph_kv_split=False,
    )
    common = {
        "num_qo_heads": Q_HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "data_type": torch.bfloat16,
        "q_data_type": torch.bfloat16,
        "sliding_window_size": None,
        "attn_backend": backend,
        "kv_indptr": backend.kv_indptr,
        "kv_last_page_len": backend.kv_last_page_len,
        "req_to_token": world.rows,
        "_swa_kv_pool": None,
        "kv_index_translator": backend.kv_index_translator,
    }
    decode = object.__new__(FlashInferIndicesUpdaterDecode)
    vars(decode).update(common, update=decode.update_single_wrapper)
    prefill = object.__new__(FlashInferIndicesUpdaterPrefill)
    vars(prefill).update(
        common,
        qo_indptr=backend.qo_indptr,
        prefill_wrapper_ragged=backend.prefill_wrapper_ragged,
        update=prefill.update_single_wrapper,
    )
    backend.indices_updater_decode, backend.indices_updater_prefill = decode, prefill
    return backend


@pytest.mark.usefixtures("host_as_cuda")
class TestFlashInfer:
    @cases(DECODES | PAGED_DECODES)
    def test_decode(self, requests: tuple[Request, ...], device: str) -> None:
        world = World.of(requests, device)
        backend = flashinfer_backend_over(world)
        backend.init_forward_metadata(world.see(requests, ForwardMode.DECODE))
        kv_indptr, kv_indices, last_page_lens, *_ = backend.decode_wrappers[0].arguments
        assert_ragged(world, kv_indptr, kv_indices, list(world.slots.values()))
        assert len(kv_indices) == int(kv_indptr[-1])
        assert last_page_lens.tolist() == [1] * len(requests)

    @cases(DECODES)
    def test_replay_of_a_padded_graph_plans_the_same_on_host_and_device(
        self, requests: tuple[Request, ...], device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """From the second plan on SGLang swaps in fast_decode_plan, which believes the host's lengths."""
        world = World.of(requests, device)
        backend = flashinfer_backend_over(world)
        indices = torch.full((8 * CONTEXT,), -1, dtype=torch.int32, device=device)
        wrapper = Wrapper(indices)
        monkeypatch.setattr(flashinfer_backend, "fast_decode_plan", Wrapper.begin_forward, raising=False)
        monkeypatch.setattr(wrapper, "begin_forward", partial(Wrapper.begin_forward, wrapper))
        backend.decode_cuda_graph_metadata[4] = [wrapper]
        backend.init_forward_metadata_out_graph(physical_view(replay_view(world, requests, bucket=4), world.table))
        kv_indptr, kv_indices, *_ = wrapper.arguments
        assert_ragged(world, kv_indptr, kv_indices, [*world.slots.values(), *[[0]] * (4 - len(requests))])
        assert wrapper.keywords["global_override_indptr_cpu"].tolist() == kv_indptr.tolist()
        assert kv_indices is indices
        assert flashinfer_backend.global_override_indptr_cpu is None

    @cases(EXTENDS | PAGED_EXTENDS)
    def test_extend_ragged_over_a_paged_prefix(self, requests: tuple[Request, ...], device: str) -> None:
        """New tokens go through the ragged wrapper (causal); the paged one reads the prefix, all of it."""
        world = World.of(requests, device)
        backend = flashinfer_backend_over(world)
        backend.init_forward_metadata(world.see(requests, ForwardMode.EXTEND))
        qo_indptr, kv_indptr, kv_indices, *_ = backend.prefill_wrappers_paged[0].arguments
        wanted = [world.slots[request.row][: request.held] for request in requests]
        assert_ragged(world, kv_indptr, kv_indices, wanted)
        new = indptr([request.new for request in requests])
        assert qo_indptr.tolist() == new
        assert [part.tolist() for part in backend.prefill_wrapper_ragged.arguments[:2]] == [new, new]
        assert backend.forward_metadata.use_ragged
        assert backend.forward_metadata.extend_no_prefix == (not any(map(len, wanted)))

    @cases(EXTENDS | PAGED_EXTENDS)
    def test_extend_all_paged(self, requests: tuple[Request, ...], device: str) -> None:
        """Deterministic inference reads prefix and new tokens from the pool, causal from the bottom right."""
        world = World.of(requests, device)
        backend = flashinfer_backend_over(world)
        backend.use_paged = True
        backend.init_forward_metadata(world.see(requests, ForwardMode.EXTEND))
        qo_indptr, kv_indptr, kv_indices, *_ = backend.prefill_wrappers_paged[0].arguments
        assert_ragged(world, kv_indptr, kv_indices, list(world.slots.values()))
        assert qo_indptr.tolist() == indptr([request.new for request in requests])

    def test_only_one_wrapper_is_planned_for_full_attention(self) -> None:
        """Sliding windows and cross attention dispatch elsewhere, and are refused."""
        assert {reason.name for reason in WrapperDispatch} == {"SLIDING_WINDOW", "CROSS_ATTENTION"}


# ---- FlashAttention 3


@pytest.fixture(scope="module")
def flashattention() -> Iterator[ModuleType]:
    """The module; its kernel libraries, which load a CUDA driver, are replaced for the import: no kernel runs here."""
    stubs = {
        "sgl_kernel": ("merge_state_v2",),
        "sglang.jit_kernel.flash_attention": ("flash_attn_varlen_func", "flash_attn_with_kvcache"),
    }
    name = "sglang.srt.layers.attention.flashattention_backend"
    loaded = name in sys.modules
    with pytest.MonkeyPatch.context() as monkeypatch:
        for library, names in stubs.items():
            stub = ModuleType(library)
            vars(stub).update(dict.fromkeys(names))
            monkeypatch.setitem(sys.modules, library, stub)
        module = importlib.import_module(name)
    yield module
    if not loaded:
        del sys.modules[name]


def flashattention_over(module: ModuleType, world: World, page_size: int) -> Any:
    backend = object.__new__(module.FlashAttentionBackend)
    vars(backend).update(
        req_to_token=world.rows,
        req_to_token_pool=SimpleNamespace(req_to_token=world.rows),
        device=world.device,
        page_size=page_size,
        max_context_len=CONTEXT,
        max_num_pages=CONTEXT // page_size,
        topk=0,
        speculative_num_draft_tokens=0,
        has_swa=False,
        has_local_attention=False,
        is_prefill_aware_swa=False,
        use_sliding_window_kv_pool=False,
        use_mla=False,
        _unified_dense=False,
        _unified_hooks=SimpleNamespace(v2p_page_table=None, kernel_page_multiplier=1, enabled=False),
        local_attn_builder=None,
        kv_index_translator=translator_over(world, page_size),
        attn_cp_size=1,
        _get_scheduler_metadata=None,
        _sched_meta_buf=None,
        _maybe_init_local_attn_metadata=lambda *_: None,
        _maybe_update_local_attn_metadata_for_replay=lambda *_: None,
    )
    return backend


def assert_paged(world: World, plan: Any, requests: tuple[Request, ...], page_size: int) -> None:
    """Rows of the page table up to each length; what follows is never read."""
    lengths = [request.physical for request in requests]
    assert plan.cache_seqlens_int32.dtype == plan.cu_seqlens_k.dtype == torch.int32
    assert plan.cache_seqlens_int32.tolist() == lengths
    assert plan.cu_seqlens_k.tolist() == indptr(lengths)
    for i, request in enumerate(requests):
        pages = [slot // page_size for slot in world.slots[request.row][::page_size]]
        assert plan.page_table[i, : len(pages)].tolist() == pages


SINGLE_OR_PAGED_DECODES = [(1, requests) for requests in DECODES.values()] + [
    (page, requests) for page in (1, 16) for requests in PAGED_DECODES.values()
]
SINGLE_OR_PAGED_EXTENDS = [(1, requests) for requests in EXTENDS.values()] + [
    (page, requests) for page in (1, 16) for requests in PAGED_EXTENDS.values()
]


class TestFlashAttention:
    @pytest.mark.parametrize(("page_size", "requests"), SINGLE_OR_PAGED_DECODES)
    def test_decode(
        self, flashattention: ModuleType, page_size: int, requests: tuple[Request, ...], device: str
    ) -> None:
        world = World.of(requests, device, page_size)
        backend = flashattention_over(flashattention, world, page_size)
        backend.init_forward_metadata(world.see(requests, ForwardMode.DECODE))
        plan = backend.forward_metadata
        assert_paged(world, plan, requests, page_size)
        assert plan.max_seq_len_k == max(request.physical for request in requests)
        assert plan.cu_seqlens_q.tolist() == list(range(len(requests) + 1))

    @pytest.mark.parametrize(("page_size", "requests"), SINGLE_OR_PAGED_EXTENDS)
    def test_extend(
        self, flashattention: ModuleType, page_size: int, requests: tuple[Request, ...], device: str
    ) -> None:
        world = World.of(requests, device, page_size)
        backend = flashattention_over(flashattention, world, page_size)
        backend.init_forward_metadata(world.see(requests, ForwardMode.EXTEND))
        plan = backend.forward_metadata
        assert_paged(world, plan, requests, page_size)
        assert plan.max_seq_len_k == max(request.physical for request in requests)
        assert plan.cu_seqlens_q.tolist() == indptr([request.new for request in requests])
        assert plan.max_seq_len_q >= max(request.new for request in requests)

    @pytest.mark.parametrize(("page_size", "requests"), SINGLE_OR_PAGED_DECODES)
    def test_replay_of_a_padded_graph(
        self, flashattention: ModuleType, page_size: int, requests: tuple[Request, ...], device: str
    ) -> None:
        world = World.of(requests, device, page_size)
        backend = flashattention_over(flashattention, world, page_size)
        zeros = {"dtype": torch.int32, "device": device}
        plan = SimpleNamespace(
            cache_seqlens_int32=torch.zeros(4, **zeros),
            cu_seqlens_k=torch.zeros(5, **zeros),
            page_table=torch.zeros((4, CONTEXT // page_size), **zeros),
            swa_page_table=None,
            scheduler_metadata=None,
        )
        strided = torch.arange(0, CONTEXT, page_size, device=device)
        backend.decode_cuda_graph_metadata = {4: plan, "strided_indices": strided}
        backend.init_forward_metadata_out_graph(physical_view(replay_view(world, requests, bucket=4), world.table))
        padding = (Request(0, 0, 0, 1),) * (4 - len(requests))
        world.slots[0] = [0]
        assert_paged(world, plan, (*requests, *padding), page_size)
        longest = max(request.physical for request in requests)
        if RELEASE is sglang_0_5_15:
            assert plan.max_seq_len_k == longest
        else:  # a bound that holds for every replay of the graph; lengths are those of the table
            assert longest <= plan.max_seq_len_k <= CONTEXT


# ---- the view itself


class TestPhysicalView:
    @cases(EXTENDS)
    def test_lengths_are_physical_and_the_batch_is_untouched(self, requests: tuple[Request, ...], device: str) -> None:
        world = World.of(requests, device)
        batch = world.batch(requests, ForwardMode.EXTEND)
        plan = vars(batch).pop("kv_loc_plan", None)  # compared by identity, as no copy equals it
        before = copy.deepcopy(vars(batch))
        batch.kv_loc_plan = before["kv_loc_plan"] = plan
        view = physical_view(batch, world.table)
        physical = [request.physical for request in requests]
        assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist() == physical
        assert view.seq_lens_sum == sum(physical)
        held = [request.held for request in requests]
        assert view.extend_prefix_lens.tolist() == view.extend_prefix_lens_cpu == held
        for name, value in vars(batch).items():
            same = torch.equal(value, before[name]) if isinstance(value, torch.Tensor) else value == before[name]
            assert same, name
        for name in ("positions", "req_pool_indices", "extend_seq_lens", "extend_seq_lens_cpu", "forward_mode"):
            assert getattr(view, name) is getattr(batch, name)
        for name in ("seq_lens", "seq_lens_cpu", "extend_prefix_lens"):
            assert getattr(view, name).dtype == getattr(batch, name).dtype

    @pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
    def test_without_holes_it_is_the_very_same_object(self, mode: ForwardMode, device: str) -> None:
        requests = (Request(3, 40, 0, 1), Request(7, 9, 0, 1))
        world = World.of(requests, device)
        batch = world.batch(requests, mode)
        before = dict(vars(batch))
        assert physical_view(batch, world.table) is batch
        assert vars(batch).keys() == before.keys()
        assert all(vars(batch)[name] is value for name, value in before.items())

    def test_holes_of_other_rows_do_not_matter(self, device: str) -> None:
        requests = (Request(3, 40, 0, 1),)
        world = World.of(requests, device)
        other = torch.tensor([5])
        world.table.write(other.to(device), other, [11])
        batch = world.batch(requests, ForwardMode.DECODE)
        assert physical_view(batch, world.table) is batch

    def test_a_view_of_a_view_is_the_view(self, device: str) -> None:
        requests = DECODES["with and without holes"]
        world = World.of(requests, device)
        view = world.see(requests, ForwardMode.DECODE)
        assert physical_view(view, world.table) is view

    def test_eager_planning_through_the_graph_hook_subtracts_once(self, device: str) -> None:
        """``AttentionBackend.init_forward_metadata`` is by default a call of the other wrapped method."""
        seen: list[list[int]] = []

        class Backend(AttentionBackend):
            def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
                seen.append(forward_batch.seq_lens.tolist())

        requests = DECODES["with and without holes"]
        world = World.of(requests, device)
        backend = Backend()
        _show_views(backend, world.table)
        batch = world.batch(requests, ForwardMode.DECODE)
        backend.init_forward_metadata(batch)
        backend.init_forward_metadata_out_graph(batch)
        assert seen == [[request.physical for request in requests]] * 2
        backend.init_forward_metadata_out_graph(batch, in_capture=True)  # a made-up batch, whatever ran before
        assert seen[2] == [request.logical for request in requests]

    @pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
    def test_both_backends_of_a_hybrid_see_it(self, mode: ForwardMode, device: str) -> None:
        requests = EXTENDS["with and without holes"]
        world = World.of(requests, device)
        hybrid = object.__new__(HybridAttnBackend)
        hybrid.prefill_backend, hybrid.decode_backend = triton_backend_over(world), triton_backend_over(world)
        _show_views(hybrid, world.table)
        hybrid.init_forward_metadata(world.batch(requests, mode))
        planned = hybrid.decode_backend if mode.is_decode() else hybrid.prefill_backend
        lengths = [r.physical if mode.is_decode() else r.held for r in requests]
        assert planned.forward_metadata.kv_indptr.tolist() == indptr(lengths)

    def test_a_request_that_is_over_keeps_a_length_of_one(self, device: str) -> None:
        """It may still be in the batch in flight when its row is given to another request with more holes."""
        requests = (Request(3, 4, 0, 1), Request(7, 40, 8, 1))
        world = World.of(requests, device)
        where = torch.tensor([3])
        world.table.write(where.to(device), where, [30])
        world.table.begin_batch(torch.tensor([3, 7]))
        view = world.see(requests, ForwardMode.EXTEND)
        assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist() == [1, 33]
        assert view.seq_lens_sum == 34
        assert view.extend_prefix_lens.tolist() == view.extend_prefix_lens_cpu == [0, 32]

    def test_sequences_of_no_length_that_pad_a_full_prefill_graph_keep_it(self, device: str) -> None:
        requests = (*EXTENDS["with and without holes"], Request(0, 0, 0, 0))
        world = World.of(requests[:-1], device)
        view = world.see(requests, ForwardMode.EXTEND)
        assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist() == [request.physical for request in requests]
        assert view.extend_prefix_lens.tolist() == view.extend_prefix_lens_cpu

    @pytest.mark.parametrize("fill", [0, 1])
    def test_padding_counts_the_same_on_host_and_device(self, fill: int, device: str) -> None:
        requests = DECODES["with and without holes"]
        world = World.of(requests, device)
        view = physical_view(replay_view(world, requests, bucket=8, fill=fill), world.table)
        assert view.seq_lens.tolist() == view.seq_lens_cpu.tolist()
        assert view.seq_lens.tolist()[len(requests) :] == [1] * 5
        assert view.seq_lens_sum == int(view.seq_lens.sum())

    @pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.EXTEND])
    def test_nothing_waits_for_the_device(self, mode: ForwardMode) -> None:
        """``meta`` tensors stand for a GPU: .item(), .cpu(), .tolist(), bool() and boolean masks raise on them."""
        requests = EXTENDS["with and without holes"]
        world = World.of(requests, "cpu")
        on_gpu = RequestHoles(NUM_ROWS, "meta")
        on_gpu.host, on_gpu.batch = world.table.host, world.table.batch
        batch = world.batch(requests, mode)
        for name in ("req_pool_indices", "seq_lens", "extend_prefix_lens", "extend_seq_lens"):
            if getattr(batch, name) is not None:
                setattr(batch, name, getattr(batch, name).to("meta"))
        view = physical_view(batch, on_gpu)
        assert view.seq_lens.is_meta and view.seq_lens.shape == batch.seq_lens.shape
        assert view.seq_lens_cpu.tolist() == [request.physical for request in requests]
        if mode.is_extend():
            assert view.extend_prefix_lens.is_meta
            assert view.extend_prefix_lens_cpu == [request.held for request in requests]


# ---- what writes the rows


class TestRowWriter:
    def test_the_kernel_of_sglang_writes_physical_rows(self, device: str) -> None:
        """Given physical lengths and compact prefixes, as the write hook does, SGLang's kernel needs no change."""
        requests = (Request(3, 700, 200, 6), Request(7, 9, 0, 4), Request(1, 32, 32, 11))
        rows = torch.full((NUM_ROWS, 1024), 99_999, dtype=torch.int32, device=device)
        slots = torch.randperm(4_000, device=device)
        prefixes, begin = [], 0
        for request in requests:
            prefixes.append(slots[begin : begin + request.held].clone())
            begin += request.held
        new = slots[begin : begin + sum(request.new for request in requests)]
        lengths = {
            name: torch.tensor([getattr(request, name) for request in requests], device=device)
            for name in ("row", "held", "physical", "new")
        }
        pointers = torch.tensor([prefix.data_ptr() for prefix in prefixes], dtype=torch.uint64, device=device)
        write_req_to_token_pool_triton[(len(requests),)](
            rows,
            lengths["row"],
            pointers,
            lengths["held"],
            lengths["physical"],
            lengths["new"],
            new,
            rows.shape[1],
        )
        begin = 0
        for request, prefix in zip(requests, prefixes, strict=True):
            wanted = [*prefix.tolist(), *new[begin : begin + request.new].tolist()]
            begin += request.new
            assert rows[request.row, : request.physical].tolist() == wanted
            assert (rows[request.row, request.physical :] == 99_999).all()


class TestPagedAllocator:
    """Ours on the CPU and SGLang's Triton kernels: the same slots in the same order, the same pages left."""

    def pair(self, device: str, page_size: int, need_sort: bool) -> tuple[Any, Any]:
        ours, theirs = (
            PagedTokenToKVPoolAllocator(64 * page_size, page_size, torch.float32, where, None, need_sort)  # type: ignore[arg-type]
            for where in ("cpu", device)
        )
        pages = torch.randperm(64) + 1
        for allocator, where in ((ours, "cpu"), (theirs, device)):
            allocator.free_pages = pages[:40].to(where)
            if need_sort:
                allocator.release_pages = pages[40:].to(where)
        return ours, theirs

    @pytest.mark.parametrize("page_size", [4, 16])
    @pytest.mark.parametrize("need_sort", [False, True])
    def test_random_extends_and_decodes(self, page_size: int, need_sort: bool, device: str) -> None:
        extend = PagedTokenToKVPoolAllocator.alloc_extend
        decode = PagedTokenToKVPoolAllocator.alloc_decode
        for _ in range(6):
            ours, theirs = self.pair(device, page_size, need_sort)
            batch_size = int(torch.randint(1, 6, ()))
            prefix_lens = torch.randint(0, 4 * page_size, (batch_size,))
            seq_lens = prefix_lens + torch.randint(1, 2 * page_size, (batch_size,))
            last = torch.randint(100, 120, (batch_size,)) * page_size + (prefix_lens - 1) % page_size
            last[prefix_lens == 0] = -1
            new = int((seq_lens - prefix_lens).sum())
            host = (prefix_lens, prefix_lens, seq_lens, seq_lens, last, new)
            there = (prefix_lens.to(device), prefix_lens, seq_lens.to(device), seq_lens, last.to(device), new)
            mine = paged_allocator._around_alloc_extend(refuse, ours, *host)
            assert mine.tolist() == extend(theirs, *there).tolist()
            for _ in range(3):
                starts = torch.cumsum(seq_lens - prefix_lens, 0) - 1
                last = mine[starts] if len(mine) == new else mine
                seq_lens = seq_lens + 1
                mine = paged_allocator._around_alloc_decode(refuse, ours, seq_lens, seq_lens, last)
                theirs_next = decode(theirs, seq_lens.to(device), seq_lens, last.to(device))
                assert mine.tolist() == theirs_next.tolist()
                new = -1
            assert ours.free_pages.tolist() == theirs.free_pages.tolist()

    def test_when_pages_run_out_neither_takes_any(self, device: str) -> None:
        ours, theirs = self.pair(device, 4, need_sort=False)
        ours.free_pages, theirs.free_pages = ours.free_pages[:2], theirs.free_pages[:2]
        lens = torch.tensor([0]), torch.tensor([12])
        host = (lens[0], lens[0], lens[1], lens[1], torch.tensor([-1]), 12)
        assert paged_allocator._around_alloc_extend(refuse, ours, *host) is None
        assert len(ours.free_pages) == 2
        if device == "cuda":  # the kernel reads past its free pages, which only the interpreter minds
            there = tuple(part.to(device) if isinstance(part, torch.Tensor) else part for part in host)
            assert PagedTokenToKVPoolAllocator.alloc_extend(theirs, *there) is None


def refuse(*args: Any) -> None:
    raise AssertionError("SGLang's Triton kernels were asked for on the CPU")


def test_the_names_that_are_set_by_hand_are_those_the_backends_have() -> None:
    """These tests build backends without their constructors, so a renamed attribute must not pass unseen."""
    source = triton_backend.__loader__.get_source(triton_backend.__name__)  # type: ignore[union-attr]
    reader = "kv_index_translator" if RELEASE is sglang_0_5_23 else "_translate_kv_loc"
    for name in ("req_to_token", "kv_indptr", "qo_indptr", "cuda_graph_kv_indices", reader):
        assert f"self.{name}" in source
    source = flashinfer_backend.__loader__.get_source(flashinfer_backend.__name__)  # type: ignore[union-attr]
    for name in ("prefill_wrappers_paged", "decode_cuda_graph_metadata", "use_paged", "kv_last_page_len"):
        assert f"self.{name}" in source
