"""A refusal by a scheduler process: a UnsupportedError in the main process, the last line of the command."""

from __future__ import annotations

import logging
import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.contract.releases import only_rank

from sglang_evicpress import spawn
from sglang_evicpress.config import EvicPressConfig
from sglang_evicpress.flag_groups import DecodeFlags
from sglang_evicpress.patches import last_word
from sglang_evicpress.patches.attention import query_ring
from sglang_evicpress.patches.cache import factory
from sglang_evicpress.patches.unsupported import UnsupportedError

pytestmark = pytest.mark.sglang

SENTENCE = "this model cannot be served: serve another"


@pytest.fixture(autouse=True)
def no_mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process was handed nothing, and is as before at the end."""
    logger = logging.getLogger("sglang.srt.utils.common")
    level = logger.level
    monkeypatch.setattr(spawn, "requested", False)
    monkeypatch.setattr(spawn, "refusal_file", None)
    yield
    logger.setLevel(level)


def launched(*refusals: str, policy: str | None = "lru", children: tuple[Any, ...] = ()) -> Any:
    """``Engine._launch_subprocesses`` with schedulers that end over ``refusals``, or die of something else."""

    def launch(cls: type, server_args: Any, *, port_args: None = None) -> None:
        spawn.restore(SimpleNamespace, (), vars(server_args).get("kv_refusal_file"))
        for child in children:
            child.start()
        for sentence in refusals:
            ended = spawn.refusal(sentence)
            assert ended.code == 2
        raise RuntimeError("Rank 0 scheduler died during initialization")

    return last_word.around_launch_subprocesses(
        launch, object, server_args=SimpleNamespace(kv_policy=policy), port_args=None
    )


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_a_scheduler_refuses_is_raised_where_it_was_started(num_ranks: int) -> None:
    with pytest.raises(UnsupportedError) as refused:
        launched(*[SENTENCE] * num_ranks)
    assert str(refused.value) == SENTENCE
    assert refused.value.__suppress_context__


@pytest.mark.parametrize("policy", ["lru", None])
def test_what_kills_a_scheduler_otherwise_is_left_as_it_is(policy: str | None) -> None:
    with pytest.raises(RuntimeError, match="Rank 0 scheduler died"):
        launched(policy=policy)


def test_the_other_processes_have_ended_before_anything_is_said() -> None:
    child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    with pytest.raises(UnsupportedError):
        launched(SENTENCE, children=(child,))
    assert child.exitcode == -9


def test_a_launch_leaves_nothing_behind(tmp_path: Path) -> None:
    given = SimpleNamespace(kv_policy="lru")
    seen: list[Path] = []

    def launch(cls: type, server_args: Any) -> str:
        seen.append(Path(server_args.kv_refusal_file))
        assert seen[0].parent.is_dir()
        return "ready"

    assert last_word.around_launch_subprocesses(launch, object, given) == "ready"
    assert vars(given) == {"kv_policy": "lru"} and not seen[0].parent.exists()


def test_on_the_command_line_it_is_the_last_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    def serve(given: str) -> None:
        raise UnsupportedError(f"{given} {SENTENCE}")

    with pytest.raises(SystemExit) as ended:
        last_word.around_launch_server(serve, "no:")
    assert ended.value.code == 2
    logging.getLogger("sglang.srt.utils.common").info("kill_process_tree called")
    assert capsys.readouterr().err == f"sglang: error: no: {SENTENCE}\n"
    assert last_word.around_launch_server(lambda: 3) == 3


def test_a_process_whose_refusal_nobody_reads_says_it_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert spawn.refusal(SENTENCE).code == SENTENCE
    monkeypatch.setattr(spawn, "refusal_file", str(tmp_path / "gone" / "refusal"))
    assert spawn.refusal(SENTENCE).code == SENTENCE


def test_a_model_that_the_scheduler_refuses_ends_it_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang logs what an Exception says with its traceback, and kills the main process."""

    def refuse(*_: object) -> None:
        raise UnsupportedError(SENTENCE)

    monkeypatch.setattr(factory, "check_applied", lambda _: None)
    monkeypatch.setattr(factory, "check_model", refuse)
    allocator = SimpleNamespace(get_kvcache=lambda: None)
    context = SimpleNamespace(
        params=SimpleNamespace(token_to_kv_pool_allocator=allocator),
        model_config=None,
        is_hybrid_swa=False,
        is_hybrid_ssm=False,
    )
    with pytest.raises(SystemExit, match=SENTENCE):
        factory.build(context)


def test_queries_that_take_too_much_memory_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    config = EvicPressConfig("lru", decode=DecodeFlags(64, score="h2o"))
    monkeypatch.setattr(query_ring, "config_of", lambda _: config)
    pool = SimpleNamespace(layer_num=2, size=1024, head_num=2, head_dim=8, store_dtype=torch.float32)
    runner = SimpleNamespace(
        server_args=None,
        token_to_kv_pool=pool,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(513, 8)),
        model_config=SimpleNamespace(num_attention_heads=4),
        tp_rank=0,
        tp_size=1,
        ps=SimpleNamespace(tp_rank=0, tp_size=1),  # SGLang 0.5.17 has them here
        dtype=torch.float32,
    )
    refusal = "would keep .* MB of queries for 513 requests.*: lower --max-running-requests"
    with only_rank(), pytest.raises(SystemExit, match=refusal):
        query_ring.QueryRing.install_on(runner)
