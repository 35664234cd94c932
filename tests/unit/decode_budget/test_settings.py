from __future__ import annotations

import math
import random

import pytest

from sglang_evicpress.decode_budget.scores import SCORES
from sglang_evicpress.decode_budget.settings import (
    METHODS,
    DecodeSettings,
    client_settings,
    fields_of,
    from_request,
    least_interval,
    parse_protected_pages,
)

SERVER = DecodeSettings(tokens=1024, method="repack", score="knorm", interval=64)
OFF = DecodeSettings()


def test_without_parameters_the_server_decides():
    assert from_request(None, SERVER) == SERVER
    assert from_request({"temperature": 1}, SERVER) == SERVER
    assert from_request(None, OFF) is None
    assert from_request({"thinking_budget": 7}, OFF) is None


def test_a_request_replaces_what_it_names_and_keeps_the_rest():
    params = {"kv_decode_budget": 256, "kv_decode_method": "holefill", "other": object()}
    assert from_request(params, SERVER) == DecodeSettings(256, "holefill", "knorm", 64)
    assert from_request({"kv_decode_score": "h2o"}, SERVER) == DecodeSettings(1024, "repack", "h2o", 64)
    params = {"kv_decode_budget": 8, "kv_decode_interval": 2, "kv_decode_protected_pages": "newest"}
    assert from_request(params, OFF) == DecodeSettings(8, interval=2, protected_pages=("newest",))


def test_budget_0_turns_the_budget_of_the_server_off():
    assert from_request({"kv_decode_budget": 0}, SERVER) is None
    assert from_request({"kv_decode_budget": 0, "kv_decode_method": "paged"}, SERVER) is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("score", SCORES)
def test_every_method_goes_with_every_score(method, score):
    settings = from_request({"kv_decode_budget": 64, "kv_decode_method": method, "kv_decode_score": score}, OFF)
    assert (settings.method, settings.score) == (method, score)


def test_only_scores_by_attention_are_lost_without_queries():
    assert [name for name in SCORES if DecodeSettings(64, score=name).reads_queries] == ["tova", "h2o"]


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"kv_decode_budget": -1}, "kv_decode_budget is -1: expected a whole number, at least 0"),
        ({"kv_decode_budget": "64"}, "kv_decode_budget is '64': expected a whole number, at least 0"),
        ({"kv_decode_budget": 64.0}, "kv_decode_budget is 64.0: expected a whole number, at least 0"),
        ({"kv_decode_budget": True}, "kv_decode_budget is True: expected a whole number, at least 0"),
        ({"kv_decode_budget": None}, "kv_decode_budget is None: expected a whole number, at least 0"),
        ({"kv_decode_method": "snapkv"}, "kv_decode_method is 'snapkv': expected paged, repack, holefill or compact"),
        ({"kv_decode_method": ["paged"]}, "kv_decode_method is ['paged']: expected paged, repack, holefill or compact"),
        (
            {"kv_decode_method": "quest"},
            "kv_decode_method 'quest' selects pages to read and keeps all of them, so it frees no memory: "
            "choose paged, repack, holefill or compact",
        ),
        (
            {"kv_decode_score": "snapkv"},
            "kv_decode_score is 'snapkv': expected value_key_ratio, knorm, keydiff, streaming, geometry, r_kv, tova or "
            "h2o",
        ),
        ({"kv_decode_interval": 0}, "kv_decode_interval is 0: expected a whole number, at least 1"),
        (
            {"kv_decode_protected_pages": "last"},
            "kv_decode_protected_pages is 'last': expected 'first', 'newest', 'first,newest' or 'none'",
        ),
        (
            {"kv_decode_window": 8},
            "kv_decode_window is not known: expected kv_decode_budget, kv_decode_method, kv_decode_score, "
            "kv_decode_interval or kv_decode_protected_pages",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence(params, sentence):
    with pytest.raises(ValueError) as refusal:
        from_request({"kv_decode_budget": 64} | params, SERVER)
    assert str(refusal.value) == sentence


def test_a_method_without_a_budget_is_refused():
    with pytest.raises(ValueError, match=r"^kv_decode_method without kv_decode_budget has nothing to apply to"):
        from_request({"kv_decode_method": "paged"}, OFF)


def test_protected_pages_are_read_in_either_order():
    assert parse_protected_pages("first,newest") == parse_protected_pages("newest,first") == ("first", "newest")
    assert parse_protected_pages("first") == ("first",)
    assert parse_protected_pages("none") == ()


@pytest.mark.parametrize("text", ["", "first,first", "first,", "none,first", None, ["first"]])
def test_other_protections_are_refused(text):
    with pytest.raises(ValueError, match="kv_decode_protected_pages is"):
        parse_protected_pages(text)


@pytest.mark.parametrize(
    "fields", [{"protected_pages": "first"}, {"protected_pages": ("newest", "first")}, {"window": 0}, {"window": 257}]
)
def test_settings_of_the_server_are_checked_as_well(fields):
    with pytest.raises(ValueError, match=f"kv_decode_{next(iter(fields))} is"):
        DecodeSettings(64, **fields)


# ---- what clients may choose


@pytest.mark.parametrize(("own", "least"), [(1, 16), (4, 16), (16, 16), (20, 20), (32, 32), (128, 32), (5000, 32)])
def test_no_client_asks_for_passes_more_often_than_the_floor(own, least):
    default = DecodeSettings(interval=own)
    assert least_interval(default) == least
    accepted, _ = client_settings({"kv_decode_budget": 64, "kv_decode_interval": least}, default)
    assert accepted is not None and accepted.interval == least
    for asked in (1, least - 1):
        with pytest.raises(ValueError) as refusal:
            client_settings({"kv_decode_budget": 64, "kv_decode_interval": asked}, default)
        assert str(refusal.value) == f"kv_decode_interval is {asked}: expected at least {least} on this server"
    inherited, _ = client_settings({"kv_decode_budget": 64}, default)
    assert inherited is not None and inherited.interval == own, "the server's own is the server's choice"


@pytest.mark.parametrize("choice", [{"score": "r_kv"}, {"method": "holefill"}, {"method": "compact"}])
def test_no_client_has_a_whole_context_sorted_in_each_pass(choice):
    asked = {f"kv_decode_{name}": value for name, value in choice.items()}
    assert client_settings({"kv_decode_budget": 8192, **asked}, OFF)[0] is not None
    with pytest.raises(ValueError, match="kv_decode_budget is 100000: expected at most 8192 with "):
        client_settings({"kv_decode_budget": 100_000, **asked}, OFF)
    own = DecodeSettings(100_000, **choice)
    assert client_settings({"kv_decode_budget": 100_000}, own)[0] == own
    assert client_settings(None, own)[0] == own


def test_linear_scores_take_any_budget():
    settings, _ = client_settings({"kv_decode_budget": 100_000, "kv_decode_score": "keydiff"}, OFF)
    assert settings is not None and settings.tokens == 100_000


def test_a_server_may_keep_the_choice_to_itself():
    assert client_settings({"other": 1}, SERVER, "off") == (SERVER, False)
    for params in ({"kv_decode_budget": 64}, {"kv_decode_budget": 0}, {"kv_decode_trace": False}, {"kv_decode_x": 1}):
        with pytest.raises(ValueError, match=f"{next(iter(params))}.*--kv-decode-client-budgets off"):
            client_settings(params, SERVER, "off")


def test_a_trace_needs_a_server_that_offers_them():
    params = {"kv_decode_budget": 64, "kv_decode_trace": True}
    assert client_settings(params, OFF, "trace") == (DecodeSettings(64), True)
    with pytest.raises(ValueError, match="expected a server started with --kv-decode-client-budgets trace"):
        client_settings(params, OFF, "on")
    assert client_settings({**params, "kv_decode_trace": False}, OFF, "on") == (DecodeSettings(64), False)


def test_of_a_million_entries_only_ours_are_looked_up():
    params = dict.fromkeys(map(str, range(1000)), 1)
    assert fields_of({**params, "kv_decode_budget": 64, "kv_decode_trace": True}) == {
        "kv_decode_budget": 64,
        "kv_decode_trace": True,
    }
    assert fields_of({7: 1, None: 2, ("kv_decode_budget",): 3}) == {}


def test_whatever_a_client_sends_is_taken_or_refused_with_one_sentence():
    nested = []
    for _ in range(100_000):
        nested = [nested]
    odd = [
        *(math.nan, math.inf, -math.inf, -1, 0, 1, 2**31, 2**64 - 1, -(2**63), 1.5, 64.0, True, False, None),
        *("", "64", "x" * 10_000_000, "," * 10_000_000, "first", "paged", b"paged", "\0", "\ud800"),
        *([], [1], {}, {"a": nested}, nested, [0] * 1_000_000, ("first",), {1, 2}, object()),
    ]
    names = [*("budget", "method", "score", "interval", "protected_pages", "trace", "size"), "y" * 100_000]
    draw = random.Random(5)
    taken = refused = 0
    for name in names:
        for value in odd:
            params = {f"kv_decode_{name}": value}
            if draw.random() < 0.5:
                params = {"kv_decode_budget": 64, **params}
            for clients in ("trace", "on", "off"):
                try:
                    client_settings(params, draw.choice([OFF, SERVER]), clients)
                    taken += 1
                except ValueError as refusal:
                    refused += 1
                    assert len(str(refusal)) < 400 and "\n" not in str(refusal)
                    assert str(refusal).startswith("kv_decode_") or "kv_decode_" in str(refusal)
    assert taken and refused
