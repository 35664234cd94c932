"""s3fifo and sieve: what their papers say of short sequences, and the papers' own queues beside them on long ones."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from tests.unit.policy.nodes import execute, make_node

from sglang_evicpress.core import Tier
from sglang_evicpress.policy import Planner, make_planner
from sglang_evicpress.policy.cost_model import CostSnapshot, PrefillCost, TransferCost
from sglang_evicpress.policy.menu import Menu
from sglang_evicpress.policy.rules.s3fifo import S3FifoPolicy

MENU = Menu((), (Tier.GPU, Tier.HOST))
COSTS = CostSnapshot(PrefillCost(0.0, 1.0, 0.0), {Tier.HOST: TransferCost(0.0, 1e9)}, {})
SIZE = 100


class Sequence:
    """A planner with a clock: a node that comes or is used does so one tick later than the one before."""

    def __init__(self, name: str) -> None:
        self.planner: Planner = make_planner(name, MENU, alpha=1.0, costs=COSTS)
        self.tick = 0

    def come(self, *node_ids: int, hits: int = 1, parent: int | None = None, tokens: int = SIZE) -> None:
        for node_id in node_ids:
            self.tick += 1
            depth = 0 if parent is None else SIZE
            self.planner.add(
                make_node(node_id, parent, menu=MENU, tokens=tokens, depth=depth, hits=hits, last_use=self.tick)
            )

    def use(self, *node_ids: int) -> None:
        for node_id in node_ids:
            self.tick += 1
            candidate = self.planner.index.candidates[node_id]
            if candidate.tier == Tier.GPU:
                self.planner.touch(node_id, 1.0, candidate.num_hits + 1, self.tick)
            else:
                self.planner.add(make_node(node_id, menu=MENU, hits=candidate.num_hits + 1, last_use=self.tick))

    def look_at(self, node_id: int) -> None:
        """A match that is no hit, as each round of a scheduler makes for a request that waits."""
        self.tick += 1
        candidate = self.planner.index.candidates[node_id]
        self.planner.touch(node_id, candidate.weight, candidate.num_hits, self.tick)

    def victims(self) -> list[int]:
        """All nodes of the GPU, in the order in which they would leave it for good."""
        plan = self.planner.plan(Tier.GPU, 10**9, {})
        return [decision.node_id for decision in plan if decision.source.tier == Tier.GPU]

    def evict(self, num_bytes: int = 1, room: int = 0) -> list[int]:
        plan = self.planner.plan(Tier.GPU, num_bytes, {Tier.HOST: room})
        execute(self.planner, plan)
        return [decision.node_id for decision in plan]


# sieve


def test_sieve_without_uses_is_first_in_first_out() -> None:
    sequence = Sequence("sieve")
    sequence.come(3, 1, 2)
    assert sequence.victims() == [3, 1, 2]


def test_sieve_spares_a_used_node_once_and_where_it_stands() -> None:
    sequence = Sequence("sieve")
    sequence.come(1, 2, 3)
    sequence.use(1)
    assert sequence.victims() == [2, 3, 1]
    assert sequence.evict() == [2]  # the hand has passed 1, whose mark is gone, and stands before 3
    sequence.come(4)
    assert sequence.evict() == [3]
    assert sequence.evict() == [4]  # still ahead of the hand, 1 behind it
    assert sequence.evict() == [1]


def test_sieve_counts_uses_of_one_lap_as_one() -> None:
    sequence = Sequence("sieve")
    sequence.come(1, 2)
    sequence.use(1, 1, 1, 2)
    assert sequence.victims() == [1, 2]


def test_sieve_marks_a_node_that_the_hand_has_passed_for_the_next_lap() -> None:
    sequence = Sequence("sieve")
    sequence.come(1, 2, 3)
    sequence.use(1)
    assert sequence.evict() == [2]
    sequence.use(1)  # passed already: spared in the next lap, so that it outlasts what comes now
    sequence.come(4)
    assert sequence.evict(3 * SIZE) == [3, 4, 1]
    sequence.come(5)
    assert sequence.evict() == [5]


def test_sieve_takes_no_match_for_a_use() -> None:
    sequence = Sequence("sieve")
    sequence.come(1, 2)
    sequence.look_at(1)
    assert sequence.victims() == [1, 2]


def test_sieve_has_a_queue_on_each_tier() -> None:
    sequence = Sequence("sieve")
    sequence.come(1, 2)
    sequence.use(1)
    assert sequence.evict(2 * SIZE, room=1000) == [2, 1]
    plan = sequence.planner.plan(Tier.HOST, 10**9)
    assert [decision.node_id for decision in plan] == [2, 1]  # both came at once: by last use
    sequence.use(2)
    sequence.come(3)
    assert sequence.victims() == [2, 3]  # it came back before 3 came


def test_sieve_starts_again_behind_the_newest_node() -> None:
    """Else nodes that come one by one would be taken one by one, and what was ever used would stay for ever."""
    sequence = Sequence("sieve")
    sequence.come(1, 2)
    sequence.use(1, 2)
    sequence.come(3)
    assert sequence.evict() == [3]
    sequence.come(4)
    assert sequence.evict() == [1]
    sequence.come(5)
    assert sequence.evict(3 * SIZE) == [2, 4, 5]


# s3fifo


def test_one_hit_wonders_leave_first() -> None:
    sequence = Sequence("s3fifo")
    sequence.come(1, 2)
    sequence.use(1, 1, 2, 2)
    sequence.come(3, 4, 5)
    assert sequence.victims() == [3, 4, 5, 1, 2]


def test_a_second_use_brings_a_node_into_the_main_queue() -> None:
    sequence = Sequence("s3fifo")
    sequence.come(1, 2, 3)
    sequence.use(1)
    assert sequence.victims() == [1, 2, 3]  # once is not enough
    sequence.use(1)
    assert sequence.victims() == [2, 3, 1]


def test_the_main_queue_spares_a_used_node_once_for_each_use() -> None:
    sequence = Sequence("s3fifo")
    sequence.come(1, 2, 3, hits=3)
    sequence.use(1)
    assert sequence.evict() == [2]
    assert sequence.evict() == [3]
    assert sequence.evict() == [1]


def test_at_most_three_uses_count() -> None:
    sequence = Sequence("s3fifo")
    sequence.come(*range(10), hits=3)
    assert sequence.evict(5 * SIZE) == [0, 1, 2, 3, 4]  # a lap takes 10 ticks less 4
    sequence.use(*[9] * 50)
    policy = sequence.planner.policy
    assert isinstance(policy, S3FifoPolicy)
    candidates = sequence.planner.index.candidates
    assert policy.key(candidates[9]) - policy.key(candidates[8]) > 40
    ahead = policy.key(candidates[9])
    sequence.use(9)
    assert policy.key(candidates[9]) == ahead + 1  # no further than three laps ahead of the present tick


def test_a_small_queue_with_less_than_its_share_is_left_alone() -> None:
    sequence = Sequence("s3fifo")
    sequence.come(*range(20), hits=3)
    sequence.come(20, 21)
    assert sequence.evict() == [20]  # 21 has less than a tenth now
    assert sequence.evict() == [0]
    assert sequence.evict() == [1]
    sequence.come(*range(22, 26))
    left = [sequence.evict()[0] for _ in range(8)]
    assert set(left) & set(range(21, 26))  # again more than a tenth


def test_a_ghost_that_is_used_joins_the_main_queue() -> None:
    sequence = Sequence("s3fifo")
    sequence.come(1, 2)
    assert sequence.evict(room=1000) == [1]
    sequence.come(3)
    sequence.use(1)
    assert sequence.planner.index.candidates[1].tier == Tier.GPU
    assert sequence.victims() == [2, 3, 1]


def test_what_comes_back_without_a_use_is_no_ghost() -> None:
    sequence = Sequence("s3fifo")
    sequence.come(1, 2)
    assert sequence.evict(room=1000) == [1]
    sequence.come(3)
    sequence.planner.add(make_node(1, menu=MENU, hits=1, last_use=1))
    assert sequence.victims() == [2, 1, 3]  # as new as 3, but not as lately used


def test_s3fifo_takes_no_match_for_a_use() -> None:
    sequence = Sequence("s3fifo")
    sequence.come(1, 2)
    for _ in range(5):
        sequence.look_at(1)
    assert sequence.victims() == [1, 2]


@pytest.mark.parametrize("name", ["s3fifo", "sieve"])
def test_a_parent_stays_until_its_children_have_left(name: str) -> None:
    sequence = Sequence(name)
    sequence.come(1)
    sequence.come(2, 3, parent=1)
    sequence.come(4)
    assert sequence.evict(2 * SIZE) == [2, 3]
    assert sequence.evict() == [1]


@pytest.mark.parametrize("name", ["s3fifo", "sieve"])
def test_planning_moves_nothing(name: str) -> None:
    sequence = Sequence(name)
    sequence.come(1, 2, 3)
    sequence.use(1, 1)
    assert sequence.victims() == sequence.victims() == sequence.victims()


# beside the queues of the papers


def _sieve(requests: list[int], capacity: int) -> list[int]:
    """The victims by the paper's queue and hand."""
    queue: list[int] = []  # the oldest first
    marked: set[int] = set()
    hand, victims = 0, []
    for item in requests:
        if item in queue:
            marked.add(item)
            continue
        if len(queue) == capacity:
            while queue[hand] in marked:
                marked.discard(queue[hand])
                hand = (hand + 1) % len(queue)
            victims.append(queue.pop(hand))
            hand %= len(queue)  # after the newest the oldest, not what comes now
        queue.append(item)
    return victims


@dataclass
class _Counted:
    item: int
    freq: int = 0


def _s3fifo(requests: list[int], capacity: int) -> list[int]:
    """The victims by the paper's algorithm 1, without ghosts."""
    small: list[_Counted] = []
    main: list[_Counted] = []
    known: dict[int, _Counted] = {}
    victims = []

    def lose_from_main() -> bool:
        while main:
            first = main.pop(0)
            if first.freq == 0:
                victims.append(first.item)
                del known[first.item]
                return True
            first.freq -= 1
            main.append(first)
        return False

    def lose_one() -> None:
        while len(known) >= capacity:
            if len(small) < capacity / 10 and lose_from_main():
                return
            first = small.pop(0)
            if first.freq > 1:
                first.freq = 0
                main.append(first)
            else:
                victims.append(first.item)
                del known[first.item]
                return

    for item in requests:
        if item in known:
            known[item].freq = min(known[item].freq + 1, 3)
            continue
        lose_one()
        known[item] = _Counted(item)
        small.append(known[item])
    return victims


def _run(name: str, requests: list[int], capacity: int) -> list[int]:
    sequence, victims = Sequence(name), []
    known: dict[int, int] = {}
    for item in requests:
        if item in known:
            sequence.use(known[item])
            continue
        if len(known) == capacity:
            (victim,) = sequence.evict()
            (gone,) = [other for other, node_id in known.items() if node_id == victim]
            victims.append(gone)
            del known[gone]
        known[item] = sequence.tick + 1
        sequence.come(known[item])
    return victims


def _popular(seed: int, length: int, power: float) -> list[int]:
    """Requests by popularity, a third of them of items that are never asked for again."""
    draw = random.Random(seed)
    items = list(range(300))
    weights = [1.0 / (rank + 1) ** power for rank in items]
    asked = draw.choices(items, weights, k=length)
    return [1000 + index if draw.random() < 0.3 else item for index, item in enumerate(asked)]


@pytest.mark.parametrize("seed", range(5))
def test_sieve_takes_the_victims_of_the_paper(seed: int) -> None:
    requests = _popular(seed, 1500, 0.8)
    assert _run("sieve", requests, 40) == _sieve(requests, 40)


@pytest.mark.parametrize("capacity", [20, 50, 100])
def test_s3fifo_misses_as_often_as_the_paper_s_queues(capacity: int) -> None:
    """While the main queue grows all victims are of the small one, in the same order; lru misses 7 to 12 % more."""
    requests = _popular(1, 4000, 1.0)
    paper, lru = _s3fifo(requests, capacity), _run("lru", requests, capacity)
    assert _run("s3fifo", requests, capacity) == paper
    assert len(lru) > 1.06 * len(paper)


@pytest.mark.parametrize("capacity", [50, 100, 200])
def test_the_small_queue_keeps_its_share_while_popularity_moves_on(capacity: int) -> None:
    """Here the main queue loses nodes as well: offsets choose the queue, so victims are others, about as many."""
    requests = [item + index // 10 * 3 for index, item in enumerate(_popular(1, 6000, 1.0))]
    paper, ours = _s3fifo(requests, capacity), _run("s3fifo", requests, capacity)
    assert len(ours) == pytest.approx(len(paper), rel=0.03)
    median = _shares_of_small(requests, capacity)[len(requests) // 4]
    assert 0.1 <= median <= 0.1 + 1.01 / capacity  # with the node that has just come


def _shares_of_small(requests: list[int], capacity: int) -> list[float]:
    """Shares of the full cache that new nodes had, at the later half of the requests, in order of size."""
    sequence, shares = Sequence("s3fifo"), []
    policy = sequence.planner.policy
    assert isinstance(policy, S3FifoPolicy)
    known: dict[int, int] = {}
    for index, item in enumerate(requests):
        if item in known:
            sequence.use(known[item])
        else:
            if len(known) == capacity:
                (victim,) = sequence.evict()
                known = {other: node_id for other, node_id in known.items() if node_id != victim}
            known[item] = sequence.tick + 1
            sequence.come(known[item])
        if index >= len(requests) // 2:
            shares.append(policy.small_share(Tier.GPU))
    return sorted(shares)
