"""Bytes, seconds and exactness of the codecs, on one core and rows of an 8B model's shape."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from evicbench.report import Line
from sglang_evicpress.codec import NotFiniteError, get_codec
from sglang_evicpress.codec.base import Codec

NAMES = ("lossless", "int8", "int4", "int2")
INTEGERS = NAMES[1:]
CHANNELS = 1024  # 8 KV heads of 128
DECODE_GB_S = {"lossless": 1.0, "int8": 1.0, "int4": 0.7}
MOST_RATIO = 0.33


def speeds(num_slots: int = 4096, repetitions: int = 7) -> Iterator[Line]:
    """Raw bytes per second of one layer, the best of so many times, by one thread."""
    torch.manual_seed(0)
    keys, values = (torch.randn(num_slots, CHANNELS).bfloat16() for _ in "kv")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in NAMES:
            codec = _codec(name)
            stored = _empty(codec, keys)
            encode_s = _best(repetitions, lambda: codec.encode(keys, values, stored))  # noqa: B023
            out = torch.empty_like(keys), torch.empty_like(values)
            decode_s = _best(repetitions, lambda: codec.decode(stored, num_slots, 0, *out))  # noqa: B023
            raw_gb = 2 * keys.nbytes / 1e9
            least = DECODE_GB_S.get(name)
            target = "reported" if least is None else f">= {least:g} and {least / 2:g} GB/s of raw KV per core"
            yield Line(
                f"{name}: decoding and encoding, {num_slots} slots of {CHANNELS} channels, bfloat16",
                target,
                f"{raw_gb / decode_s:.2f} and {raw_gb / encode_s:.2f} GB/s",
                least is None or (raw_gb / decode_s >= least and raw_gb / encode_s >= least / 2),
            )
    finally:
        torch.set_num_threads(threads)


def sizes() -> Iterator[Line]:
    for name in NAMES:
        raw = 2 * 2 * CHANNELS
        ratios = [
            _codec(name).num_bytes(slots, CHANNELS, torch.bfloat16) / (slots * raw) for slots in range(1024, 1088)
        ]
        yield Line(
            f"{name}: stored bytes over raw ones, nodes of 1,024 to 1,087 slots, bfloat16",
            f"<= {MOST_RATIO}" if name == "int4" else "reported",
            f"{min(ratios):.4f} to {max(ratios):.4f}",
            name != "int4" or max(ratios) <= MOST_RATIO,
        )


def exactness() -> Iterator[Line]:
    """Round trips of rows of many kinds: within half a step of their group, and again the same bytes."""
    torch.manual_seed(1)
    kinds: dict[str, Callable[[], torch.Tensor]] = {
        "random": lambda: torch.randn(200, 64),
        "outliers": lambda: torch.randn(200, 64) * torch.where(torch.arange(64) % 16 == 3, 50.0, 1.0),
        "constant": lambda: torch.full((200, 64), 0.3),
        "denormal": lambda: torch.randn(200, 64) * 1e-40,
        "huge": lambda: torch.randn(200, 64).clamp(-3, 3) * 1e38,
    }
    worst, changed, count = 0.0, 0, 0
    for name in INTEGERS:
        levels = (1 << int(name.removeprefix("int"))) - 1
        for make in kinds.values():
            for dtype in (torch.bfloat16, torch.float32):
                keys, values = make().to(dtype), make().to(dtype)
                codec, count = _codec(name), count + 1
                stored = _empty(codec, keys)
                codec.encode(keys, values, stored)
                out = torch.empty_like(keys), torch.empty_like(values)
                codec.decode(stored, len(keys), 0, *out)
                again = _empty(codec, keys)
                codec.encode(*out, again)
                changed += not torch.equal(stored, again)
                groups = keys[:192].double().view(6, 32, 64)
                span = groups.amax(1, keepdim=True) - groups.amin(1, keepdim=True)
                finfo = torch.finfo(dtype)
                rounding = finfo.eps * groups.abs().amax(1, keepdim=True) + finfo.smallest_normal * finfo.eps
                error = (out[0][:192].double().view(6, 32, 64) - groups).abs()
                bound = 0.5 * span / levels + rounding
                worst = max(worst, float((error / bound).max()))
    yield Line(
        f"{count} round trips: error of a key over its bound, half a step of its group and the rounding of the dtype",
        "<= 1",
        f"{worst:.3f}",
        worst <= 1.0,
    )
    yield Line("encoded again after decoding: other bytes", "0", f"{changed} of {count}", not changed)
    bits = 0
    kinds["adversarial"] = lambda: (
        2.0 ** -torch.randint(0, 14, (200, 64)) * torch.where(torch.rand(200, 64) < 0.02, 1e-20, 1.0)
    )
    lossless = _codec("lossless")
    for make in kinds.values():
        pair = make().bfloat16(), make().bfloat16()
        stored, out = _empty(lossless, pair[0]), (torch.empty_like(pair[0]), torch.empty_like(pair[1]))
        lossless.encode(*pair, stored)
        lossless.decode(stored, 200, 0, *out)
        bits += any(
            not torch.equal(one.view(torch.int16), two.view(torch.int16)) for one, two in zip(pair, out, strict=True)
        )
    yield Line("lossless: round trips in which any bit changes", "0", f"{bits} of {len(kinds)}", not bits)
    refused = 0
    for name in NAMES:
        rows = torch.zeros(100, 64).bfloat16()
        rows[50, 3] = torch.nan
        try:
            _codec(name).encode(rows, torch.zeros_like(rows), _empty(_codec(name), rows))
        except NotFiniteError:
            refused += 1
    yield Line("rows with NaN are refused", f"{len(NAMES)} of {len(NAMES)}", f"{refused}", refused == len(NAMES))


def _codec(name: str) -> Codec:
    codec = get_codec(name)
    assert codec is not None
    return codec


def _empty(codec: Codec, rows: torch.Tensor) -> torch.Tensor:
    return torch.empty(codec.num_bytes(len(rows), rows.shape[1], rows.dtype), dtype=torch.uint8)


def _best(repetitions: int, work: Callable[[], None]) -> float:
    times = []
    for _ in range(repetitions):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return min(times)
