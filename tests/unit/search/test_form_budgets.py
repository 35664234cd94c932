"""Budgets in the texts of forms, and the groups of layers that they make."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_evicpress.core import Form
from sglang_evicpress.policy.layer_counts import NO_BUDGETS
from sglang_evicpress.search.budget_file import BudgetFile, write_budget_file
from sglang_evicpress.search.form_budgets import budget_name, name_budgets
from sglang_evicpress.search.menu_budgets import layer_groups

FOUND = BudgetFile.of([30, 10, 20, 20], 20)


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "found 1+2.json")
    write_budget_file(path, FOUND)
    return path


def forms_of(texts: list[str]) -> list[Form]:
    return [Form.parse_stored(text) for text in texts]


def test_a_path_becomes_the_name_of_its_budget(path: str) -> None:
    name = budget_name(path, FOUND)
    texts, shares = name_budgets([f"snapkv@0.3:{path}", f"knorm@0.5:{path}+int4", "exact+int8"], None)
    assert texts == [f"snapkv@0.3:{name}", f"knorm@0.5:{name}+int4", "exact+int8"]
    assert shares == {name: FOUND.shares}
    assert name.startswith("found_1_2-")
    assert forms_of(texts)[1] == Form("knorm", 0.5, "int4", name)


def test_other_shares_have_another_name(path: str) -> None:
    assert budget_name(path, FOUND) != budget_name(path, BudgetFile.of([31, 9, 20, 20], 20))
    assert budget_name(path, FOUND) == budget_name(path, BudgetFile.of([60, 20, 40, 40], 40, {"seed": 3}))


def test_uniform_and_pyramid_need_no_file() -> None:
    texts, shares = name_budgets(["snapkv@0.3:uniform+int4", "snapkv@0.3:pyramid", "knorm@0.5"], None)
    assert texts == ["snapkv@0.3+int4", "snapkv@0.3:pyramid", "knorm@0.5"]
    assert shares == {}


def test_a_default_file_is_for_forms_with_a_press_and_no_budget(path: str) -> None:
    name = budget_name(path, FOUND)
    texts, shares = name_budgets(["snapkv@0.3+int4", "snapkv@0.3:uniform", "exact+int8", "knorm@0.2:pyramid"], path)
    assert texts == [f"snapkv@0.3:{name}+int4", "snapkv@0.3", "exact+int8", "knorm@0.2:pyramid"]
    assert list(shares) == [name]


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("none.json", "layer budget file 'none.json' does not exist: expected a file that .*; or uniform or pyramid"),
        ("pyramids", "form 'snapkv@0.3:pyramids': .*; or uniform or pyramid"),
        ("", "form 'snapkv@0.3:': there is no budget behind ':'; or uniform or pyramid"),
    ],
)
def test_a_budget_that_is_not_there_is_named(budget: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        name_budgets([f"snapkv@0.3:{budget}"], None)


def test_a_codec_that_is_none_is_the_forms_to_refuse() -> None:
    assert name_budgets(["snapkv@0.3:pyramid+int9"], None)[0] == ["snapkv@0.3:pyramid+int9"]
    with pytest.raises(ValueError, match="int9"):
        Form.parse_stored("snapkv@0.3:pyramid+int9")


def test_layers_with_equal_shares_are_a_group() -> None:
    groups = layer_groups([Form("snapkv", 0.3, budget="b")], {"b": FOUND.shares}, 4, 4)
    assert groups.group_of == (0, 1, 2, 2)
    assert groups.shares["b"] == (15_000, 5_000, 10_000)


def test_shares_are_rounded_to_few_counts_with_their_sum() -> None:
    groups = layer_groups([Form("snapkv", 0.3, budget="pyramid")], {}, 32, 4)
    assert groups.num_groups == 4
    by_layer = [groups.shares["pyramid"][group] for group in groups.group_of]
    assert by_layer == sorted(by_layer, reverse=True)
    assert 0.999 * 32 * 10_000 < sum(by_layer) <= 32 * 10_001


def test_a_menu_without_budgets_has_one_group() -> None:
    assert layer_groups([Form("snapkv", 0.3), Form(codec="int4")], {}, 32, 4) is NO_BUDGETS


def test_two_budgets_share_the_groups() -> None:
    shares = {"a": (2.0, 2.0, 0.0, 0.0), "b": (1.5, 0.5, 1.5, 0.5)}
    forms = [Form("snapkv", 0.3, budget="a"), Form("snapkv", 0.3, budget="b")]
    assert layer_groups(forms, shares, 4, 4).num_groups == 4
    with pytest.raises(ValueError, match=r"forms snapkv@0.3:a, snapkv@0.3:b give layers 4 .* expected at most 2"):
        layer_groups(forms, shares, 4, 2)


def test_a_budget_of_another_model_is_refused() -> None:
    with pytest.raises(ValueError, match="has a budget for 4 layers, and the model has 28"):
        layer_groups([Form("snapkv", 0.3, budget="b")], {"b": FOUND.shares}, 28, 4)
    with pytest.raises(ValueError, match="unknown budget 'c': expected pyramid, b"):
        layer_groups([Form("snapkv", 0.3, budget="c")], {"b": FOUND.shares}, 4, 4)
