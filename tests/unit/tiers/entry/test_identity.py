"""Keys must agree wherever the same KV is meant and differ wherever it is not."""

from __future__ import annotations

from array import array
from hashlib import sha256
from struct import pack

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.tiers.entry import identity
from sglang_evicpress.tiers.entry.identity import (
    KEY_BYTES,
    MAX_TOKEN,
    PathHash,
    fingerprint,
    lookup_key_of,
    namespace_digest,
    token_bytes,
)

FINGERPRINT = bytes(range(16))
# Also lone surrogates, a pair of them beside the character they would spell, and two ways to write one letter.
NAMES = (None, "", "\0", "\ud800", "\udfff", "\ud83d\ude00", "\U0001f600", "\u00e9", "e\u0301", "tenant 1")
TOKEN_LISTS = st.lists(st.integers(0, MAX_TOKEN), max_size=40)
NAMESPACES = st.none() | st.text(st.characters(codec=None, categories=None), max_size=8)


def reference_key(fingerprint: bytes, namespace: str | None, tokens: list[int]) -> bytes:
    seed = b"evicpress path\0" + pack("<Q", len(fingerprint)) + fingerprint
    if namespace is None:
        seed += b"\0"
    else:
        text = namespace.encode("utf-8", "surrogatepass")
        seed += b"\1" + pack("<Q", len(text)) + text
    return sha256(seed + b"".join(pack("<I", token) for token in tokens)).digest()[:16]


@given(NAMESPACES, TOKEN_LISTS, st.lists(st.integers(0, 40), max_size=6))
def test_path_hash_is_the_reference_however_the_path_is_cut(
    namespace: str | None, tokens: list[int], cuts: list[int]
) -> None:
    path = PathHash(FINGERPRINT, namespace)
    bounds = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    for begin, end in zip(bounds, bounds[1:], strict=False):
        assert path.key == reference_key(FINGERPRINT, namespace, tokens[:begin])
        path.update(tokens[begin:end])
    assert path.key == reference_key(FINGERPRINT, namespace, tokens)
    assert len(path.key) == KEY_BYTES


@given(TOKEN_LISTS, TOKEN_LISTS)
def test_different_paths_have_different_keys(one: list[int], other: list[int]) -> None:
    keys = []
    for tokens in (one, other):
        path = PathHash(FINGERPRINT, None)
        path.update(tokens)
        keys.append(path.key)
    assert (keys[0] == keys[1]) == (one == other)


@given(NAMESPACES, NAMESPACES)
def test_namespaces_do_not_mix(one: str | None, other: str | None) -> None:
    same = one == other
    assert (PathHash(FINGERPRINT, one).key == PathHash(FINGERPRINT, other).key) == same
    assert (namespace_digest(one) == namespace_digest(other)) == same


@pytest.mark.parametrize("namespace", NAMES)
def test_every_text_is_a_namespace_of_its_own(namespace: str | None) -> None:
    assert sum(namespace_digest(other) == namespace_digest(namespace) for other in NAMES) == 1
    root = PathHash(FINGERPRINT, namespace).key
    assert sum(PathHash(FINGERPRINT, other).key == root for other in NAMES) == 1
    assert len(namespace_digest(namespace)) == KEY_BYTES


def test_no_namespace_is_zeros() -> None:
    assert namespace_digest(None) == bytes(16)


def test_a_seed_cannot_be_read_in_two_ways() -> None:
    """Bytes moved from the fingerprint to the namespace, or from there to the tokens, make another path."""
    assert PathHash(b"ab", "c").key != PathHash(b"a", "bc").key
    longer, shorter = PathHash(FINGERPRINT, "tenantAAAA"), PathHash(FINGERPRINT, "tenant")
    shorter.update([int.from_bytes(b"AAAA", "little")])
    assert longer.key != shorter.key
    assert PathHash(FINGERPRINT, None).key != PathHash(bytes(16), None).key


def test_a_copy_goes_its_own_way() -> None:
    path = PathHash(FINGERPRINT, "a")
    path.update([1, 2])
    other = path.copy()
    assert other.key == path.key
    other.update([3])
    assert path.key == reference_key(FINGERPRINT, "a", [1, 2])
    assert other.key == reference_key(FINGERPRINT, "a", [1, 2, 3])


@given(TOKEN_LISTS)
def test_every_kind_of_row_has_the_same_bytes(tokens: list[int]) -> None:
    expected = b"".join(pack("<I", token) for token in tokens)
    rows = [
        tokens,
        tuple(tokens),
        array("q", tokens),
        array("I", tokens),
        np.array(tokens, np.int64),
        np.array(tokens, np.uint64),
        np.array(tokens, ">u4"),
        np.array([tokens, tokens], np.int64).T[:, 0],
        [np.int64(token) for token in tokens],
    ]
    assert [token_bytes(row) for row in rows] == [expected] * len(rows)


def test_a_view_of_a_row_is_read_in_its_own_order() -> None:
    assert token_bytes(np.arange(6, dtype=np.uint32)[::-2]) == pack("<3I", 5, 3, 1)
    assert token_bytes(np.array([])) == b""


@pytest.mark.parametrize(
    "row",
    [
        [1, -1],
        [1, 2**32],
        [2**70, 1],
        [np.int64(-1)],
        array("i", [1, -1]),
        array("Q", [2**64 - 1]),
        np.array([1, -1], np.int8),
        np.array([1, 2**32]),
        np.array([2**64 - 1], np.uint64),
    ],
    ids=repr,
)
def test_a_token_that_does_not_fit_is_refused_and_changes_nothing(row: list[int]) -> None:
    bad = next(int(token) for token in row if not 0 <= token <= MAX_TOKEN)
    path = PathHash(FINGERPRINT, None)
    before = path.key
    with pytest.raises(ValueError, match=f"token {bad} is out of range: expected 0 to 4294967295"):
        path.update(row)
    assert path.key == before


@pytest.mark.parametrize(
    "row", [b"ab", bytearray(b"ab"), memoryview(b"ab"), [1.5], np.array([1.0]), np.eye(2, dtype=int)]
)
def test_what_is_no_row_of_integers_is_refused(row: object) -> None:
    with pytest.raises(TypeError):
        token_bytes(row)


@given(st.binary(min_size=16, max_size=16), st.lists(st.integers(0, MAX_TOKEN), min_size=1, max_size=16))
def test_an_edge_is_a_63_bit_number(key: bytes, page: list[int]) -> None:
    assert 0 <= lookup_key_of(key, page) < 2**63
    assert lookup_key_of(key, page) == lookup_key_of(bytes(key), np.array(page))


def test_edges_differ_by_path_and_by_first_page() -> None:
    lookup_keys = {lookup_key_of(bytes([key] * 16), [token]) for key in range(64) for token in range(64)}
    assert len(lookup_keys) == 64 * 64
    assert any(lookup_key >= 2**62 for lookup_key in lookup_keys)


def test_fingerprint_depends_on_every_part_and_not_on_their_order() -> None:
    parts = {"model": "a", "rope": {"theta": 1e4, "scaling": None}, "heads": 8}
    base = fingerprint(parts)
    assert len(base) == KEY_BYTES
    assert fingerprint({"heads": 8, "rope": {"scaling": None, "theta": 1e4}, "model": "a"}) == base
    changed: list[dict[str, object]] = [
        {**parts, "model": "b"},
        {**parts, "heads": 9},
        {**parts, "heads": "8"},
        {**parts, "rope": {"theta": 1e4, "scaling": 2.0}},
        {**parts, "revision": None},
        {"model": "a", "heads": 8},
    ]
    assert len({base, *map(fingerprint, changed)}) == 1 + len(changed)


def test_fingerprint_depends_on_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint({"model": "a"})
    monkeypatch.setattr(identity, "FORMAT_VERSION", identity.FORMAT_VERSION + 1)
    assert fingerprint({"model": "a"}) != before


def test_fingerprint_refuses_what_has_no_one_text() -> None:
    with pytest.raises(TypeError):
        fingerprint({"dtype": object()})


def test_keys_of_format_3_do_not_change() -> None:
    """They are on users' disks: whoever changes them raises FORMAT_VERSION."""
    path = PathHash(FINGERPRINT, "tenant")
    path.update([1, 2, 3])
    assert path.key.hex() == "cf09df0a3a0147bf344929bd1fa0c050"
    assert namespace_digest("tenant").hex() == "e7af7867dd9909accb623eeb824f9352"
    assert lookup_key_of(path.key, [4]) == 282884730598451415
    assert fingerprint({"a": 1}).hex() == "9c6cb7fc2b842a98ada02f589f9805f5"
