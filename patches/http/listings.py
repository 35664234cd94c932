"""Long answers, read page by page: the scheduler describes a bounded number of things per call."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import numpy as np

from sglang_evicpress.introspect.arguments import Json, flag
from sglang_evicpress.introspect.operations import encode, read_object
from sglang_evicpress.patches.scheduler.messages import EvicPressReqOutput

Call = Callable[[str, Json], Awaitable[EvicPressReqOutput]]


@dataclass(frozen=True, slots=True)
class Listing:
    """``items``: the list in the answer. ``cursor``: the argument that continues behind ``next`` of the page before.
    ``limit``: how many items a caller gets who does not say."""

    items: str
    cursor: str
    limit: int


MAX_ITEMS = 20_000  # in one answer over HTTP, whatever limit it is asked with; ``next`` leads to the others

LISTINGS = {
    "tree": Listing("nodes", "after", MAX_ITEMS),
    "journal": Listing("entries", "since", 100),
    "profiles": Listing("profiles", "after", 10_000),
}


MAX_POSITIONS = 1_000_000  # that one answer over HTTP puts together; the scheduler gives them in pages


def wants_positions(op: str, arguments: Json) -> bool:
    """True if all positions of one request are asked for, rather than a page of them."""
    return op == "requests" and flag(arguments, "positions") and "offset" not in arguments


async def read_positions(call: Call, arguments: Json) -> tuple[int, bytes]:
    """Status and JSON of a request with the ``positions`` that its slots hold, and those that each traced pass left, as
    nested lists [n] or [layers][heads][n]. The first page as it is where there are more than MAX_POSITIONS."""
    given = await call("requests", arguments)
    answer = read_object(given.payload)
    shown = answer.get("requests")
    if given.status != 200 or not isinstance(shown, list) or not shown or shown[0]["num_values"] > MAX_POSITIONS:
        return given.status, given.payload
    described = shown[0]
    pages = [np.array(described.pop("values"), dtype=np.int32)]
    following = described.pop("next_offset")
    while following is not None:
        given = await call("requests", {**arguments, "offset": following})
        if given.status != 200:
            return given.status, given.payload
        page = read_object(given.payload)["requests"]
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


def _start_of(node: Mapping[str, int]) -> int:
    return node["start"]


async def read_listing(call: Call, op: str, arguments: Json) -> tuple[int, bytes]:
    """Status and JSON of the first page, with the items of those that follow up to the limit.

    Later pages are of a later moment: while requests run, a node may be missing or be there twice in part. ``next`` is
    where to go on, None at the end.
    """
    listing = LISTINGS[op]
    wanted = min(int(str(arguments.get("limit", listing.limit))), MAX_ITEMS)
    given = await call(op, arguments)
    if given.status != 200:
        return given.status, given.payload
    page = read_object(given.payload)
    first, items = page, page.get(listing.items)
    if not isinstance(items, list):
        return given.status, given.payload
    following = page.get("next")
    while following is not None and len(items) < wanted:
        given = await call(op, {listing.cursor: following, "limit": wanted - len(items)})
        if given.status != 200:
            return given.status, given.payload
        more = read_object(given.payload)
        found = more[listing.items]
        if not isinstance(found, list):
            raise TypeError(f"{listing.items} of {op} is a {type(found).__name__}: expected a list")
        items += found
        page = {**page, **{name: more[name] for name in ("next", "last") if name in more}}
        following = more.get("next")
    if op == "tree" and page is not first:
        items.sort(key=_start_of)  # parents first, as on every page
    return given.status, encode(page)
