"""Identity of an entry's KV: the model's fingerprint, the namespace, and all tokens from the path's start.

Keys are cut from sha256, because namespaces and tokens come from users and a collision would serve one user's KV to
another. Lookup keys only look entries up; what they find is compared by key and tokens afterwards.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import TypeAlias

import numpy as np
import xxhash

FORMAT_VERSION = 3
"""2: layers may be what a codec makes of them. 3: layers may have different numbers of slots."""
KEY_BYTES = 16
MAX_TOKEN = 2**32 - 1
MAX_LOOKUP_KEY = 2**63 - 1

Tokens: TypeAlias = "Sequence[int] | array[int] | np.ndarray"  # integers from 0 to MAX_TOKEN


def fingerprint(parts: Mapping[str, object]) -> bytes:
    """16 bytes that differ when any part (model, dtype, rope, layout...) or the entry format differs.

    The order of keys does not count. Raises TypeError for a value that JSON cannot say.
    """
    text = json.dumps([FORMAT_VERSION, dict(parts)], sort_keys=True, separators=(",", ":"))
    return sha256(text.encode("ascii")).digest()[:KEY_BYTES]


def namespace_digest(namespace: str | None) -> bytes:
    """16 bytes for a namespace: zeros for None, which is not the same as the empty text."""
    if namespace is None:
        return bytes(KEY_BYTES)
    return sha256(b"evicpress namespace\0" + _text_bytes(namespace)).digest()[:KEY_BYTES]


def token_bytes(tokens: Tokens) -> bytes:
    """The tokens as little-endian uint32, the way they are hashed and stored.

    Raises ValueError for a token outside 0..2**32 - 1 and TypeError for what is not a flat row of integers.
    """
    if isinstance(tokens, (bytes, bytearray, memoryview)):
        raise TypeError(f"tokens are {type(tokens).__name__}: expected a sequence of integers")
    if isinstance(tokens, array | np.ndarray):
        return _array_bytes(np.asarray(tokens))
    try:
        row = array("I", tokens)
    except OverflowError:
        bad = next(token for token in tokens if not 0 <= token <= MAX_TOKEN)
        raise _bad_token(bad) from None
    if sys.byteorder != "little":
        row.byteswap()
    return row.tobytes()


def lookup_key_of(key: bytes, first_page: Tokens) -> int:
    """A 63-bit number for the way out of the path ``key`` that begins with these tokens (one page of them).

    All entries that could follow a path are found under one lookup key; two lookup keys may collide.
    """
    return xxhash.xxh3_64_intdigest(key + token_bytes(first_page)) & MAX_LOOKUP_KEY


class PathHash:
    """The hash of all tokens from the root of the tree: the same however the path is cut into nodes."""

    __slots__ = ("_hash",)

    def __init__(self, fingerprint: bytes, namespace: str | None) -> None:
        """Start at the root. Every variable part is preceded by its length, so no two pairs begin alike."""
        seed = b"evicpress path\0" + len(fingerprint).to_bytes(8, "little") + fingerprint
        if namespace is None:
            seed += b"\0"
        else:
            text = _text_bytes(namespace)
            seed += b"\1" + len(text).to_bytes(8, "little") + text
        self._hash = sha256(seed)

    def update(self, tokens: Tokens) -> None:
        """Go down by these tokens. Raises as ``token_bytes`` does, and is unchanged then."""
        self._hash.update(token_bytes(tokens))

    def copy(self) -> PathHash:
        """An independent hash of the same path."""
        other = object.__new__(PathHash)
        other._hash = self._hash.copy()
        return other

    @property
    def key(self) -> bytes:
        """16 bytes for the path so far."""
        return self._hash.digest()[:KEY_BYTES]


def _text_bytes(text: str) -> bytes:
    """UTF-8; a lone surrogate has its own three bytes, so different texts stay different."""
    return text.encode("utf-8", "surrogatepass")


def _array_bytes(row: np.ndarray) -> bytes:
    if row.ndim != 1 or (row.dtype.kind not in "iu" and row.size):
        raise TypeError(f"tokens are {row.dtype} of shape {row.shape}: expected one row of integers")
    if row.size and row.dtype != np.uint32:
        low, high = int(row.min()), int(row.max())
        if low < 0 or high > MAX_TOKEN:
            raise _bad_token(low if low < 0 else high)
    return row.astype("<u4", copy=False).tobytes()


def _bad_token(token: int) -> ValueError:
    return ValueError(f"token {token} is out of range: expected 0 to {MAX_TOKEN}")
