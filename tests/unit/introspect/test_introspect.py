from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from tests.unit.introspect.fake_cache import FakeCache

from sglang_evicpress.core import Tier
from sglang_evicpress.introspect.operations import (
    Inspectable,
    IntrospectionError,
    Json,
    UnknownNode,
    answer,
    answer_encoded,
    encode,
    read_object,
    read_question,
)


def reason_of(body: Json) -> str:
    assert list(body) == ["error"]
    error = body["error"]
    assert isinstance(error, dict)
    assert list(error) == ["reason"]
    return str(error["reason"])


def test_fake_offers_what_the_protocol_asks() -> None:
    cache: Inspectable = FakeCache()
    assert isinstance(cache, Inspectable)


@pytest.mark.parametrize(
    ("flags", "keys"),
    [
        ({}, {"id", "form"}),
        ({"positions": "true"}, {"id", "form", "positions"}),
        ({"positions": "0", "tokens": "1"}, {"id", "form", "tokens"}),
        ({"positions": True, "tokens": True}, {"id", "form", "positions", "tokens"}),
    ],
)
def test_node_shows_positions_and_tokens_only_when_asked(flags: Json, keys: set[str]) -> None:
    status, body = answer(FakeCache(), "node", {"node_id": "1", **flags})
    assert (status, set(body)) == (200, keys)


def shown_requests(
    rid: str | None = None, positions: bool = False, offset: int = 0, after: int = 0, limit: int = 100
) -> Json:
    return {"rid": rid, "positions": positions, "offset": offset, "after": after, "limit": limit}


@pytest.mark.parametrize(
    ("op", "arguments", "expected"),
    [
        ("tree", {}, {"nodes": [{"id": node_id, "form": "exact"} for node_id in (1, 2, 3)]}),
        ("explain", {"node_id": "2"}, {"id": 2, "options": []}),
        ("journal", {}, {"since": 0, "limit": 100}),
        ("journal", {"since": "7", "limit": "2"}, {"since": 7, "limit": 2}),
        ("evict", {"num_slots": 12}, {"freed_slots": 12}),
        ("tiers", {}, {"tiers": ["gpu", "host"]}),
        ("demote", {"node_id": "1", "tier": "ssd"}, {"id": 1, "tier": "ssd", "hold_s": 60.0}),
        (
            *("demote", {"node_id": "1", "tier": "ssd", "codec": "int4"}),
            {"id": 1, "tier": "ssd", "hold_s": 60.0, "codec": "int4"},
        ),
        ("requests", {}, shown_requests()),
        ("requests", {"rid": "a"}, shown_requests("a")),
        ("requests", {"rid": "a", "positions": "true", "offset": "65536"}, shown_requests("a", True, 65536)),
        ("requests", {"after": "7", "limit": 3}, shown_requests(after=7, limit=3)),
    ],
)
def test_a_question_reaches_the_cache_with_its_arguments(op: str, arguments: Json, expected: Json) -> None:
    assert answer(FakeCache(), op, arguments) == (200, expected)


def test_compress_reaches_the_node_with_the_parsed_form() -> None:
    cache = FakeCache()
    status, body = answer(cache, "compress", {"node_id": "1", "form": "keydiff@0.50"})
    assert (status, body["freed_slots"]) == (200, 5)
    assert cache.forms[1] == "keydiff@0.5"


def test_check_that_finds_a_broken_invariant_is_an_answer_not_an_error() -> None:
    cache = FakeCache()
    cache.broken = ["slot 7 belongs to nodes 1 and 2"]
    assert answer(cache, "check", {}) == (200, {"ok": False, "violations": cache.broken})


def test_each_tier_of_ours_can_be_flushed() -> None:
    cache = FakeCache()
    cache.ssd = ("/kv", 1.0, None)
    for tier in ("gpu", "host", "ssd"):
        assert answer(cache, "flush", {"tier": tier}) == (200, {"tier": tier})
    assert cache.flushed == [Tier.GPU, Tier.HOST, Tier.SSD]


@pytest.mark.parametrize("seconds", [0, 0.5, 86400])
def test_who_moves_or_compresses_a_node_by_hand_says_how_long_it_is_held(seconds: float) -> None:
    for op, argument in (("demote", {"tier": "ssd"}), ("compress", {"form": "keydiff@0.5"})):
        status, body = answer(FakeCache(), op, {"node_id": 1, **argument, "hold_seconds": seconds})
        assert (status, body["hold_s"]) == (200, seconds)


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ({"dir": "/kv", "gb": 5}, ("/kv", 5.0, None)),
        ({"dir": "/kv", "gb": 0.5, "write_gb_per_day": 2}, ("/kv", 0.5, 2.0)),
        ({"dir": "/kv", "gb": 0.5, "write_gb_per_day": None}, ("/kv", 0.5, None)),
    ],
)
def test_an_ssd_is_attached_and_detached(arguments: Json, given: tuple[str, float, float | None]) -> None:
    cache = FakeCache()
    assert answer(cache, "attach_ssd", arguments) == (200, {"dir": "/kv"})
    assert cache.ssd == given
    assert answer(cache, "attach_ssd", arguments)[0] == 409
    assert answer(cache, "detach_ssd", {}) == (200, {"dir": None})
    assert cache.ssd is None


def test_unexpected_exception_is_500_and_logged_with_where_it_came_from(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        status, body = answer(FakeCache(), "stats", {})
    assert (status, reason_of(body)) == (500, "stats failed with RuntimeError: the pool is on fire")
    assert "RuntimeError at fake_cache.py:" in caplog.text and "in describe_stats" in caplog.text


def test_no_prompt_is_logged_with_a_failure(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(FakeCache):
        def describe_requests(self, rid: str | None, **_: object) -> Json:
            raise MemoryError(f"no room for {rid}")

    with caplog.at_level(logging.DEBUG):
        status, _ = answer(Failing(), "requests", {"rid": "31415 926 535"})
    assert status == 500
    assert "MemoryError at" in caplog.text and "rid (13)" in caplog.text
    assert "31415" not in caplog.text and "no room" not in caplog.text


def test_value_error_of_a_question_that_changes_nothing_is_unexpected() -> None:
    class Slipping(FakeCache):
        def describe_tree(self) -> Json:
            raise ValueError("3 is not in list")

    status, body = answer(Slipping(), "tree", {})
    assert (status, reason_of(body)) == (500, "tree failed with ValueError: 3 is not in list")


def test_a_cache_that_is_not_ours_is_501() -> None:
    status, body = answer({}, "tree", {})
    assert (status, reason_of(body)) == (501, "the cache is a dict, which cannot be inspected")


def test_encoded_answer_takes_numpy_and_integer_keys() -> None:
    class Numbered(FakeCache):
        def describe_tree(self) -> Json:
            return {"by_id": {1: np.float32(0.5)}}

    assert answer_encoded(Numbered(), "tree", b"") == (200, b'{"by_id":{"1":0.5}}')
    status, body = answer_encoded(FakeCache(), "node", b'{"node_id": 1, "positions": true}')
    assert (status, json.loads(body)) == (200, {"id": 1, "form": "exact", "positions": [0, 1, 2]})


def test_answer_that_json_cannot_hold_becomes_500() -> None:
    class Opaque(FakeCache):
        def describe_tree(self) -> Json:
            return {"tree": object()}

    status, body = answer_encoded(Opaque(), "tree", b"{}")
    assert (status, reason_of(json.loads(body))[:31]) == (500, "the answer to tree is not JSON:")


@pytest.mark.parametrize("payload", [b"{", b"\xff", b"NaN", b'{"form": keydiff}'])
def test_invalid_json_is_400(payload: bytes) -> None:
    status, body = answer_encoded(FakeCache(), "check", payload)
    assert status == 400
    assert reason_of(json.loads(body)).startswith("the request body is not JSON")


@pytest.mark.parametrize("payload", [b"[]", b"3", b"null", b'"keydiff@0.5"', b"true"])
def test_json_that_is_no_object_is_400(payload: bytes) -> None:
    with pytest.raises(IntrospectionError, match="expected a JSON object") as caught:
        read_object(payload)
    assert caught.value.status == 400


@pytest.mark.parametrize("payload", [b"", b"  \n", b"{}"])
def test_no_body_is_an_empty_object(payload: bytes) -> None:
    assert read_object(payload) == {}


def test_question_is_checked_without_a_cache() -> None:
    question = read_question("node", {"node_id": "1"})
    assert question(FakeCache())["form"] == "exact"
    with pytest.raises(IntrospectionError, match="num_slots"):
        read_question("evict", {"num_slots": "few"})


def test_error_body_round_trips_as_json() -> None:
    error = UnknownNode(5)
    assert json.loads(encode(error.body)) == {"error": {"reason": error.reason}}
    assert str(error) == error.reason
