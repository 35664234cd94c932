"""The lines of a file, plain or compressed with Zstandard (told by its first bytes, not by its name)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
MAX_WINDOW_BYTES = 2**27  # what `zstd --long=27` writes, the most that `zstd -d` reads when not asked for more
_PLAIN_CHUNK = 1 << 20
_ZSTD_CHUNK = 1 << 12  # a chunk grows up to thousands of times when it is decompressed


def read_lines(path: Path) -> Iterator[bytes]:
    """Lines without their newline, one in memory at a time. ValueError names the file and what is wrong with it."""
    try:
        if path.is_dir():
            raise ValueError(f"{path} is a directory: expected a trace file")
        with path.open("rb") as file:
            compressed = file.peek(len(ZSTD_MAGIC)).startswith(ZSTD_MAGIC)
            yield from _split(_decompressed(file, path) if compressed else _chunks(file, _PLAIN_CHUNK))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: expected a trace file or synthetic:KIND[:SEED]") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None


def _chunks(file: BinaryIO, size: int) -> Iterator[bytes]:
    while chunk := file.read(size):
        yield chunk


def _split(chunks: Iterator[bytes]) -> Iterator[bytes]:
    pieces: list[bytes] = []  # of the line that is not yet at its end
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pieces.append(first)
        for other in others:
            yield b"".join(pieces)
            pieces = [other]
    if last := b"".join(pieces):
        yield last


def _decompressed(file: BinaryIO, path: Path) -> Iterator[bytes]:
    """Content of the frames of the file. A stream reader would take a cut frame for the end: this does not."""
    try:
        import zstandard
    except ImportError:
        raise ValueError(
            f"{path} is compressed with Zstandard: install the package zstandard, or decompress the file first"
        ) from None
    decompressor = zstandard.ZstdDecompressor(max_window_size=MAX_WINDOW_BYTES)
    frame = decompressor.decompressobj()
    begun = False
    try:
        for chunk in _chunks(file, _ZSTD_CHUNK):
            rest = chunk
            while rest:
                begun = True
                yield frame.decompress(rest)
                rest = b""
                if frame.eof:
                    rest, frame, begun = frame.unused_data, decompressor.decompressobj(), False
    except zstandard.ZstdError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if begun:
        raise ValueError(f"{path} is cut off: its last Zstandard frame has no end")
