"""The reference follows the passes it is told of, and refuses those that no budget may make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from evicbench.correctness.reference import KV, Reference, make_peaky_model, press_scores
from evicbench.decode_budget.generation import check_answer, expected_scores
from evicbench.decode_budget.requests import Request

PAGE, PROMPT, NUM_NEW = 4, 24, 12


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(make_peaky_model(tmp_path_factory.mktemp("peaky")))


class Server:
    """Greedy answers, one token at a time; ``drop`` says at which lengths which positions stay."""

    def __init__(
        self, reference: Reference, request: Request, drop: dict[int, Any], retracted_at: tuple[int, ...] = ()
    ) -> None:
        first = reference.prefill(request.prompt)
        kv, positions = first.kv, first.kv.every_position()
        tokens, logprobs, self.trace = [*request.prompt], [], []
        row = first.logprobs[-1]
        while True:
            tokens.append(int(row.argmax()))
            logprobs.append([float(row.max()), tokens[-1], None])
            if len(logprobs) == request.num_new:
                break
            at = len(tokens) - 1
            if len(tokens) in retracted_at:
                first = reference.prefill(tokens)
                kv, positions, row = first.kv, first.kv.every_position(), first.logprobs[-1]
                continue
            if at in drop:
                kept = drop[at](kv, positions)
                kv, positions = kv.gather(kept), positions.gather(2, kept)
                self.trace.append({"logical_tokens": at, "kind": "repack", "positions": positions.tolist()})
            out = reference.extend(kv, at, [tokens[-1]])
            kv, row = kv.then(out.kv), out.logprobs[0]
            positions = torch.cat([positions, torch.full((*positions.shape[:2], 1), at)], -1)
        meta = {"cached_tokens": 0, "num_retractions": len(retracted_at), "output_token_logprobs": logprobs}
        self.answer = {"output_ids": tokens[len(request.prompt) :], "meta_info": meta}
        self.shown = {"trace": self.trace, "retracted_at": list(retracted_at)}


def best(num_kept: int) -> Any:
    def choose(kv: KV, positions: torch.Tensor) -> torch.Tensor:
        scores = press_scores("knorm", kv, positions, torch.empty(0), 0)
        return scores.masked_fill(positions < 4, torch.inf).topk(num_kept, -1).indices.sort(-1).values

    return choose


ASK = Request(tuple(range(10, 10 + PROMPT)), NUM_NEW, 16, "repack", "knorm", 4)


def test_an_answer_over_the_survivors_passes_and_others_do_not(reference: Reference) -> None:
    server = Server(reference, ASK, {24: best(16), 30: best(14)})
    given = (reference, ASK, server.answer, server.shown, PAGE)
    finding = check_answer(*given)
    assert finding.ok and finding.num_tokens == NUM_NEW
    assert not check_answer(*given, is_full=True).ok
    assert not check_answer(*given, spoil=True).ok


def test_what_was_computed_anew_is_exact_again(reference: Reference) -> None:
    server = Server(reference, ASK, {24: best(16), 32: best(16)}, retracted_at=(29,))
    assert check_answer(reference, ASK, server.answer, server.shown, PAGE).ok
    without = {**server.shown, "retracted_at": []}
    assert not check_answer(reference, ASK, server.answer, without, PAGE).ok


def test_a_pass_that_keeps_worse_tokens_is_refused(reference: Reference) -> None:
    def worst(kv: KV, positions: torch.Tensor) -> torch.Tensor:
        return torch.arange(16).expand(*positions.shape[:2], -1)

    server = Server(reference, ASK, {24: worst})
    finding = check_answer(reference, ASK, server.answer, server.shown, PAGE)
    assert finding.problems == ("at 24 tokens: a better token was dropped",)


def test_positions_that_were_dropped_before_do_not_come_back(reference: Reference) -> None:
    server = Server(reference, ASK, {24: best(16), 30: best(14)})
    held = server.trace[0]["positions"][0][0]
    back = torch.tensor(server.trace[1]["positions"])
    back[0, 0, -3] = next(position for position in range(PROMPT) if position not in held)
    server.trace[1]["positions"] = back.sort(-1).values.tolist()
    (problem,) = check_answer(reference, ASK, server.answer, server.shown, PAGE).problems
    assert problem == "at 30 tokens: positions that the request did not hold"


def test_a_pass_that_met_no_step_is_refused(reference: Reference) -> None:
    server = Server(reference, ASK, {24: best(16)})
    server.trace.append({**server.trace[0], "logical_tokens": 99})
    assert "met no step" in check_answer(reference, ASK, server.answer, server.shown, PAGE).problems[0]


def test_a_short_answer_is_no_answer(reference: Reference) -> None:
    server = Server(reference, ASK, {})
    server.answer["output_ids"].pop()
    assert "11 tokens came back" in check_answer(reference, ASK, server.answer, server.shown, PAGE).problems[0]


def test_attention_is_that_of_the_last_queries_that_the_server_computed() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, 1, 6, 8, generator=generator)
    queries = torch.randn(1, 2, 3, 8, generator=generator)
    held = torch.arange(6).view(1, 1, -1)
    tova = expected_scores(Request((), 1, score="tova"), KV(keys, keys), held, queries, 6, 0)
    by_hand = torch.stack([(keys[0, 0] @ queries[0, head, -1] * 8**-0.5).softmax(0) for head in (0, 1)]).mean(0)
    assert tova is not None and torch.allclose(tova[0, 0], by_hand, atol=1e-6)
    one = expected_scores(Request((), 1, score="h2o"), KV(keys, keys), held, queries, 6, 5)
    assert one is not None and bool((one.diff() > 0).all()), "all of six are among the newest eight"
    assert expected_scores(Request((), 1, score="r_kv"), KV(keys, keys), held, queries, 6, 0) is None
