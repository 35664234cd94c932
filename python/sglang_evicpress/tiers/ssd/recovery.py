"""Recovery of a segment of an earlier run: its live entries, and the end of the others."""

from __future__ import annotations

from collections import Counter

import numpy as np

from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.ssd.index import MAX_PAYLOAD_OFFSET
from sglang_evicpress.tiers.ssd.os_files import BLOCK_BYTES, reason_of
from sglang_evicpress.tiers.ssd.scan import Head, ScannedRecords, scan
from sglang_evicpress.tiers.ssd.segments import SegmentFiles
from sglang_evicpress.tiers.ssd.space import Segment


def recover(
    disk: SegmentFiles, number: int, fingerprint: bytes, errors: Counter[str], key: Key | None = None
) -> tuple[Segment, ScannedRecords]:
    """The segment with all it holds counted, and the entries that can be served; ``errors`` counts the others.

    What no record says is cut off both files. A segment without any entry is obsolete; one that cannot be read, or
    holds entries of others or of another key, is foreign.
    """
    kv, head = disk.sizes(number)
    segment = Segment(number, is_named=True)
    kv_bytes, allocated = kv or (0, 0)
    if head is None:
        segment.garbage, segment.is_obsolete = allocated, True
        return segment, scan(bytearray()).records
    try:
        scanned = disk.read_head(number, key)
    except OSError as error:
        errors[reason_of(error)] += 1
        segment.garbage, segment.head, segment.is_foreign = allocated, head[0], True
        return segment, scan(bytearray()).records
    records = scanned.records
    ends = records.payload_offsets + records.payload_bytes
    sizes = -(-records.payload_bytes // BLOCK_BYTES) * BLOCK_BYTES
    is_there = ends <= kv_bytes
    is_sound = (records.payload_offsets % BLOCK_BYTES == 0) & (records.payload_offsets < MAX_PAYLOAD_OFFSET)
    is_kept = is_there & is_sound
    is_own = is_kept & records.is_ours & (records.fingerprints == np.array(fingerprint, dtype="S16"))
    # Damage between records by its reason, and what is behind the last one once, as torn if it may be.
    errors.update(reason for offset, reason in scanned.bad if offset < scanned.end)
    if scanned.end < scanned.num_bytes:
        errors["header" if scanned.bad[-1] == (scanned.end, "header") else "length"] += 1
    for reason, mask in (
        ("length" if kv else "missing", ~is_there),
        ("header", is_there & ~is_sound),
        ("key", is_kept & ~records.is_ours),
        ("fingerprint", is_kept & records.is_ours & ~is_own),
    ):
        if count := int(mask.sum()):
            errors[reason] += count
    segment.live = int(sizes[is_kept].sum())
    segment.end = int((records.payload_offsets + sizes)[is_kept].max(initial=0))
    segment.num_live = int(is_own.sum())
    has_other_version = any(reason == "version" for _, reason in scanned.bad)  # kept for who knows it, as is what is
    segment.is_foreign = has_other_version or segment.num_live < is_kept.sum()  # of another model
    segment.is_obsolete = not (is_kept.any() or has_other_version)
    segment.head = _cut(disk, segment, scanned, kv_bytes, errors)
    segment.tombstoned = scanned.end - int(records.record_bytes.sum())
    kv, _ = disk.sizes(number)
    allocated = kv[1] if kv else 0
    if has_other_version:  # whose payloads may be anywhere: all counts as theirs until the whole segment goes
        segment.live += allocated
    segment.garbage = max(0, allocated - segment.live)
    # A damaged tombstone counts holes as live, and can hide as many garbage bytes.
    segment.has_gaps = bool(segment.garbage or scanned.bad) and not segment.is_foreign
    return segment, records.select(is_own)


def _cut(disk: SegmentFiles, segment: Segment, scanned: Head, kv_bytes: int, errors: Counter[str]) -> int:
    """Shorten the files to what is used; the size of the .head file then."""
    try:
        if not segment.is_foreign and segment.end < kv_bytes:
            disk.cut(segment.number, kv_bytes=segment.end)
        if scanned.is_whole and scanned.end < scanned.num_bytes:
            disk.cut(segment.number, head_bytes=scanned.end)
            return scanned.end
    except OSError as error:
        errors[reason_of(error)] += 1
    return scanned.num_bytes
