"""When a request with a budget drops KV and to how many slots: a function of its slot count alone.

``num_slots`` is what the request physically holds, the token in flight included. Targets are congruent to it
modulo the page size, so that what a request has dropped is always a whole number of pages: its logical and its
physical length then end at the same place in a page, which all of SGLang's page arithmetic relies on.
A request at its target is not due: every rule can be asked twice.
"""

from __future__ import annotations

from sglang_evicpress.decode_budget.settings import PROTECTIONS, DecodeSettings

LEAST_BLOCK = 16
"""Tokens of the smallest block that ``paged`` frees; the pages of PagedEviction have as many."""


def block_size(page_size: int) -> int:
    """Tokens of one block of ``paged``: whole pages, at least ``LEAST_BLOCK`` tokens.

    A block is that many consecutive slots of a row, counted from its front, and is scored and freed as a whole. With
    pages of 16 and more it is a page, as in the paper. Smaller pages are grouped: one pass per page would read the
    whole row for each token (pages of 1), and its mean over so few tokens would no longer be the block score of
    algorithm 1, whose neighbours stay together. A request so keeps the same tokens with pages of 1 as with pages of 16.
    """
    return -(-LEAST_BLOCK // page_size) * page_size


def protected_blocks(protected_pages: tuple[str, ...], block: int, sinks: int) -> tuple[int, int]:
    """Blocks that ``paged`` leaves alone at the front of a row (``first``: all that hold sinks, at least one) and at
    its end (``newest``)."""
    first, newest = PROTECTIONS
    return max(1, -(-sinks // block)) if first in protected_pages else 0, int(newest in protected_pages)


def is_over(settings: DecodeSettings, num_slots: int, page_size: int) -> bool:
    """True if a prefill left more than the budget: tokens are then dropped to ``target`` before the first
    decode step (PagedEviction, algorithm 2)."""
    return num_slots > _capacity(settings, page_size)


def is_due(settings: DecodeSettings, num_slots: int, page_size: int) -> bool:
    """True if something is to be dropped between decode steps.

    ``paged``: the newest block is full and the next one would not fit in the budget (PagedEviction, algorithm 3,
    which frees a page whenever one fills; below the budget nothing needs to go), or a pass that was deferred is to be
    made up for. The others: ``interval`` tokens have come on top of the budget.
    """
    if settings.method == "paged":
        block, capacity = block_size(page_size), _capacity(settings, page_size)
        return num_slots > capacity or (num_slots % block == 0 and num_slots + block > capacity)
    return num_slots >= settings.tokens + settings.interval


def is_near(settings: DecodeSettings, num_slots: int, page_size: int, within: int) -> bool:
    """True if it is due now or after at most ``within`` more tokens."""
    latest = num_slots + within
    if settings.method == "paged" and latest <= _capacity(settings, page_size):
        latest -= latest % block_size(page_size)  # the last block that is full by then: no other is due before it
    return latest >= num_slots and is_due(settings, latest, page_size)


def target(settings: DecodeSettings, num_slots: int, page_size: int) -> int:
    """Number of slots that stay: the most that are within the budget, congruent to ``num_slots`` and not due.

    For ``paged`` between decode steps this is one block less than ``num_slots``, and congruent modulo the block. Only
    for a request that ``is_over`` or ``is_due``, with settings that passed ``check``.
    """
    room, unit = _capacity(settings, page_size), page_size
    if settings.method == "paged":
        unit = block_size(page_size)
        if num_slots % unit == 0:
            room -= unit
    return room - (room - num_slots) % unit


def peak(settings: DecodeSettings, page_size: int) -> int:
    """Slots in whole pages that the request holds at most while it decodes.

    Not counted: its prefill, which is exact, and the slots that a copy out of the prefix cache fills while
    the prefix is still locked.
    """
    if settings.method == "paged":
        return _capacity(settings, page_size)
    return -(-(settings.tokens + settings.interval) // page_size) * page_size


def least_tokens(settings: DecodeSettings, page_size: int, sinks: int) -> int:
    """The smallest budget these settings work with: a pass must leave the sinks, the protected blocks and one
    more token, and find something to drop."""
    if settings.method == "paged":
        block = block_size(page_size)
        blocks = max(1, sum(protected_blocks(settings.protected_pages, block, sinks)), sinks // block + 1)
        return (blocks + 1) * block
    return page_size + max(sinks, 0)


def check(settings: DecodeSettings, page_size: int, sinks: int) -> None:
    """Raise ValueError when the budget is too small for the page size, the sinks and the protected pages."""
    least = least_tokens(settings, page_size, sinks)
    if settings.tokens < least:
        block = block_size(page_size) if settings.method == "paged" else page_size
        pages = f"pages of {page_size}" + (f" freed in blocks of {block}" if block != page_size else "")
        raise ValueError(
            f"kv_decode_budget is {settings.tokens}: expected at least {least} for {settings.method} with {pages}, "
            f"{sinks} sinks and protected pages {','.join(settings.protected_pages) or 'none'}"
        )


def _capacity(settings: DecodeSettings, page_size: int) -> int:
    """``paged`` holds whole blocks, so that the number the user gave is never exceeded."""
    if settings.method == "paged":
        block = block_size(page_size)
        return settings.tokens // block * block
    return settings.tokens
