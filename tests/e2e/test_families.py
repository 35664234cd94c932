"""A few model families on the real server: their answers over compressed and moved KV equal transformers."""

from __future__ import annotations

import pytest
from evicbench.correctness.findings import TOLERANCE
from evicbench.families.run import SEEN, measure
from evicbench.families.table import FAMILIES, REFUSED

pytestmark = [pytest.mark.e2e, pytest.mark.sglang, pytest.mark.slow]

NUM_ANSWERS = 9
CHOSEN = {"granite-fallback": 1}
"""Name and page size: SGLang's fallback to transformers, with an attention scale of its own. The others are run by
``python -m evicbench.families``."""


def test_every_name_is_there_once() -> None:
    names = [each.name for each in (*FAMILIES, *REFUSED)]
    assert len(names) == len(set(names)) > 40


@pytest.mark.parametrize("name", CHOSEN)
def test_answers_of_a_family_equal_transformers(name: str) -> None:
    (family,) = (each for each in FAMILIES if each.name == name)
    outcome = measure(family, CHOSEN[name])
    assert outcome.is_exact, str(outcome)
    assert outcome.num_answers >= NUM_ANSWERS
    assert outcome.worst <= TOLERANCE
    assert outcome.least_control > SEEN
