"""Budgets of a menu for one model: shares of its layers, rounded to few counts, and the groups that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sglang_evicpress.core import PYRAMID, Form
from sglang_evicpress.policy.layer_counts import NO_BUDGETS, LayerGroups
from sglang_evicpress.search.layer_budgets import complete, pyramid, round_counts

SCALE = 10_000
"""Shares are whole numbers with this mean: no node is so long that a finer share would keep another token."""


def layer_groups(
    forms: Sequence[Form], shares: Mapping[str, Sequence[float]], num_layers: int, most_counts: int
) -> LayerGroups:
    """The groups of layers of a model for a menu of ``forms``, at most ``most_counts``. ``shares``: those of budgets
    from files, by name, one number a layer.

    Raises ValueError for a budget that is not known or is of another number of layers, and for budgets that would make
    more groups together.
    """
    uneven = [form for form in forms if form.is_uneven]
    if not uneven:
        return NO_BUDGETS
    by_name: dict[str, tuple[int, ...]] = {}
    for form in uneven:
        if form.budget not in by_name:
            by_name[form.budget] = round_counts(_shares(form, shares, num_layers), most_counts)
    columns = list(zip(*by_name.values(), strict=True))
    groups = sorted(set(columns), key=columns.index)
    if len(groups) > most_counts:
        names = ", ".join(dict.fromkeys(str(form) for form in uneven))
        raise ValueError(
            f"forms {names} give layers {len(groups)} different sets of counts: expected at most {most_counts}, so "
            "choose forms with the same layer budget"
        )
    by_group = {name: tuple(column[index] for column in groups) for index, name in enumerate(by_name)}
    return LayerGroups(tuple(groups.index(column) for column in columns), by_group)


def _shares(form: Form, shares: Mapping[str, Sequence[float]], num_layers: int) -> Sequence[int]:
    if form.budget == PYRAMID:
        return pyramid(num_layers, SCALE)
    known = shares.get(form.budget)
    if known is None:
        raise ValueError(
            f"form {form} has the unknown budget {form.budget!r}: expected {', '.join((PYRAMID, *shares))}"
        )
    if len(known) != num_layers:
        raise ValueError(
            f"form {form} has a budget for {len(known)} layers, and the model has {num_layers}: expected a budget that "
            "was found for this model"
        )
    return complete([round(share * SCALE) for share in known], SCALE)
