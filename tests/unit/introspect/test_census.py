from __future__ import annotations

import random

from sglang_evicpress.core import EXACT, Form, Tier
from sglang_evicpress.introspect.census import Census, Counted

FORMS = (EXACT, Form("keydiff", 0.5), Form("knorm", 0.25))


def test_totals_are_those_of_the_nodes_after_any_changes() -> None:
    rng, census, nodes = random.Random(7), Census(), dict[int, Counted]()
    for step in range(2_000):
        node_id = rng.randrange(60)
        if rng.random() < 0.3:
            census.remove(node_id)
            nodes.pop(node_id, None)
        else:
            held = [(tier, rng.choice(FORMS), rng.randrange(100)) for tier in Tier if rng.random() < 0.5]
            form, num_tokens, num_slots = rng.choice(FORMS), rng.randrange(1, 100), rng.randrange(100)
            nodes[node_id] = Counted(form, num_tokens, num_slots, rng.random() < 0.2, tuple(held))
            census.put(node_id, nodes[node_id])
        if step % 50:
            continue
        assert census.num_nodes == len(nodes)
        assert census.num_tokens == sum(node.num_tokens for node in nodes.values())
        assert census.num_slots == sum(node.num_slots for node in nodes.values())
        assert census.num_shadow_slots == sum(node.num_slots for node in nodes.values() if node.is_shadow)
        assert census.by_form() == {
            str(form): {
                "nodes": len(found),
                "tokens": sum(node.num_tokens for node in found),
                "slots": sum(node.num_slots for node in found),
            }
            for form in FORMS
            if (found := [node for node in nodes.values() if node.form == form])
        }
        for tier in Tier:
            copies = [(node, copy) for node in nodes.values() for copy in node.held if copy[0] == tier]
            assert census.held_on(tier) == {
                form: (len(held), sum(node.num_tokens for node, _ in held), sum(copy[2] for _, copy in held))
                for form in FORMS
                if (held := [(node, copy) for node, copy in copies if copy[1] == form])
            }


def test_a_difference_names_the_node() -> None:
    census = Census()
    census.put(3, Counted(EXACT, 64, 64, False))
    assert list(census.differences(3, Counted(EXACT, 64, 64, False))) == []
    (said,) = census.differences(3, Counted(EXACT, 64, 0, False))
    assert said.startswith("node 3: the census has ")
