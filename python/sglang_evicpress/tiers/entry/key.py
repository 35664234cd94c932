"""The secret that SSD entries are sealed with: nobody who lacks it can plant one, or change one unnoticed."""

from __future__ import annotations

import hmac
import mmap
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from hashlib import blake2b
from typing import NoReturn

SEAL_BYTES = 16
LEAST_KEY_BYTES, MOST_KEY_BYTES = 32, 4096

_RECORD, _EXTENT = b"evicpress record", b"evicpress extent"  # a seal of the one is none of the other

Buffer = bytes | bytearray | memoryview | mmap.mmap


class Key:
    """A secret of at least LEAST_KEY_BYTES bytes; nothing shows it."""

    __slots__ = ("_secret",)

    def __init__(self, secret: bytes) -> None:
        self._secret = blake2b(secret, person=b"evicpress key").digest()  # blake2b takes up to 64 bytes as a key

    @classmethod
    def read(cls, path: str) -> Key:
        """The key in a file. Raises ValueError, one sentence that never has a byte of it."""
        where = f"ssd_key_file {path!r}"
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else str(error)
            raise ValueError(f"{where} cannot be read ({why}): expected a file with the key") from None
        try:
            status, user = os.fstat(fd), os.geteuid()
            if not stat.S_ISREG(status.st_mode):
                raise ValueError(f"{where} is not a plain file: expected one with the key")
            if status.st_uid not in (user, 0):
                raise ValueError(f"{where} belongs to user {status.st_uid}: expected a file of user {user} or root")
            if status.st_mode & 0o027:  # a group may read it: so containers are given secrets
                raise ValueError(
                    f"{where} can be read by all or written by others (mode 0{stat.S_IMODE(status.st_mode):o}): "
                    "expected mode 0600, 0400 or 0440 (chmod 600)"
                )
            secret = os.read(fd, MOST_KEY_BYTES + 1)
        except OSError as error:
            raise ValueError(f"{where} cannot be read ({error.strerror}): expected a file with the key") from None
        finally:
            os.close(fd)
        if not LEAST_KEY_BYTES <= len(secret) <= MOST_KEY_BYTES:
            size = f"{len(secret)}" if len(secret) <= MOST_KEY_BYTES else "more"
            raise ValueError(
                f"{where} holds {size} bytes: expected {LEAST_KEY_BYTES} to {MOST_KEY_BYTES}, such as those of "
                "head -c 32 /dev/urandom"
            )
        return cls(secret)

    def seal_record(self, record: Buffer) -> bytes:
        """SEAL_BYTES for a record."""
        return blake2b(record, digest_size=SEAL_BYTES, key=self._secret, person=_RECORD).digest()

    def is_record(self, record: Buffer, seal: Buffer) -> bool:
        return hmac.compare_digest(self.seal_record(record), bytes(seal))

    def seal_extent(self, chunks: Iterable[Buffer]) -> bytes:
        """SEAL_BYTES for the bytes of an extent, in chunks."""
        digest = blake2b(digest_size=SEAL_BYTES, key=self._secret, person=_EXTENT)
        for chunk in chunks:
            digest.update(chunk)
        return digest.digest()

    def watch_extent(self, chunks: Iterable[Buffer]) -> tuple[Iterator[Buffer], Callable[[bytes], bool]]:
        """The same chunks, and a function that says, once they were taken, whether a seal is theirs."""
        digest = blake2b(digest_size=SEAL_BYTES, key=self._secret, person=_EXTENT)

        def watched() -> Iterator[Buffer]:
            for chunk in chunks:
                digest.update(chunk)
                yield chunk

        return watched(), lambda seal: hmac.compare_digest(digest.digest(), seal)

    def __repr__(self) -> str:
        return "Key(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a key is not pickled: read it again from its file")
