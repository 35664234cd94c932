"""Compression really frees: what the pool's free count does when a 2,048-token node is brought to a quarter."""

from __future__ import annotations

import random

from evicbench.report import Line
from evicbench.testbed.server import GUESSED, Server
from evicbench.testbed.tasks import make_context
from evicbench.testbed.vocabulary import load_vocabulary

NUM_TOKENS = 2048
KEPT_FRACTION = 0.25
FORM = f"keydiff@{KEPT_FRACTION}"
PAGE_SIZES = (1, 16)


def expected_slots(num_tokens: int, kept_fraction: float, page_size: int) -> int:
    """Slots a compressed node may still hold: its survivors, in whole pages."""
    kept = -(-round(num_tokens * kept_fraction * 1000) // 1000)
    return -(-kept // page_size) * page_size


def arguments(page_size: int) -> list[str]:
    """Room for the node; no chunks, which would each become a node."""
    pool = ["--max-total-tokens", "4096", "--chunked-prefill-size", "-1"]
    return ["--kv-policy", "evicpress", *GUESSED, "--page-size", str(page_size), *pool]


def measure(server: Server, page_size: int, num_tokens: int = NUM_TOKENS) -> Line:
    """Cache one context, compress its node, compare the rise of the free slots with the survivors' pages."""
    server.flush()
    context = make_context("mixed", num_tokens, random.Random("frees"))
    prompt = load_vocabulary().encode(" ".join(context.tokens))
    (generated,) = server.generate(prompt, 1)["output_ids"]
    server.generate([*prompt, generated ^ 1], 1)  # a turn that leaves here, so that the node ends with the context
    node = next(each for each in server.get("/evicpress/tree")["nodes"] if each["start"] == 0)
    before = server.get("/evicpress/stats")["free_slots"]
    answer = server.post(f"/evicpress/nodes/{node['id']}/compress", {"form": FORM})
    rise = server.get("/evicpress/stats")["free_slots"] - before
    check = server.post("/evicpress/check")
    expected = num_tokens - expected_slots(num_tokens, KEPT_FRACTION, page_size)
    return Line(
        f"Compression really frees, page size {page_size}: {num_tokens} tokens to {FORM}",
        f"{expected} more slots free ({expected // page_size} pages)",
        f"{rise} more, {answer['freed_slots']} reported of a node of {node['num_tokens']} tokens, "
        f"{len(check['violations'])} violations",
        node["num_tokens"] == num_tokens and rise == answer["freed_slots"] == expected and bool(check["ok"]),
    )
