"""An idle cache comes to rest: on full tiers nothing is decided, copied or read again and again."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.contract.tiers.machine_walk import MachineWalk, Setting
from tests.contract.tiers.stepped import stepped

from sglang_evicpress.patches.attention import req_to_token

pytestmark = pytest.mark.sglang

MOST = 10
"""Of anything in ``WATCHED`` rounds of a cache that has had ``SETTLING`` of them to itself."""

SETTLING, WATCHED = 600, 400


class NewTexts(MachineWalk):
    """Texts that go on where others end, without an end: more than the tiers hold."""

    def some_prompt(self) -> tuple[list[int], str | None]:
        tokens = [self.rng.randrange(60) for _ in range(self.rng.randrange(20, 150))]
        if self.asked and self.rng.randrange(3) == 0:
            tokens = [*self.rng.choice(self.asked)[0], *tokens[:10]][:190]
        self.asked = [*self.asked[-7:], (tokens, None)]
        return tokens, None

    def verify(self, request: object) -> None:
        """Rows are compared elsewhere."""

    def serve_some(self) -> None:
        for number in range(50):
            self.serve_one()
            self.seen.clear()
            if number % 7 == 0:
                self.begin_one()
                self.decode()
                self.finish()
            self.tick()
        self.end_running()
        while self.waiting:
            self.leave()

    def pass_rounds(self, count: int) -> None:
        for _ in range(count):
            if not self.work():
                self.clock.sleep(0.005)
            self.tick()

    def done(self) -> Counter[str]:
        """Decisions, and what was done for the tiers, so far."""
        return Counter(self.tree.storage.counts) + Counter(decisions=self.cache.parts.controller.journal.next_number)


@pytest.fixture
def table() -> Iterator[None]:
    former = req_to_token._table
    with stepped():
        yield
    req_to_token._table = former


@pytest.mark.parametrize(
    ("menu", "page_size", "seed", "takes_writes"),
    [
        ("int8", 1, 0, True),
        ("int8", 1, 1, True),
        ("int8", 1, 2, True),
        ("lossless", 16, 0, True),
        ("uneven", 1, 0, True),
        ("press", 4, 0, True),
        ("int8", 1, 0, False),
        ("exact", 1, 0, False),
    ],
)
def test_nothing_goes_on_where_nobody_asks(
    table: None, tmp_path: Path, menu: str, page_size: int, seed: int, takes_writes: bool
) -> None:
    walk = NewTexts(Setting(menu, page_size, torch.bfloat16), tmp_path, random.Random(seed))
    walk.be_patient()
    if not takes_writes:
        walk.serve_some()
        walk.cache.ssd.wear.allows = lambda now_s: False
    for _ in range(3):
        walk.serve_some()
        walk.pass_rounds(SETTLING)
        before = walk.done()
        walk.pass_rounds(WATCHED)
        again = {what: count for what, count in (walk.done() - before).items() if count > MOST}
        assert not again, f"in {WATCHED} rounds at rest: {again}"
    walk.close()
