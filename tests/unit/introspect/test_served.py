from __future__ import annotations

from sglang_evicpress.introspect.served import NUM_RECENT, FirstTokenTimes, ServedTokens


def test_tokens_are_counted_by_tier_and_form() -> None:
    counts = ServedTokens()
    assert counts.describe() == {"tokens": {}, "saved_s": {}}
    for tier, form, num_tokens in (("gpu", "exact", 3), ("ssd", "exact+int8", 5), ("gpu", "exact", 4)):
        counts.add(tier, form, num_tokens, num_tokens / 4)
    assert counts.describe() == {
        "tokens": {"gpu": {"exact": 7}, "ssd": {"exact+int8": 5}},
        "saved_s": {"gpu": 1.75, "ssd": 1.25},
    }


def test_only_recent_first_tokens_are_described() -> None:
    times = FirstTokenTimes()
    assert times.describe() == {"num_seen": 0, "num_recent": 0, "mean_s": None, "p50_s": None, "p95_s": None}
    times.add(1000.0)
    for _ in range(NUM_RECENT):
        times.add(2.0)
    described = times.describe()
    assert described == {
        "num_seen": NUM_RECENT + 1,
        "num_recent": NUM_RECENT,
        "mean_s": 2.0,
        "p50_s": 2.0,
        "p95_s": 2.0,
    }
