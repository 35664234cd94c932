"""Messages that need an idle server wait until background requests have given way, and no longer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from sglang.srt.managers.io_struct import FlushCacheReqInput, ReleaseMemoryOccupationReqInput

from sglang_evicpress.patches.scheduler.held_messages import LONGEST_S, GiveWay, HeldMessages

pytestmark = pytest.mark.sglang


@dataclass
class Load:
    has_background: bool = False
    is_idle: bool = True
    has_users: bool = False
    is_paused: bool = False
    awaits_idle: bool = False


def sifted(held: HeldMessages, messages: list[object], load: Load, now_s: float = 0.0) -> list[object]:
    received = list(messages)
    held.sift(received, load, now_s)
    return received


def test_nothing_waits_where_no_background_request_runs_or_users_do_as_well() -> None:
    flush = FlushCacheReqInput()
    for load in (Load(), Load(False, False, True), Load(True, False, True)):
        assert sifted(HeldMessages(), ["other", flush], load) == ["other", flush]


def test_a_flush_waits_until_background_requests_have_given_way() -> None:
    held, load = HeldMessages(), Load(True, False)
    flush, release = FlushCacheReqInput(), ReleaseMemoryOccupationReqInput(tags=None)
    first = sifted(held, [flush, "other"], load)
    assert first[0] == "other" and isinstance(first[1], GiveWay) and len(first) == 2
    again = sifted(held, ["late background", release], load, 0.1)
    assert again[0] == "late background" and isinstance(again[1], GiveWay) and len(again) == 2
    assert sifted(held, [], Load(False, True), 0.2) == [flush, release], "in the order in which they came"
    assert sifted(held, ["other"], load, 0.3) == ["other"]


def test_a_paused_server_holds_nothing_and_a_flush_that_it_keeps_itself_finds_it_idle() -> None:
    held, flush = HeldMessages(), FlushCacheReqInput()
    assert sifted(held, [flush], Load(True, False, is_paused=True)) == [flush]
    sifted(held, [flush], Load(True, False))
    assert sifted(held, [], Load(True, False, is_paused=True)) == [flush]
    given = sifted(held, ["other"], Load(True, False, awaits_idle=True))
    assert given[0] == "other" and isinstance(given[1], GiveWay)
    assert sifted(held, ["other"], Load(True, False, True, awaits_idle=True)) == ["other"]


@pytest.mark.parametrize("load", [Load(True, False, True), Load(True, False)])
def test_they_go_on_when_a_user_comes_or_it_takes_too_long(load: Load) -> None:
    held, flush = HeldMessages(), FlushCacheReqInput()
    sifted(held, [flush], Load(True, False))
    assert flush in sifted(held, [], load, LONGEST_S + 0.1)
