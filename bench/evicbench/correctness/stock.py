"""Off is stock, and exact is stock: the same requests to two servers, and what differs in the answers."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import httpx

from evicbench.report import Line
from evicbench.testbed.server import Server
from evicbench.testbed.tasks import Context, make_context
from evicbench.testbed.vocabulary import load_vocabulary

OTHER_PLUGINS = [point.name for point in entry_points(group="sglang.srt.plugins") if point.name != "evicpress"]
WITHOUT_PLUGIN = {"SGLANG_PLUGINS": ",".join(OTHER_PLUGINS) or "none"}  # ours is then never imported
POOL = (
    *("--random-seed", "7", "--max-total-tokens", "3000", "--max-running-requests", "6"),
    *("--chunked-prefill-size", "256"),
)
EXACT = ("--kv-policy", "evicpress", "--kv-forms", "exact")
NUM_CONCURRENT = 4
TIE = 1e-4  # two tokens this close in log probability may swap places by rounding

_VOLATILE = re.compile(
    rb'"(id|created|e2e_latency|request_received_ts|response_sent_to_client_ts|queue_time)":("[^"]*"|[-0-9.e]+)'
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request; ``raw`` goes out as it is, in place of a JSON body."""

    path: str
    body: dict[str, Any] | None = None
    raw: bytes | None = None
    method: str = "POST"


Answered = list[tuple[int, bytes]]


def mixed_requests(count: int, seed: int) -> list[Ask]:
    """Completions, chat, /generate, streams, log probabilities, stop strings, n = 2 and things that must be refused."""
    rng = random.Random(f"stock-{seed}")
    contexts = [make_context(family, rng.randint(80, 700), rng) for family in ("needle", "mixed", "hop", "mapping")]
    makers = (_completion, _completion, _chat, _chat, _generate, _generate, _sampled, _refused)
    return [rng.choice(makers)(rng, rng.choice(contexts)) for _ in range(count)]


def _options(rng: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": rng.randint(1, 24)}
    options |= rng.choice(({}, {}, {"stop": rng.choice((".", ["the", "code"], [";"]))}, {"n": 2}))
    if rng.random() < 0.3:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    return options


def _completion(rng: random.Random, context: Context) -> Ask:
    question = rng.choice(context.questions).text
    body = {**_options(rng), "prompt": context.prompt(question), "echo": rng.random() < 0.2}
    if rng.random() < 0.3 and "n" not in body:
        body["logprobs"] = rng.randint(1, 5)
    return Ask("/v1/completions", body)


def _chat(rng: random.Random, context: Context) -> Ask:
    content = f"{context.text} <q> {rng.choice(context.questions).text}"
    body = {**_options(rng), "messages": [{"role": "user", "content": content}]}
    if rng.random() < 0.3 and "n" not in body:
        body |= {"logprobs": True, "top_logprobs": rng.randint(1, 5)}
    return Ask("/v1/chat/completions", body)


def _generate(rng: random.Random, context: Context) -> Ask:
    ids = load_vocabulary().encode(context.prompt(rng.choice(context.questions).text))
    sampling = {"temperature": 0, "max_new_tokens": rng.randint(1, 24), "ignore_eos": rng.random() < 0.5}
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "stream": rng.random() < 0.3}
    if rng.random() < 0.4:
        body |= {"return_logprob": True, "logprob_start_len": rng.choice((-1, 0, len(ids) // 2)), "top_logprobs_num": 2}
    return Ask("/generate", body)


def _sampled(rng: random.Random, context: Context) -> Ask:
    """The servers start with one seed and get the requests in one order: sampling must agree too."""
    body = {"model": "default", "prompt": context.prompt(context.questions[0].text), "max_tokens": rng.randint(1, 16)}
    sampling = {"temperature": 0.9, "top_p": rng.choice((1.0, 0.8)), "seed": rng.randint(0, 9)}
    return Ask("/v1/completions", body | sampling)


def _refused(rng: random.Random, context: Context) -> Ask:
    prompt = context.prompt(context.questions[0].text)
    chat = {"model": "default", "messages": [{"role": "user", "content": "code"}], "max_tokens": 2}
    choices = (
        Ask("/v1/completions", {"model": "default", "prompt": " ".join(["the"] * 5000), "max_tokens": 4}),
        Ask("/v1/completions", {"model": "default", "prompt": prompt, "max_tokens": -3}),
        Ask("/v1/completions", {"model": "default", "max_tokens": 3}),
        Ask("/v1/chat/completions", {**chat, "messages": []}),
        Ask("/v1/chat/completions", {**chat, "temperature": "warm"}),
        Ask("/v1/chat/completions", {**chat, "top_p": 2.0}),
        Ask("/generate", {"sampling_params": {"max_new_tokens": 2}}),
        Ask("/generate", {"text": prompt, "sampling_params": {"temperature": -1.0}}),
        Ask("/v1/completions", raw=b'{"model": "default", "prompt": '),
        Ask("/evicpress/tree", method="GET"),
        Ask("/v1/no_such_path", {}),
    )
    return rng.choice(choices)


def fetch(server: Server, ask: Ask) -> tuple[int, bytes]:
    """Status and body, the body without ids and times; a stream as what its events add up to."""
    data = ask.raw if ask.raw is not None or ask.body is None else json.dumps(ask.body).encode()
    given: dict[str, Any] = {"headers": {"Content-Type": "application/json"}, "timeout": 120.0, "trust_env": False}
    response = httpx.request(ask.method, server.url + ask.path, content=data, **given)
    is_stream = bool(ask.body and ask.body.get("stream") is True) and response.status_code == 200
    body = _joined(response.content.splitlines()) if is_stream else response.content
    return response.status_code, _VOLATILE.sub(rb'"\1":"-"', body)


def _joined(lines: Sequence[bytes]) -> bytes:
    """Join the events of a stream, whose cuts depend on timing: texts are joined, of all else the last one counts."""
    last: dict[str, Any] = {}
    texts: dict[int, str] = defaultdict(str)
    others: dict[int, list[Any]] = defaultdict(list)
    for line in lines:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        for choice in event.pop("choices", None) or ():
            index, delta, logprobs = choice["index"], choice.pop("delta", {}), choice.pop("logprobs", None) or {}
            texts[index] += choice.pop("text", None) or delta.get("content") or ""
            others[index] += logprobs.get("content") or ()  # of a chat
            if "tokens" in logprobs:
                given = logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"] or ()
                others[index] += zip(*given, strict=False)
            if choice.get("finish_reason"):
                others[index].append(choice)
        last |= event
    return json.dumps([last, sorted(texts.items()), sorted(others.items())]).replace(": ", ":").encode()


_IMPORTS = """
import sys
import sglang_evicpress, sglang_evicpress.plugin
loaded = [name for name in sys.modules if name.split(".")[0] in ("sglang", "torch")]
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.mem_cache.registry import get_radix_cache_factory
load_plugins()
hooks = [hook for hooks in HookRegistry._hooks.values() for _, hook, _ in hooks]
ours = [hook for hook in hooks if hook.__module__.startswith("sglang_evicpress")]
print(len(loaded), len(ours), int(get_radix_cache_factory("evicpress") is not None))
"""


def compare_import() -> Line:
    """Importing, and loading without the flag, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=False)
    counts = (done.stdout.split() or ["none"])[-3:]
    return Line(
        "Importing hooks nothing",
        "modules of SGLang or torch imported / hooks / cache backends of ours: 0 / 0 / 0",
        " / ".join(counts) if done.returncode == 0 else done.stderr[-300:],
        counts == ["0", "0", "0"],
    )


Generated = list[tuple[int, float]]
"""Greedy token ids, and by how much each token's log probability led the second's."""


def shared_prompts(count: int, seed: int) -> list[tuple[list[int], int]]:
    """Prompts over shared contexts that together need several times the pool, with how many tokens to generate."""
    rng = random.Random(f"exact-{seed}")
    families = ("needle", "multikv", "mapping", "hop", "record", "mixed")
    contexts = [make_context(families[i % 6], rng.randint(200, 900), rng) for i in range(14)]
    prompts = []
    for _ in range(count):
        context = rng.choice(contexts)
        words = context.prompt(rng.choice(context.questions).text).split()
        if rng.random() < 0.3:  # a turn that leaves the context in the middle
            words = words[: rng.randint(20, len(words))]
        prompts.append((load_vocabulary().encode(" ".join(words)), rng.choice((4, 8, 16, 60))))
    return prompts


def generate_all(server: Server, prompts: Sequence[tuple[list[int], int]]) -> list[Generated]:
    def generate(prompt: tuple[list[int], int]) -> Generated:
        answer = server.generate(*prompt, return_logprob=True, top_logprobs_num=2)
        leads = (best[0] - second[0] for best, second in answer["meta_info"]["output_top_logprobs"])
        return list(zip(answer["output_ids"], leads, strict=True))

    with ThreadPoolExecutor(NUM_CONCURRENT) as pool:
        return list(pool.map(generate, prompts))


def compare(num_asks: int = 200, num_prompts: int = 160, seed: int = 0) -> tuple[list[Line], list[str]]:
    """Three servers on the same small pool: stock, ours without the flag, ours with exact forms only.

    Returns the two lines and every difference in words.
    """
    asks, prompts = mixed_requests(num_asks, seed), shared_prompts(num_prompts, seed)
    with Server(*POOL, env=WITHOUT_PLUGIN) as server:
        stock = [fetch(server, ask) for ask in asks]
        stock_generated = generate_all(server, prompts)
    off = _answers(asks)
    with Server(*POOL, *EXACT) as server:
        generated = generate_all(server, prompts)
        num_dropped = server.get("/evicpress/stats")["decisions"]["dropped"]
        is_whole = bool(server.post("/evicpress/check")["ok"])
    differing = [index for index in range(num_asks) if off[index] != stock[index]]
    unsettled = differing and _never_alike(asks, differing, off, stock)
    unlike = [
        f"{asks[index].path} {str(asks[index].body)[:200]}\n"
        f"  ours:  {off[index][0]} {off[index][1][:1500]!r}\n  stock: {stock[index][0]} {stock[index][1][:1500]!r}"
        for index in unsettled
    ]
    num_answered = sum(status == 200 for status, _ in stock)
    num_ties, wrong = _differences(generated, stock_generated)
    lines = [
        Line(
            "Off is stock: plugin installed, no flag",
            f"{num_asks} of {num_asks} responses byte-identical but for ids and times",
            f"{num_asks - len(unlike)} identical ({num_answered} answered, {num_asks - num_answered} refused), "
            f"{len(differing) - len(unlike)} of them in a second run of both",
            not unlike and 0 < num_answered < num_asks,
        ),
        Line(
            "evicpress with --kv-forms exact equals stock under the same pressure",
            f"{num_prompts} of {num_prompts} greedy outputs equal, but for ties below {TIE:g}",
            f"{num_prompts - len(wrong)} equal, {num_ties} of them up to a tie; {num_dropped} nodes dropped meanwhile",
            not wrong and num_dropped > 0 and is_whole,
        ),
    ]
    return lines, unlike + wrong


def _answers(asks: Sequence[Ask], env: dict[str, str] | None = None) -> Answered:
    with Server(*POOL, env=env) as server:
        return [fetch(server, ask) for ask in asks]


def _never_alike(asks: Sequence[Ask], differing: Sequence[int], ours: Answered, stock: Answered) -> list[int]:
    """Differing answers that differ in a second run of both servers too.

    SGLang's streamed log probabilities race with themselves: stock now and then gives a token the top_logprobs of the
    one before. The whole sequence is asked again, so that every request meets the same cache.
    """
    stock_again, ours_again = _answers(asks, WITHOUT_PLUGIN), _answers(asks)
    return [index for index in differing if not {stock[index], stock_again[index]} & {ours[index], ours_again[index]}]


def _differences(ours: Sequence[Generated], stock: Sequence[Generated]) -> tuple[int, list[str]]:
    """Number of outputs that part at a tie, and in words those that part where one token clearly led."""
    num_ties, wrong = 0, []
    for i, pairs in enumerate(zip(ours, stock, strict=True)):
        for at, (mine, theirs) in enumerate(zip(*pairs, strict=True)):
            if mine[0] != theirs[0]:
                lead = min(mine[1], theirs[1])
                num_ties += lead < TIE
                if lead >= TIE:
                    wrong.append(f"prompt {i}: token {at} is {mine[0]}, stock {theirs[0]}, which led by {lead:.2e}")
                break
    return num_ties, wrong
