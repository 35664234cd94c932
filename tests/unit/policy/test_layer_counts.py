"""Tokens kept by layer: near their shares, within bounds, with the sum of a uniform form."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from sglang_evicpress.core import Form, Tier
from sglang_evicpress.policy.layer_counts import NO_BUDGETS, LayerGroups
from sglang_evicpress.policy.menu import Menu

PYRAMID = LayerGroups((0, 1, 2, 3), {"pyramid": (19500, 13167, 6833, 500)})
PAIRS = LayerGroups((0, 1, 1, 0), {"found": (4, 16)})


def menu(form: str, groups: LayerGroups, page_size: int = 1) -> Menu:
    return Menu((Form.parse_stored(form),), (Tier.GPU, Tier.HOST), 400, page_size, groups=groups)


def drawn(seed: int) -> tuple[LayerGroups, int, int, int]:
    """Groups, and the mean, least and most tokens of a layer."""
    rng = random.Random(seed)
    num_groups = rng.randint(1, 4)
    group_of = [*range(num_groups), *(rng.randrange(num_groups) for _ in range(rng.randint(0, 30)))]
    shares = tuple(rng.choice([0, 1, rng.randint(1, 100_000)]) for _ in range(num_groups))
    most = rng.randint(1, 3000)
    return LayerGroups(tuple(group_of), {"b": shares}), rng.randint(1, most), rng.randint(0, min(4, most)), most


def total(groups: LayerGroups, counts: Sequence[int]) -> int:
    return sum(counts[group] for group in groups.group_of)


def test_counts_are_in_proportion_to_the_shares() -> None:
    assert PYRAMID.counts("pyramid", 1000, 1, 10_000) == (1950, 1317, 683, 50)
    assert PAIRS.counts("found", 100, 1, 1000) == (40, 160)


def test_what_one_layer_cannot_keep_goes_to_the_others() -> None:
    assert PAIRS.counts("found", 100, 1, 150) == (50, 150)
    assert PAIRS.counts("found", 100, 100, 1000) == (100, 100)


def test_groups_without_a_share_keep_the_least() -> None:
    groups = LayerGroups((0, 1), {"b": (0, 1)})
    assert groups.counts("b", 10, 4, 100) == (4, 16)


@pytest.mark.parametrize("seed", range(300))
def test_counts_stay_within_their_bounds_and_hold_the_sum(seed: int) -> None:
    groups, mean, least, most = drawn(seed)
    counts = groups.counts("b", mean, least, most)
    assert all(least <= count <= most for count in counts)
    wanted, kept = mean * len(groups.group_of), total(groups, counts)
    assert kept <= max(wanted, least * len(groups.group_of))
    growing = [size for size, count in zip(groups.sizes, counts, strict=True) if count < most]
    assert not growing or wanted - kept < min(growing)


@pytest.mark.parametrize("seed", range(100))
def test_a_larger_share_never_keeps_less(seed: int) -> None:
    groups, mean, least, most = drawn(seed)
    counts, shares = groups.counts("b", mean, least, most), groups.shares["b"]
    for one, share in enumerate(shares):
        for other, other_share in enumerate(shares):
            assert share <= other_share or counts[one] >= counts[other] - 1  # rounding up may take one more


def test_a_menu_counts_slots_by_the_fullest_layer_and_lower_bytes_by_all() -> None:
    uneven = menu("snapkv@0.4:found", PAIRS)
    form = uneven.forms[1]
    assert uneven.layer_counts(form, 1000) == (160, 640)
    assert uneven.num_slots(form, 1000) == 640
    assert uneven.num_bytes(form, 1000) == 640 * 400
    assert uneven.num_bytes(form, 1000, tier=Tier.HOST) == 400 * 400
    assert uneven.filled(form, 1000) == 0.625
    assert uneven.sizes(1000, 0, Tier.HOST) == (400_000, 160_000)


def test_counts_are_whole_pages() -> None:
    uneven = menu("snapkv@0.4:found", PAIRS, 16)
    assert uneven.layer_counts(uneven.forms[1], 160) == (32, 96)  # 4 pages on average
    assert uneven.layer_counts(uneven.forms[1], 16) == (16, 16)


def test_sinks_are_kept_in_every_layer() -> None:
    uneven = menu("snapkv@0.1:pyramid", PYRAMID)
    assert min(uneven.layer_counts(uneven.forms[1], 100, 4)) == 4


def test_tokens_by_layer_become_counts_by_group_in_whole_pages() -> None:
    uneven = menu("snapkv@0.4:found", PAIRS, 16)
    layers = [4 + 20 * group for group in PAIRS.group_of]
    assert uneven.given_counts(layers, 160, 4) == (16, 32)
    assert uneven.given_counts([160] * len(layers), 160, 4) == (160, 160)
    assert menu("snapkv@0.4:found", PAIRS).given_counts([2] * len(layers), 160, 4) == (4, 4)


@pytest.mark.parametrize(
    ("groups", "layer_tokens", "words"),
    [
        (PAIRS, (0, 24, 24, 0), "layer_tokens has 0: expected from 1 to 160"),
        (PAIRS, (161,) * 4, "layer_tokens has 161: expected from 1 to 160"),
        (PAIRS, (10, 10), "layer_tokens has 2 numbers: expected one for each of 4 layers"),
        (NO_BUDGETS, (10, 20), "layers of this server keep equally many tokens"),
        (LayerGroups((0, 1, 0), {"b": (1, 2)}), (9, 20, 8), "layers 0 and 2 keep equally many tokens .* 9 and 8 are"),
    ],
)
def test_tokens_by_layer_that_a_server_cannot_keep_are_refused(
    groups: LayerGroups, layer_tokens: tuple[int, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Menu((), groups=groups).given_counts(layer_tokens, 160, 4)


def test_a_form_without_a_budget_of_the_menu_is_refused() -> None:
    with pytest.raises(ValueError, match=r"form snapkv@0.4:other has no layer budget: expected one of found"):
        menu("snapkv@0.4:other", PAIRS)
    with pytest.raises(ValueError, match=r"expected one of none"):
        menu("snapkv@0.4:pyramid", NO_BUDGETS)


def test_a_form_of_an_earlier_server_counts_by_its_mean() -> None:
    uneven, other = menu("snapkv@0.4:found", PAIRS), Form("snapkv", 0.4, "int4", "other-0a1b2c3d")
    assert (uneven.num_slots(other, 1000), uneven.filled(other, 1000)) == (400, 1.0)
    assert uneven.num_bytes(other, 1000, tier=Tier.HOST) == 400 * 400 * 5 // 16
    assert uneven.smaller(other) == 0


def test_a_smaller_form_has_the_same_budget() -> None:
    texts = ("snapkv@0.4", "snapkv@0.2", "snapkv@0.4:found", "snapkv@0.2:found", "snapkv@0.2:found+int4")
    forms = tuple(map(Form.parse_stored, texts))
    made = Menu(forms, (Tier.GPU, Tier.HOST), groups=PAIRS)

    def smaller(text: str) -> set[str]:
        mask = made.smaller(Form.parse_stored(text))
        return {str(form) for index, form in enumerate(made.forms) if mask >> index & 1}

    assert smaller("snapkv@0.4:found") == {"snapkv@0.2:found", "snapkv@0.2:found+int4"}
    assert smaller("snapkv@0.4") == {"snapkv@0.2"}
    assert smaller("exact") == {"exact", *texts}
