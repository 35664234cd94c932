"""Reading published entries of a folder: their headers, whole payloads and single extents, each of them checked."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from sglang_evicpress.tiers.entry.encoding import decode
from sglang_evicpress.tiers.entry.header import BadEntry, Header, check_extent
from sglang_evicpress.tiers.entry.key import Key
from sglang_evicpress.tiers.ssd.deadline import Pulse
from sglang_evicpress.tiers.ssd.index import Place, Ref
from sglang_evicpress.tiers.ssd.segments import SegmentFiles, check_arriving, seal_of


class Reader:
    """Reads what one store has published. Every call raises OSError or BadEntry where it finds anything else.

    With ``key`` an entry's record is sealed, and so is what it says of its extents: their digests and seals. A record
    that was not read from the disk may lack the seals: then that is read as well.
    """

    def __init__(self, disk: SegmentFiles, pulse: Pulse, fingerprint: bytes, key: Key | None) -> None:
        self._disk, self._pulse = disk, pulse
        self._fingerprint, self._key = fingerprint, key

    def header(self, ref: Ref, place: Place) -> Header:
        """Header of the entry."""
        with self._pulse.beat():
            record = self._disk.read_record(ref.segment, place.record_offset, place.record_bytes)
        header, _ = decode(record, key=self._key)
        if header.fingerprint != self._fingerprint:
            raise BadEntry("fingerprint", "it is of another model or layout")
        if (header.payload_offset, header.payload_bytes) != (place.payload_offset, place.payload_bytes):
            raise BadEntry("identity", "its record is that of another entry")
        return header

    def payload(self, ref: Ref, place: Place, header: Header, chunks: Sequence[memoryview]) -> None:
        """Fill the chunks with all of it, and check every extent."""
        header = self._sealed(ref, place, header)
        with (
            self._pulse.transfer(ref.num_bytes),
            closing(self._disk.read_payload(ref.segment, place.payload_offset, chunks)) as arriving,
        ):
            check_arriving(header, arriving, self._key)

    def extent(self, ref: Ref, place: Place, header: Header, number: int) -> memoryview:
        """The bytes of one extent; of the others nothing is read or checked."""
        header = self._sealed(ref, place, header)
        extent = header.extents[number]
        with self._pulse.transfer(extent.num_bytes):
            data = self._disk.read_part(ref.segment, place.payload_offset + extent.offset, extent.num_bytes)
        check_extent(extent, [data], seal_of(header, number, self._key))
        return data

    def _sealed(self, ref: Ref, place: Place, header: Header) -> Header:
        if self._key is None or header.seals:
            return header
        return replace(header, seals=self.header(ref, place).seals)
