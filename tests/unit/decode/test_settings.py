from __future__ import annotations

import pytest

from sglang_evicpress.decode.settings import METHODS, SCORES, DecodeSettings, from_request, parse_protect

SERVER = DecodeSettings(tokens=1024, method="repack", score="knorm", every=64)
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
    params = {"kv_decode_budget": 8, "kv_decode_every": 2, "kv_decode_protect": "newest"}
    assert from_request(params, OFF) == DecodeSettings(8, every=2, protect=("newest",))


def test_budget_0_turns_the_budget_of_the_server_off():
    assert from_request({"kv_decode_budget": 0}, SERVER) is None
    assert from_request({"kv_decode_budget": 0, "kv_decode_method": "paged"}, SERVER) is None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("score", SCORES)
def test_every_method_goes_with_every_score(method, score):
    settings = from_request({"kv_decode_budget": 64, "kv_decode_method": method, "kv_decode_score": score}, OFF)
    assert settings is not None
    assert (settings.method, settings.score) == (method, score)


def test_only_scores_by_attention_are_lost_without_queries():
    assert [name for name in SCORES if DecodeSettings(64, score=name).reads_queries] == ["tova", "h2o"]


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"kv_decode_budget": -1}, "kv_decode_budget is -1: want a whole number, at least 0"),
        ({"kv_decode_budget": "64"}, "kv_decode_budget is '64': want a whole number, at least 0"),
        ({"kv_decode_budget": 64.0}, "kv_decode_budget is 64.0: want a whole number, at least 0"),
        ({"kv_decode_budget": True}, "kv_decode_budget is True: want a whole number, at least 0"),
        ({"kv_decode_budget": None}, "kv_decode_budget is None: want a whole number, at least 0"),
        ({"kv_decode_method": "snapkv"}, "kv_decode_method is 'snapkv': want paged, repack, holefill or compact"),
        ({"kv_decode_method": ["paged"]}, "kv_decode_method is ['paged']: want paged, repack, holefill or compact"),
        (
            {"kv_decode_method": "quest"},
            "kv_decode_method 'quest' selects pages to read and keeps all of them, so it frees no memory: "
            "choose paged, repack, holefill or compact",
        ),
        (
            {"kv_decode_score": "snapkv"},
            "kv_decode_score is 'snapkv': want value_key_ratio, knorm, keydiff, streaming, r_kv, tova or h2o",
        ),
        ({"kv_decode_every": 0}, "kv_decode_every is 0: want a whole number, at least 1"),
        (
            {"kv_decode_protect": "last"},
            "kv_decode_protect is 'last': want 'first', 'newest', 'first,newest' or 'none'",
        ),
        (
            {"kv_decode_window": 8},
            "kv_decode_window is not known: want kv_decode_budget, kv_decode_method, kv_decode_score, "
            "kv_decode_every or kv_decode_protect",
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
    assert parse_protect("first,newest") == parse_protect("newest,first") == ("first", "newest")
    assert parse_protect("first") == ("first",)
    assert parse_protect("none") == ()


@pytest.mark.parametrize("text", ["", "first,first", "first,", "none,first", None, ["first"]])
def test_other_protections_are_refused(text):
    with pytest.raises(ValueError, match="kv_decode_protect is"):
        parse_protect(text)


@pytest.mark.parametrize(
    "fields", [{"protect": "first"}, {"protect": ("newest", "first")}, {"window": 0}, {"window": 257}]
)
def test_settings_of_the_server_are_checked_as_well(fields):
    with pytest.raises(ValueError, match=f"kv_decode_{next(iter(fields))} is"):
        DecodeSettings(64, **fields)
