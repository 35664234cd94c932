"""The lines of a file, plain or compressed with Zstandard or gzip (told by its first bytes, not by its name)."""

from __future__ import annotations

import codecs
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
GZIP_MAGIC = b"\x1f\x8b"
MAX_WINDOW_BYTES = 2**27  # what `zstd --long=27` writes, the most that `zstd -d` reads when not asked for more
MAX_LINE_BYTES = 2**26
"""Longest line. The longest of public traces, a session of 323 requests and their ids, is a sixteenth of that."""

_PLAIN_CHUNK = 1 << 20
_PACKED_CHUNK = 1 << 12  # a chunk grows up to thousands of times when it is decompressed
_HEAD_BYTES = 1 << 13


class _Frame(Protocol):
    """A frame of a compressed file that is being read."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class _Packing:
    """A way to compress a file: its name, a new frame, what may lie between two, and what a damaged one raises."""

    name: str
    frame: Callable[[], _Frame]
    padding: bytes
    errors: tuple[type[Exception], ...]


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines without their newline, one in memory at a time. ValueError names the file and what is wrong with it."""
    try:
        if path.is_dir():
            raise ValueError(f"{path} is a directory: expected a trace file")
        with path.open("rb") as file:
            packing = _packing(file.peek(len(ZSTD_MAGIC)), path)
            content = _chunks(file, _PLAIN_CHUNK) if packing is None else _decompressed(file, path, packing)
            yield from _split(content, path)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: expected a trace file or synthetic:KIND[:SEED]") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while chunk := file.read(size):
        yield chunk


def _split(chunks: Iterator[bytes], path: Path) -> Iterator[bytes]:
    pieces: list[bytes] = []  # of the line that is not yet at its end
    num_bytes, number, is_first = 0, 1, True
    for chunk in chunks:
        if is_first and chunk:
            _check_text(chunk[:_HEAD_BYTES], path)
            is_first = False
        first, *others = chunk.split(b"\n")
        pieces.append(first)
        num_bytes += len(first)
        for other in others:
            yield b"".join(pieces)
            pieces, num_bytes, number = [other], len(other), number + 1
        if num_bytes > MAX_LINE_BYTES:
            raise ValueError(
                f"{path}, line {number}: no end within {MAX_LINE_BYTES >> 20} MiB: expected one JSON object a line"
            )
    if last := b"".join(pieces):
        yield last


def _check_text(head: bytes, path: Path) -> None:
    """Raise ValueError if a file that begins so is no text: it has a zero byte, or its first line is no UTF-8."""
    line, _, _ = head.lstrip().partition(b"\n")
    try:
        codecs.getincrementaldecoder("utf-8")().decode(line)  # the head may end within a character
        is_text = b"\0" not in head
    except UnicodeDecodeError:
        is_text = False
    if not is_text:
        raise ValueError(f"{path} is a binary file: expected text in UTF-8, one JSON object a line, plain, .zst or .gz")


def _packing(head: bytes, path: Path) -> _Packing | None:
    """How a file that begins so is compressed."""
    if head.startswith(GZIP_MAGIC):
        return _Packing("gzip", lambda: zlib.decompressobj(wbits=31), b"\0", (zlib.error,))
    if not head.startswith(ZSTD_MAGIC):
        return None
    try:
        import zstandard
    except ImportError:
        raise ValueError(
            f"{path} is compressed with Zstandard: install the package zstandard, or decompress the file first"
        ) from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    return _Packing("Zstandard", decompressor.decompressobj, b"", (zstandard.ZstdError,))


def _decompressed(file: BinaryIO, path: Path, packing: _Packing) -> Iterator[bytes]:
    """Content of the frames of the file. A stream reader would take a cut frame for the end: this does not."""
    frame, begun = packing.frame(), False
    try:
        for chunk in _chunks(file, _PACKED_CHUNK):
            rest = chunk if begun else chunk.lstrip(packing.padding)
            while rest:
                begun = True
                yield frame.decompress(rest)
                rest = b""
                if frame.eof:
                    rest, frame, begun = frame.unused_data.lstrip(packing.padding), packing.frame(), False
    except packing.errors as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if begun:
        raise ValueError(f"{path} is cut off: its last {packing.name} frame has no end")
