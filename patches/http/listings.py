"""Long answers, read page by page: the scheduler describes a bounded number of things per call."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sglang_evicpress.introspect.arguments import FIRST_ITEMS, MOST_ITEMS, Json, flag
from sglang_evicpress.introspect.operations import encode, read_object
from sglang_evicpress.patches.scheduler.messages import EvicPressReqOutput

Call = Callable[[str, Json], Awaitable[EvicPressReqOutput]]


@dataclass(frozen=True, slots=True)
class Listing:
    """``items``: the list in the answer. ``cursor``: the argument that continues behind ``next`` of the page before.
    ``is_shared``: callers at about the same time get the same answer."""

    items: str
    cursor: str
    is_shared: bool = False


LISTINGS = {
    "tree": Listing("nodes", "after"),
    "outline": Listing("nodes", "after", is_shared=True),
    "journal": Listing("entries", "since"),
    "profiles": Listing("profiles", "after"),
}


MAX_POSITIONS = 1_000_000  # that one answer over HTTP puts together; the scheduler gives them in pages


def wants_positions(op: str, arguments: Json) -> bool:
    """True if all positions of one request are asked for, rather than a page of them."""
    return op == "requests" and flag(arguments, "positions") and "offset" not in arguments


async def read_positions(call: Call, arguments: Json) -> tuple[int, bytes]:
    """Status and JSON of a request with the ``positions`` that its slots hold, and those that each traced pass left, as
    nested lists [n] or [layers][heads][n]. The first page as it is where there are more than MAX_POSITIONS."""
    response = await call("requests", arguments)
    answer = read_object(response.payload)
    requests = answer.get("requests")
    if (
        response.status != 200
        or not isinstance(requests, list)
        or not requests
        or requests[0]["num_values"] > MAX_POSITIONS
    ):
        return response.status, response.payload
    described = requests[0]
    pages = [np.array(described.pop("values"), dtype=np.int32)]
    following = described.pop("next_offset")
    while following is not None:
        response = await call("requests", {**arguments, "offset": following})
        if response.status != 200:
            return response.status, response.payload
        page = read_object(response.payload)["requests"]
        if not isinstance(page, list) or page[0]["num_values"] != described["num_values"]:
            return 409, encode({"error": {"reason": "the request went on while it was read: ask again"}})
        pages.append(np.array(page[0]["values"], dtype=np.int32))
        following = page[0]["next_offset"]
    values, begin = np.concatenate(pages), 0
    for each in (described, *(described["trace"] or ())):
        shape = each.pop("positions_shape")
        end = begin + (0 if shape is None else math.prod(shape))
        each["positions"] = None if shape is None else values[begin:end].reshape(shape)
        begin = end
    return 200, encode(answer)


class SharedAnswers:
    """Answers that several callers get, each as long as it has cost little: ``SHARE`` of the time at most is spent on
    one that is asked for all the time. The last ``MOST`` are kept; one is made at a time."""

    LEAST_S = 5.0
    SHARE = 1 / 20
    MOST = 32

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._turn = asyncio.Lock()
        self._answers: dict[str, tuple[float, tuple[int, bytes]]] = {}

    async def get(self, key: str, make: Callable[[], Awaitable[tuple[int, bytes]]]) -> tuple[int, bytes]:
        """The answer by its key, made anew where it is old or was an error."""
        async with self._turn:
            begin_s = self._clock()
            until_s, answer = self._answers.pop(key, (begin_s, (0, b"")))
            if begin_s >= until_s:
                answer = await make()
                now_s = self._clock()
                until_s = now_s + max(self.LEAST_S, (now_s - begin_s) / self.SHARE)
            if answer[0] == 200:
                self._answers[key] = until_s, answer
                while len(self._answers) > self.MOST:
                    del self._answers[next(iter(self._answers))]
            return answer


def _start_of(node: Mapping[str, int]) -> int:
    return node["start"]


async def read_listing(call: Call, op: str, arguments: Json) -> tuple[int, bytes]:
    """Status and JSON of the first page, with the items of those that follow up to the limit.

    Later pages are of a later moment: while requests run, a node may be missing or be there twice in part. ``next`` is
    where to go on, None at the end.
    """
    listing = LISTINGS[op]
    wanted = min(int(str(arguments.get("limit", FIRST_ITEMS[op]))), MOST_ITEMS)
    response = await call(op, arguments)
    if response.status != 200:
        return response.status, response.payload
    page = read_object(response.payload)
    first, items = page, page.get(listing.items)
    if not isinstance(items, list):
        return response.status, response.payload
    following = page.get("next")
    while following is not None and len(items) < wanted:
        response = await call(op, {listing.cursor: following, "limit": wanted - len(items)})
        if response.status != 200:
            return response.status, response.payload
        more = read_object(response.payload)
        page_items = more[listing.items]
        if not isinstance(page_items, list):
            raise TypeError(f"{listing.items} of {op} is a {type(page_items).__name__}: expected a list")
        items += page_items
        page = {**page, **{name: more[name] for name in ("next", "last") if name in more}}
        if "num_lost" in more:
            page["num_lost"] = int(str(page["num_lost"])) + int(str(more["num_lost"]))
        following = more.get("next")
    if op == "tree" and page is not first:
        items.sort(key=_start_of)  # parents first, as on every page
    return response.status, encode(page)
