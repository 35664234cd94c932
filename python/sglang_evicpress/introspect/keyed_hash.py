"""Hashes under which namespaces and prompts are shown: nobody without the key can find them by guessing."""

from __future__ import annotations

import hashlib


def key_of(admin_api_key: str) -> bytes:
    """The key of ``keyed_hash`` on a server with an admin API key: operators, and nobody else, can work out what a
    namespace or a prompt is shown as. Without one the key is random and of one process."""
    return hashlib.sha256(admin_api_key.encode()).digest()


def keyed_hash(value: bytes, key: bytes, num_bytes: int) -> str:
    """BLAKE2b in hex: salts and prompts cannot be found by hashing guesses."""
    return hashlib.blake2b(value, digest_size=num_bytes, key=key).hexdigest()
