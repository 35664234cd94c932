"""When a request with a budget drops KV and to how many slots: a function of its slot count alone.

``num_slots`` is what the request physically holds, the token in flight included. Targets are congruent to it
modulo the page size, so that what a request has dropped is always a whole number of pages: its logical and its
physical length then end at the same place in a page, which all of SGLang's page arithmetic relies on.
A request at its target is not due: every rule can be asked twice.
"""

from __future__ import annotations

from sglang_evicpress.decode.settings import DecodeSettings


def is_over(settings: DecodeSettings, num_slots: int, page_size: int) -> bool:
    """Whether a prefill left more than the budget: tokens are then dropped to ``target`` before the first
    decode step (PagedEviction, algorithm 2)."""
    return num_slots > _capacity(settings, page_size)


def is_due(settings: DecodeSettings, num_slots: int, page_size: int) -> bool:
    """Whether something is to be dropped between decode steps.

    ``paged``: the newest page is full and the next one would not fit in the budget (PagedEviction, algorithm 3,
    which frees a page whenever one fills; below the budget nothing needs to go). The others: ``every`` tokens
    have come on top of the budget.
    """
    if settings.method == "paged":
        return num_slots % page_size == 0 and num_slots + page_size > _capacity(settings, page_size)
    return num_slots >= settings.tokens + settings.every


def is_near(settings: DecodeSettings, num_slots: int, page_size: int, within: int) -> bool:
    """Whether it is due now or after at most ``within`` more tokens."""
    latest = num_slots + within
    if settings.method == "paged":  # the last page that is full by then: if it is not due, none before it is
        latest -= latest % page_size
    return latest >= num_slots and is_due(settings, latest, page_size)


def target(settings: DecodeSettings, num_slots: int, page_size: int) -> int:
    """How many slots stay: the most that are within the budget, congruent to ``num_slots`` and not due.

    For ``paged`` between decode steps this is one page less than ``num_slots``. Only for a request that
    ``is_over`` or ``is_due``, with settings that passed ``check``.
    """
    room = _capacity(settings, page_size)
    if settings.method == "paged" and num_slots % page_size == 0:
        room -= page_size
    return room - (room - num_slots) % page_size


def peak(settings: DecodeSettings, page_size: int) -> int:
    """Slots in whole pages that the request holds at most while it decodes.

    Not counted: its prefill, which is exact, and the slots that a copy out of the prefix cache fills while
    the prefix is still locked.
    """
    if settings.method == "paged":
        return _capacity(settings, page_size)
    return -(-(settings.tokens + settings.every) // page_size) * page_size


def least_tokens(settings: DecodeSettings, page_size: int, sinks: int) -> int:
    """The smallest budget these settings work with: a pass must leave the sinks, the protected pages and one
    more token, and find something to drop."""
    if settings.method == "paged":
        pages = max(1, len(settings.protect), sinks // page_size + 1)
        return (pages + 1) * page_size
    return page_size + max(sinks, 0)


def check(settings: DecodeSettings, page_size: int, sinks: int) -> None:
    """Raise ValueError when the budget is too small for the page size, the sinks and the protected pages."""
    least = least_tokens(settings, page_size, sinks)
    if settings.tokens < least:
        raise ValueError(
            f"kv_decode_budget is {settings.tokens}: want at least {least} for {settings.method} with pages of "
            f"{page_size}, {sinks} sinks and protected pages {','.join(settings.protect) or 'none'}"
        )


def _capacity(settings: DecodeSettings, page_size: int) -> int:
    """``paged`` holds whole pages, so that the number the user gave is never exceeded."""
    if settings.method == "paged":
        return settings.tokens // page_size * page_size
    return settings.tokens
