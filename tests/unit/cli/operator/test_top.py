"""Lines of ``evicpress top``: totals at first, then rates."""

from __future__ import annotations

from typing import Any

from sglang_evicpress.cli.operator.top import Sample, lines, look


def sample(at_s: float, requests: int, new: int, demoted: int) -> Sample:
    quality = {"target": 0.97, "predicted": 0.98, "measured": 0.975}
    stats = {
        **{"policy": "evicpress", "alpha": 12.5, "quality": quality, "num_nodes": 3, "cached_tokens": 900},
        **{"total_slots": 1000, "free_slots": 400, "protected_slots": 10, "cached_slots": 590},
        "queue": {"expected_wait_s": 0.5, "refused": 2},
        "waiting": {"requests": 4},
        "threads": [{"name": "evicpress-read-0", "state": "running"}, {"name": "evicpress-copy-0", "state": "dead"}],
        "admission": {
            "requests": requests,
            "prompt_tokens": 100 * requests,
            "computed_tokens": {"new": new, "too_lossy": 0},
        },
        "decisions": {"compressed": {"keydiff@0.5": 3}, "demoted": {"host": demoted}, "dropped": 0},
    }
    gpu = {"used_bytes": 6e6, "capacity_bytes": 1e7, "num_nodes": 3, "forms": {"exact": {"bytes": 6_000_000}}}
    entry = {"time_s": 1.5, "node_id": 7, "from": "exact/gpu", "to": "exact/host", "reason": "loses little"}
    return Sample(at_s, stats, {"tiers": {"gpu": gpu}}, {"num_decisions": 5, "last": 5, "entries": [entry]})


def test_a_policy_that_weighs_no_quality_has_no_alpha() -> None:
    look = sample(0.0, 10, 400, 7)
    look.stats.update(policy="lru", alpha=None, quality=dict.fromkeys(("target", "predicted", "measured")))
    assert "policy lru: weighs no quality" in lines(look)


def test_the_first_look_has_totals() -> None:
    text = "\n".join(lines(sample(0.0, 10, 400, 7)))
    assert "policy evicpress: quality 0.975 of 0.97 (predicted 0.980), alpha 12.5" in text
    assert "pool: 600 of 1000 slots in use, 10 by requests; 3 nodes, 900 tokens cached in 590 slots" in text
    assert "queue: 4 wait, about 0.5 s; 2 refused" in text
    assert "threads that do not run: evicpress-copy-0" in text
    assert "requests 10, 60.0 % of prompt tokens from the cache" in text
    assert "moves: to keydiff@0.5 3, to host 7" in text
    assert "1.5 s  node 7: exact/gpu -> exact/host, loses little" in text
    assert "gpu   6.00 MB  10.0 MB  60.0 %" in text


def test_later_ones_have_rates_since_the_one_before() -> None:
    text = "\n".join(lines(sample(2.0, 14, 500, 9), sample(0.0, 10, 400, 7)))
    assert "requests 2.0/s, 75.0 % of prompt tokens from the cache" in text
    assert "moves: to keydiff@0.5 0.0/s, to host 1.0/s" in text


class Asked:
    """A server that notes what it is asked."""

    def __init__(self) -> None:
        self.paths: list[str] = []

    def get(self, path: str) -> dict[str, Any]:
        self.paths.append(path)
        return {"num_decisions": 100, "last": 97, "entries": []}


def test_decisions_are_read_from_the_last_look_on() -> None:
    server: Any = Asked()
    look(server)
    assert server.paths[-1] == "journal?since=92&limit=1000"
    before = look(server, sample(0.0, 10, 400, 7), shows_all=True)
    assert server.paths[-1] == "journal?since=5&limit=1000"
    look(server, before, shows_all=True)  # 98 to 100 are not shown yet
    assert server.paths[-1] == "journal?since=97&limit=1000"


def test_the_screen_has_the_last_decisions_and_another_server_is_begun_anew() -> None:
    server: Any = Asked()
    look(server, sample(0.0, 10, 400, 7))
    assert server.paths[-1] == "journal?since=92&limit=1000"
    before = sample(0.0, 10, 400, 7)
    before.journal["last"] = 5000
    look(server, before, shows_all=True)
    assert server.paths[-1] == "journal?since=92&limit=1000"
