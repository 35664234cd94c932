"""Splitting a copy: each part has its own slots of the entry, and no slot is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.device import HostCopy
from sglang_evicpress.survivors import SurvivorLayout
from sglang_evicpress.tiers.entry.copies import Copy

FORM = Form("knorm", 0.5)


def full(num_tokens: int, begin: int = 0, *, is_lossy_prefix: bool = False) -> Copy:
    return Copy(Tier.HOST, EXACT, object(), begin, num_tokens, None, is_lossy_prefix, None)


def compressed(logical: list[int], begin: int = 0) -> Copy:
    """A copy whose slots are shown at these tokens; every head holds just these positions."""
    positions = torch.tensor(logical, dtype=torch.int32).expand(2, 3, -1).contiguous()
    layout = SurvivorLayout(HostCopy(positions), HostCopy(torch.tensor(logical, dtype=torch.int64)), len(logical))
    return Copy(Tier.SSD, FORM, object(), begin, len(logical), layout, False, 7)


@given(st.integers(2, 500), st.integers(0, 1000), st.data())
def test_a_full_copy_is_cut_where_its_tokens_are(num_tokens: int, begin: int, data: st.DataObject) -> None:
    copy = full(num_tokens, begin, is_lossy_prefix=True)
    cut = data.draw(st.integers(1, num_tokens - 1))
    left, right = copy.split(cut)
    assert (left.begin, left.num_slots, right.begin, right.num_slots) == (begin, cut, begin + cut, num_tokens - cut)
    for part in (left, right):
        assert part.entry is copy.entry and part.layout is None and part.is_lossy_prefix
        assert (part.tier, part.form, part.origin) == (copy.tier, copy.form, copy.origin)


@given(st.sets(st.integers(0, 299), max_size=60), st.integers(0, 1000), st.integers(1, 299))
def test_a_compressed_copy_is_cut_where_its_survivors_are(kept: set[int], begin: int, cut: int) -> None:
    logical = sorted(kept)
    copy = compressed(logical, begin)
    left, right = copy.split(cut)
    above, below = [at for at in logical if at < cut], [at - cut for at in logical if at >= cut]
    assert left.layout.logical.tolist() == above and right.layout.logical.tolist() == below
    assert (left.begin, left.num_slots) == (begin, len(above))
    assert (right.begin, right.num_slots) == (begin + len(above), len(below))
    for part, positions in ((left, logical[: len(above)]), (right, logical[len(above) :])):
        assert part.layout.num_slots == part.num_slots
        assert part.layout.positions.tolist() == [[positions] * 3] * 2
        assert part.entry is copy.entry and (part.tier, part.form, part.origin) == (Tier.SSD, FORM, 7)


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.randoms())
def test_pieces_of_pieces_cover_the_entry_once(sizes: list[int], rng: object) -> None:
    """In whatever order a node is cut up."""
    pieces = [(full(sum(sizes)), sizes)]
    while any(len(parts) > 1 for _, parts in pieces):
        index = rng.choice([index for index, (_, parts) in enumerate(pieces) if len(parts) > 1])
        copy, parts = pieces[index]
        at = rng.randrange(1, len(parts))
        left, right = copy.split(sum(parts[:at]))
        pieces[index : index + 1] = [(left, parts[:at]), (right, parts[at:])]
    begin = 0
    for (copy, _), size in zip(pieces, sizes, strict=True):
        assert (copy.begin, copy.num_slots) == (begin, size)
        begin += size


@pytest.mark.parametrize(
    ("copy", "is_exact"), [(full(3), True), (full(3, is_lossy_prefix=True), False), (compressed([0, 2]), False)]
)
def test_only_a_full_copy_of_an_exact_prefix_is_exact(copy: Copy, is_exact: bool) -> None:
    assert copy.is_exact is is_exact
