"""Answers under decode-time budgets equal transformers over the survivors that the server names, on the real server."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from evicbench.correctness.reference import KV, Reference, make_peaky_model, press_scores
from evicbench.decode_budget.requests import shown_of as whole_of
from evicbench.stress import CHECKS
from evicbench.testbed.server import Server

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

SINKS, PAGE, WINDOW = 4, 16, 8
NESTED: Any = []
for _ in range(300):
    NESTED = [NESTED]
LOGPROB = 1e-4


@dataclass(frozen=True, slots=True)
class Request:
    """One request; ``budget`` 0 asks for none."""

    prompt: Sequence[int]
    num_new: int
    budget: int = 0
    method: str = "paged"
    score: str = "value_key_ratio"
    every: int = 128

    def scores(self, kv: KV, held: torch.Tensor, queries: torch.Tensor, end: int, num_cached: int) -> torch.Tensor:
        """Scores by the papers' formulas; ``queries`` [L, Hq, w, D] are those before ``end``, of
        which a server has only what it computed itself."""
        if self.score not in ("tova", "h2o"):
            scores = press_scores(self.score, kv, held, torch.empty(0), 0)
            assert scores is not None
            return scores
        size = 1 if self.score == "tova" else min(queries.shape[2], end - num_cached)
        last = queries[:, :, -size:].unflatten(1, (kv.keys.shape[1], -1))
        logits = last @ kv.keys[:, :, None].transpose(-1, -2) * kv.keys.shape[-1] ** -0.5
        is_later = held[:, :, None, None] > torch.arange(end - size, end)[:, None]
        scores = logits.masked_fill(is_later, -torch.inf).softmax(-1).mean(2).sum(2)
        return scores if self.score == "tova" else torch.where(held >= end - WINDOW, 1e6 + held, scores)

    def body(self, rid: str) -> dict[str, Any]:
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": self.num_new, "ignore_eos": True}
        if self.budget:
            sampling["custom_params"] = {
                "kv_decode_budget": self.budget,
                "kv_decode_method": self.method,
                "kv_decode_score": self.score,
                "kv_decode_interval": self.every,
                "kv_decode_trace": True,
            }
        fields = {"return_logprob": True, "logprob_start_len": -1}
        return {"input_ids": list(self.prompt), "sampling_params": sampling, "rid": rid, **fields}


def prompt(seed: int, num_tokens: int) -> list[int]:
    numbers = random.Random(seed)
    return [numbers.randrange(3, 320) for _ in range(num_tokens)]


def serve(model: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
    policy = ("--kv-policy", "lru", "--kv-disable-online-profiling", "--skip-tokenizer-init", "--page-size", str(PAGE))
    policy += ("--kv-decode-client-budgets", "trace", "--kv-decode-interval", "16")
    return Server(*policy, *flags, model=model, env={**CHECKS, **(env or {})})


def answers(server: Server, requests: Sequence[Request]) -> list[Any]:
    """All at once; the cache is checked meanwhile and after."""
    with ThreadPoolExecutor(len(requests)) as pool:
        jobs = [
            pool.submit(server.post, "/generate", request.body(f"r{index}")) for index, request in enumerate(requests)
        ]
        checks = []
        while not all(job.done() for job in jobs):
            checks.append(server.post("/evicpress/check"))
        given = [job.result() for job in jobs]
    checks.append(server.post("/evicpress/check"))
    assert [check["violations"] for check in checks if not check["ok"]] == []
    return given


def shown_of(server: Server, index: int) -> dict[str, Any]:
    """Description of the last request of that name."""
    shown = whole_of(server, f"r{index}")
    assert shown["state"] == "ended"
    return shown


class Generation:
    """A request computed by transformers, which drops what the server says that it dropped."""

    def __init__(self, reference: Reference, request: Request, num_cached: int = 0) -> None:
        self.reference, self.request, self.num_cached = reference, request, num_cached
        first = reference.prefill(request.prompt)
        self.kv, self.tokens = first.kv, list(request.prompt)
        self.positions, self.queries = first.kv.every_position(), first.queries[:, :, -WINDOW:]
        self.logprobs: list[float] = []
        self._append(first.logprobs[-1])

    def run(self, passes: Sequence[dict[str, Any]] = (), retracted_at: Sequence[int] = ()) -> list[int]:
        left, anew, num_prompt = list(passes), list(retracted_at), len(self.request.prompt)
        while len(self.tokens) < num_prompt + self.request.num_new:
            while left and left[0]["logical_tokens"] == len(self.tokens) - 1:
                self.drop(left.pop(0))
            if anew and anew[0] == len(self.tokens):
                self.restart(anew.pop(0), left)
                continue
            out = self.reference.extend(self.kv, len(self.tokens) - 1, [self.tokens[-1]])
            self.kv = self.kv.then(out.kv)
            self.queries = torch.cat([self.queries, out.queries], 2)[:, :, -WINDOW:]
            here = torch.full((*self.positions.shape[:2], 1), len(self.tokens) - 1)
            self.positions = torch.cat([self.positions, here], -1)
            self._append(out.logprobs[0])
        # With overlap a step is launched before it is known that the answer is complete.
        assert all(record["logical_tokens"] == len(self.tokens) - 1 for record in left), "a pass that met no step"
        return self.tokens[num_prompt:]

    def restart(self, num_tokens: int, left: list[dict[str, Any]]) -> None:
        """Prompt and answer so far at once, or in pieces where the server has dropped something in between."""
        ends, begin = [], 0
        while left and left[len(ends)]["logical_tokens"] < num_tokens:
            ends.append(left[len(ends)]["logical_tokens"])
            if len(ends) == len(left):
                break
        self.kv, self.positions = self.kv.first(0), self.positions[..., :0]
        for end in [*ends, num_tokens]:
            out = self.reference.extend(self.kv, begin, self.tokens[begin:end])
            self.kv = self.kv.then(out.kv)
            self.queries = torch.cat([self.queries, out.queries], 2)[:, :, -WINDOW:]
            here = torch.arange(begin, end).expand(*self.positions.shape[:2], -1)
            self.positions, begin = torch.cat([self.positions, here], -1), end
            if end < num_tokens:
                self.drop(left.pop(0))
        self._append(out.logprobs[-1])

    def _append(self, logprobs: torch.Tensor) -> None:
        self.tokens.append(int(logprobs.argmax()))
        self.logprobs.append(float(logprobs.max()))

    def drop(self, record: dict[str, Any]) -> None:
        held = self.positions
        stay = torch.tensor(record["positions"]).expand(*held.shape[:2], -1).sort(-1).values.contiguous()
        kept = torch.searchsorted(held.contiguous(), stay)
        assert torch.equal(held.gather(2, kept), stay), "positions that the request did not hold"
        scores = self.request.scores(self.kv, held, self.queries, record["logical_tokens"], self.num_cached)
        is_kept = torch.zeros_like(scores, dtype=torch.bool).scatter_(2, kept, True)
        if record["kind"] == "page":
            means = scores.mean((0, 1)).view(-1, PAGE).mean(1)
            (gone,) = (~is_kept[0, 0].view(-1, PAGE)).all(1).nonzero().flatten().tolist()
            assert 0 < gone < len(means) - 1, "a protected page was freed"
            lowest = means[1:-1].min()
            assert means[gone] <= lowest + 1e-5 * lowest.abs(), "another page had a lower score"
        else:
            scores = scores.masked_fill(held < SINKS, torch.inf)
            worst = scores.masked_fill(~is_kept, torch.inf).amin(-1)
            best = scores.masked_fill(is_kept, -torch.inf).amax(-1)
            assert bool((worst >= best - 1e-5 * best.abs() - 1e-6).all()), "a better token was dropped"
        self.kv, self.positions = self.kv.gather(kept), stay


def check_answer(
    server: Server, reference: Reference, index: int, request: Request, answer: Any
) -> list[dict[str, Any]]:
    """The passes of a request whose answer is that of the reference."""
    shown = shown_of(server, index) if request.budget else {"trace": [], "retracted_at": []}
    generation = Generation(reference, request, answer["meta_info"]["cached_tokens"])
    assert answer["output_ids"] == generation.run(shown["trace"], shown["retracted_at"]), f"r{index} {request}"
    given = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert max(abs(a - b) for a, b in zip(given, generation.logprobs, strict=True)) <= LOGPROB
    return shown["trace"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_peaky_model(tmp_path_factory.mktemp("peaky"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[Server]:
    with serve(model, "--max-total-tokens", "4096", "--chunked-prefill-size", "128") as running:
        yield running


def test_budgets_of_all_kinds_in_one_batch_equal_the_reference(server: Server, reference: Reference) -> None:
    shared = prompt(0, 200)
    requests = [
        Request(shared, 24),
        Request(prompt(1, 100), 160, 128),
        Request(prompt(2, 300), 120, 96, "paged", "knorm"),
        Request(prompt(3, 90), 120, 64, "repack", "keydiff", 24),
        Request(prompt(4, 40), 120, 64, "holefill", "keydiff", 24),
        Request(prompt(5, 150), 120, 72, "compact", "value_key_ratio", 16),
        Request(prompt(6, 70), 120, 64, "repack", "streaming", 32),
        Request([*shared, 7, 8], 100, 128),
        Request([*shared, 9], 60, 224, "holefill"),
    ]
    given = answers(server, requests[:1]) + [None] * (len(requests) - 1)
    check_answer(server, reference, 0, requests[0], given[0])
    kinds: set[str] = set()
    given = answers(server, requests)
    for index, request in enumerate(requests):
        passes = check_answer(server, reference, index, request, given[index])
        kinds |= {record["kind"] for record in passes}
        for record in passes:
            assert record["slots_after"] <= request.budget
            if record["kind"] != "copy_out":
                assert record["pages_freed"] * PAGE == record["slots_before"] - record["slots_after"]
    assert kinds == {"copy_out", "page", "repack", "holefill"}
    assert given[7]["meta_info"]["cached_tokens"] == given[8]["meta_info"]["cached_tokens"] == 192


def test_budgets_by_attention_equal_the_reference(model: Path, reference: Reference) -> None:
    shared = prompt(40, 100)
    requests = [
        Request(prompt(41, 100), 100, 64, "repack", "tova", 16),
        Request(prompt(42, 40), 100, 64, "holefill", "tova", 24),
        Request(prompt(43, 130), 100, 72, "compact", "h2o", 16),
        Request(prompt(44, 60), 100, 96, "paged", "h2o"),
        Request([*shared, 5, 6], 80, 64, "repack", "h2o", 16),
        Request(prompt(45, 100), 60),
    ]
    limits = ("--max-total-tokens", "16384", "--max-running-requests", "8", "--chunked-prefill-size", "64")
    with serve(model, *limits, "--kv-decode-score", "tova", "--enable-mixed-chunk") as server:
        answers(server, [Request(shared, 2)])
        given = answers(server, requests)
        for index, request in enumerate(requests):
            check_answer(server, reference, index, request, given[index])


def test_a_full_cache_would_answer_otherwise(server: Server, reference: Reference) -> None:
    request = Request(prompt(11, 100), 120, 96)
    (given,) = answers(server, [request])
    full = Generation(reference, Request(request.prompt, request.num_new)).run()
    assert sum(a == b for a, b in zip(given["output_ids"], full, strict=True)) < 100


def test_nobody_else_is_given_what_was_computed_on_survivors(server: Server, reference: Reference) -> None:
    request = Request(prompt(12, 100), 100, 64)
    (given,) = answers(server, [request])
    after = Request([*request.prompt, *given["output_ids"], 5], 16)
    (fresh,) = answers(server, [after])
    assert fresh["meta_info"]["cached_tokens"] == 96, "the prompt, exact, and nothing of the answer"
    check_answer(server, reference, 0, after, fresh)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"kv_decode_budget": -1}, "kv_decode_budget is -1"),
        ({"kv_decode_budget": 20}, "at least 48"),
        ({"kv_decode_budget": 64, "kv_decode_method": "quest"}, "frees no memory"),
        ({"kv_decode_budget": 64, "kv_decode_score": "tova"}, "start it with --kv-decode-score tova"),
        ({"kv_decode_budget": 64, "kv_decode_score": "geometry"}, "start it with --kv-geometry FILE"),
        ({"kv_decode_size": 64}, "kv_decode_size is not known"),
        ({"kv_decode_method": "repack"}, "without kv_decode_budget"),
        ({"kv_decode_budget": 64, "kv_decode_trace": 1}, "kv_decode_trace is 1"),
        (
            {"kv_decode_budget": 64, "kv_decode_interval": 1},
            "kv_decode_interval is 1: expected at least 16 on this server",
        ),
        ({"kv_decode_budget": NESTED}, "kv_decode_budget is [["),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(server: Server, params: dict[str, Any], words: str) -> None:
    sampling = {"temperature": 0, "max_new_tokens": 8, "custom_params": params}
    asked = {"input_ids": prompt(13, 20), "sampling_params": sampling}
    for fields in ({}, {"return_logprob": True, "logprob_start_len": 5}):
        status, body = server.request("POST", "/generate", {**asked, **fields})
        assert status == 400
        assert words in str(body)


def test_many_long_answers_run_at_once_in_little_room(model: Path) -> None:
    """Room for two at full length: eight run together, and none is retracted."""
    flags = ("--max-total-tokens", "1024", "--kv-decode-budget", "96", "--max-running-requests", "8")
    with serve(model, *flags) as server, ThreadPoolExecutor(8) as pool:
        bodies = [{**Request(prompt(20 + index, 60), 300).body(f"r{index}")} for index in range(8)]
        given = list(pool.map(lambda body: server.post("/generate", body), bodies))
        assert [len(answer["output_ids"]) for answer in given] == [300] * 8
        log = server.log.read_text(errors="replace")
        assert max(map(int, re.findall(r"Decode batch.*#running-req: (\d+)", log))) == 8
        assert "#retracted_reqs" not in log
        shown = server.get("/evicpress/requests")
        assert all(each["peak_slots"] <= 96 for each in shown["requests"])
        assert shown["totals"]["requests"] == 8 and shown["totals"]["pages_freed"] > 8 * 12
        stats = server.get("/evicpress/stats")
        assert stats["free_slots"] + stats["evictable_slots"] == stats["total_slots"]
        # A budget beyond the pool: the answer is cut as one without a budget, and nobody waits for ever.
        (cut,) = answers(server, [Request(prompt(29, 800), 5000, 900, "repack")])
        assert len(cut["output_ids"]) == 1024 - 800 - PAGE - 1
        assert cut["meta_info"]["finish_reason"]["type"] == "length"


def test_requests_that_are_sent_back_go_on_with_their_budget(model: Path, reference: Reference) -> None:
    """SGLang's test hook sends one back every so many steps. It does not fit in the pool as a whole any more and is
    computed anew in pieces; what fits is, at once, in ``make show-decode``."""
    pool = 400
    env = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "400"}
    requests = [Request(prompt(30, 60), 520, 96), Request(prompt(31, 50), 440, 96)]
    with serve(model, "--max-total-tokens", str(pool), "--chunked-prefill-size", "64", env=env) as server:
        given = answers(server, requests)
        for index, request in enumerate(requests):
            check_answer(server, reference, index, request, given[index])
        lengths = [length for index in range(2) for length in shown_of(server, index)["retracted_at"]]
        assert lengths and max(lengths) > pool - 2 * PAGE
        stats = server.get("/evicpress/stats")
        assert stats["free_slots"] + stats["evictable_slots"] == stats["total_slots"]
