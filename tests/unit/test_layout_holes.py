"""The M layout: whatever part of a compressed node is taken, no head shows a token that lies behind it."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.device import HostCopy
from sglang_evicpress.survivors import SurvivorLayout, place


@st.composite
def compressed_nodes(draw: Any, page_size: int = 1) -> tuple[torch.Tensor, int, int]:
    """Survivors' positions [layers, heads, m], the node's start and its number of tokens (whole pages)."""
    num_pages = draw(st.integers(1, 60 // page_size + 2))
    num_tokens = num_pages * page_size
    kept = draw(st.integers(0, num_pages)) * page_size
    start = draw(st.integers(0, 3)) * 7 * page_size
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), num_tokens)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    noise = torch.rand(shape, generator=generator)
    if draw(st.booleans()):  # heads that keep mostly first or mostly last tokens are the hard case
        noise += torch.linspace(0, 1, num_tokens) * torch.randint(-3, 4, (*shape[:2], 1), generator=generator)
    positions = noise.topk(kept).indices.sort().values + start
    return positions.to(torch.int32), start, num_tokens


def layout_of(positions: torch.Tensor, start: int, page_size: int) -> SurvivorLayout:
    return SurvivorLayout(HostCopy(positions), HostCopy(place(positions, start, page_size)), positions.shape[-1])


def shown_late(positions: torch.Tensor, logical: torch.Tensor, start: int, num_tokens: int) -> int:
    """Entries that whoever takes the first ``num_tokens`` tokens sees although they lie behind them."""
    return int((positions[..., logical < num_tokens] - start >= num_tokens).sum())


@given(compressed_nodes())
def test_logical_indices_ascend_strictly_within_the_node(node: tuple[torch.Tensor, int, int]) -> None:
    positions, start, num_tokens = node
    logical = place(positions, start, 1)
    assert logical.dtype == torch.int64 and logical.shape == positions.shape[2:]
    assert (logical[1:] > logical[:-1]).all()
    assert ((logical >= 0) & (logical < num_tokens)).all()


@given(compressed_nodes())
def test_every_cut_takes_only_what_lies_before_it_in_every_layer_and_head(node: tuple[torch.Tensor, int, int]) -> None:
    positions, start, num_tokens = node
    layout = layout_of(positions, start, 1)
    for cut in range(num_tokens + 1):
        taken = positions[..., : layout.slots_before(cut)]
        assert (taken < start + cut).all()
    assert layout.slots_before(num_tokens) == layout.num_slots


@given(compressed_nodes())
def test_no_causal_layout_shows_a_slot_earlier(node: tuple[torch.Tensor, int, int]) -> None:
    """M is the least such layout: one index earlier, some head's survivor would be shown too soon."""
    positions, start, _ = node
    logical = place(positions, start, 1)
    for slot, index in enumerate(logical.tolist()):
        assert (positions[..., slot] - start == index).any()


@given(compressed_nodes(), st.data())
def test_split_is_what_was_before_the_cut_and_the_rest(node: tuple[torch.Tensor, int, int], data: Any) -> None:
    positions, start, num_tokens = node
    layout = layout_of(positions, start, 1)
    cut = data.draw(st.integers(0, num_tokens))
    above, below = layout.split(cut)
    assert above.num_slots == layout.slots_before(cut)
    assert above.num_slots + below.num_slots == layout.num_slots
    assert torch.equal(torch.cat([above.positions, below.positions], dim=2), layout.positions)
    assert torch.equal(torch.cat([above.logical, below.logical + cut]), layout.logical)
    assert ((below.logical >= 0) & (below.logical < num_tokens - cut)).all()


@given(compressed_nodes(), st.data())
def test_splitting_twice_is_splitting_at_both_cuts(node: tuple[torch.Tensor, int, int], data: Any) -> None:
    positions, start, num_tokens = node
    layout = layout_of(positions, start, 1)
    first = data.draw(st.integers(0, num_tokens))
    second = data.draw(st.integers(first, num_tokens))
    _, rest = layout.split(first)
    middle, _ = rest.split(second - first)
    assert middle.num_slots == layout.slots_before(second) - layout.slots_before(first)
    assert layout.split(second)[0].slots_before(first) == layout.slots_before(first)


@given(compressed_nodes(page_size=16))
def test_pages_stay_whole_and_show_nothing_late(node: tuple[torch.Tensor, int, int]) -> None:
    positions, start, num_tokens = node
    logical = place(positions, start, 16)
    pages = logical.view(-1, 16)
    assert (pages[:, 0] % 16 == 0).all() and (pages == pages[:, :1] + torch.arange(16)).all()
    assert (pages[1:, 0] > pages[:-1, 0]).all()
    assert ((logical >= 0) & (logical < num_tokens)).all()
    last = positions.amax(dim=(0, 1)).view(-1, 16)[:, -1] - start
    assert (last < (pages[:, 0] // 16 + 1) * 16).all()
    layout = layout_of(positions, start, 16)
    for cut in range(0, num_tokens + 1, 16):
        assert layout.slots_before(cut) % 16 == 0
        assert (positions[..., : layout.slots_before(cut)] < start + cut).all()


@given(compressed_nodes(page_size=16), st.data())
def test_pages_split_at_page_ends(node: tuple[torch.Tensor, int, int], data: Any) -> None:
    positions, start, num_tokens = node
    layout = layout_of(positions, start, 16)
    cut = data.draw(st.integers(0, num_tokens // 16)) * 16
    above, below = layout.split(cut)
    assert above.num_slots % 16 == 0 and above.num_slots == layout.slots_before(cut)
    assert torch.equal(torch.cat([above.logical, below.logical + cut]), layout.logical)


def test_left_justified_survivors_would_show_the_future() -> None:
    """Control: at the first indices of the node, requests get slots whose tokens they do not have."""
    generator = torch.Generator().manual_seed(7)
    positions = torch.rand((2, 2, 300), generator=generator).topk(90).indices.sort().values.to(torch.int32)
    naive = torch.arange(90)
    late = [shown_late(positions, naive, 0, cut) for cut in range(1, 300)]
    assert max(late) > 100 and sum(count > 0 for count in late) > 200
    exact = place(positions, 0, 1)
    assert [shown_late(positions, exact, 0, cut) for cut in range(1, 300)] == [0] * 299
