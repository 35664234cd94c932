"""Choice of the next context to measure, and detection of drift."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_evicpress.quality.drift import DriftMonitor, Job
from sglang_evicpress.quality.profile import query_set
from sglang_evicpress.quality.recorder import Query, Recorder

ONE, TWO, THREE = b"one", b"two", b"three"
ALL = {ONE, TWO, THREE}
HERE = dict.fromkeys(ALL, 1.0)


def why(job: Job | None) -> str | None:
    return None if job is None else job.why


class Traffic(Recorder):
    """Records hits; every question is a new one."""

    def hit(
        self, key: bytes, num_times: int = 1, *, predicted: float | None = 0.9, question: int | None = None
    ) -> None:
        for _ in range(num_times):
            self.num_asked = getattr(self, "num_asked", 1000) + 1
            token = self.num_asked if question is None else question
            self.record(key, [1, 2, 3], None, Query((token,), (5, 6), predicted))

    def newest(self, key: bytes) -> int:
        return self.queries_of(key)[-1].tokens[0]


def drift(drift_monitor: DriftMonitor, traffic: Traffic, key: bytes) -> None:
    """One lossy hit, observed to be much worse than predicted."""
    traffic.hit(key)
    job = drift_monitor.next_job(traffic, ALL, {key: 1.0})
    assert job is not None and job.why == "observe"
    assert drift_monitor.observe(key, 0.9, 0.1)


def test_the_first_lossy_hit_is_observed_and_then_every_8th() -> None:
    drift_monitor, traffic = DriftMonitor(every=8), Traffic()
    traffic.hit(ONE, 3, predicted=None)
    observed_at = []
    for num_lossy_hits in range(1, 30):
        traffic.hit(ONE)
        job = drift_monitor.next_job(traffic, ALL, HERE)
        assert (job is not None) == drift_monitor.is_due(ONE, num_lossy_hits)
        if job is not None:
            assert job is not None and job.why == "observe"
            observed_at.append(num_lossy_hits)
            assert not drift_monitor.observe(ONE, 0.9, 0.8)
            drift_monitor.observe(ONE, 0.9, 0.8)  # a second question of the same job does not count as a later look
    assert observed_at == [1, 9, 17, 25]


def test_what_is_observed_are_the_newest_lossy_hits_not_yet_looked_at() -> None:
    drift_monitor, traffic = DriftMonitor(every=2), Traffic()
    traffic.hit(ONE, question=1)
    traffic.hit(ONE, question=2, predicted=None)
    job = drift_monitor.next_job(traffic, ALL, HERE)
    assert job is not None and job.why == "observe"
    assert [query.tokens[0] for query in job.queries] == [1]
    drift_monitor.observe(ONE, 0.9, 0.9)
    traffic.hit(ONE, question=3)
    traffic.hit(ONE, question=1)
    job = drift_monitor.next_job(traffic, ALL, HERE)
    assert job is not None and job.why == "observe"
    assert [query.tokens[0] for query in job.queries] == [3, 1]
    drift_monitor.observe(ONE, 0.9, 0.9)
    traffic.hit(ONE, 5)
    job = drift_monitor.next_job(traffic, ALL, HERE)
    assert job is not None and job.why == "observe"
    assert job.queries == traffic.queries_of(ONE)[-4:]


def test_an_answer_that_was_not_kept_cannot_be_observed() -> None:
    drift_monitor, recorder = DriftMonitor(), Recorder()
    recorder.record(ONE, [1], None, Query((4,), (), 0.9))
    assert drift_monitor.is_due(ONE, 1)
    assert drift_monitor.next_job(recorder, ALL, HERE) is None


@pytest.mark.parametrize(
    ("observed", "is_drifted"),
    [
        ([0.55], True),
        ([0.65], False),
        ([0.9, 0.5, 0.5], False),
        ([0.9, 0.9, 0.5, 0.5, 0.5, 0.5], True),
        ([0.1, 1.0], True),
    ],
)
def test_the_mean_of_the_last_four_gaps_decides(observed: list[float], is_drifted: bool) -> None:
    drift_monitor = DriftMonitor(threshold=0.3)
    said = [drift_monitor.observe(ONE, 0.9, quality) for quality in observed]
    assert said[-1] == drift_monitor.is_drifted(ONE) == is_drifted
    assert not drift_monitor.is_drifted(TWO)


def test_a_new_profile_starts_anew() -> None:
    drift_monitor, traffic = DriftMonitor(), Traffic()
    drift(drift_monitor, traffic, ONE)
    job = drift_monitor.next_job(traffic, ALL, HERE)
    assert job is not None and job.why == "drift"
    assert (job.key, job.why, job.queries) == (ONE, "drift", traffic.queries_of(ONE))
    traffic.hit(ONE, 3)  # while it was measured, still on the old prediction
    drift_monitor.profiled(ONE, num_lossy_hits=4)
    assert not drift_monitor.is_drifted(ONE)
    assert drift_monitor.next_job(traffic, ALL, HERE) is None
    traffic.hit(ONE)
    job = drift_monitor.next_job(traffic, ALL, HERE)
    assert job is not None and job.why == "observe"
    assert [query.tokens[0] for query in job.queries] == [traffic.newest(ONE)]
    assert not drift_monitor.observe(ONE, 0.5, 0.4)


def test_a_context_is_not_profiled_again_on_the_questions_of_its_profile() -> None:
    drift_monitor, traffic = DriftMonitor(every=1), Traffic()
    drift(drift_monitor, traffic, ONE)
    assert why(drift_monitor.next_job(traffic, ALL, HERE)) == "drift"
    drift_monitor.profiled(ONE)
    traffic.hit(ONE, question=traffic.newest(ONE))
    job = drift_monitor.next_job(traffic, ALL, HERE)
    assert job is not None and job.why == "observe"
    assert drift_monitor.observe(ONE, 0.9, 0.1)
    assert drift_monitor.next_job(traffic, ALL, HERE) is None
    traffic.hit(ONE, question=77, predicted=None)
    assert why(drift_monitor.next_job(traffic, ALL, HERE)) == "drift"


def test_the_questions_of_a_profile_from_elsewhere_count_as_well() -> None:
    drift_monitor, traffic = DriftMonitor(), Traffic()
    drift(drift_monitor, traffic, ONE)
    traffic.hit(ONE, predicted=None)
    drift_monitor.profiled(ONE, asked=query_set([query.tokens for query in traffic.queries_of(ONE)]))
    drift_monitor.observe(ONE, 0.9, 0.1)
    assert drift_monitor.next_job(traffic, ALL, HERE) is None
    traffic.hit(ONE, predicted=None)
    assert why(drift_monitor.next_job(traffic, ALL, HERE)) == "drift"


def test_drifted_comes_before_due_and_due_before_unprofiled() -> None:
    drift_monitor, traffic = DriftMonitor(), Traffic()
    drift(drift_monitor, traffic, ONE)
    traffic.hit(TWO)
    traffic.hit(THREE, 2, predicted=None)
    weights, known = {ONE: 1.0, TWO: 2.0, THREE: 3.0}, {ONE, TWO}
    jobs = []
    for _ in range(3):
        job = drift_monitor.next_job(traffic, known, weights)
        assert drift_monitor.next_job(traffic, known, weights) == job  # choosing changes nothing
        jobs.append((job.why, job.key))
        if job.why == "observe":
            drift_monitor.observe(job.key, 0.9, 0.9)
        else:
            drift_monitor.profiled(job.key)
            known.add(job.key)
    assert jobs == [("drift", ONE), ("observe", TWO), ("unprofiled", THREE)]
    assert drift_monitor.next_job(traffic, known, weights) is None


def test_the_most_reused_is_profiled_first_and_what_left_the_tree_never() -> None:
    drift_monitor, traffic = DriftMonitor(), Traffic()
    for key in (ONE, TWO, THREE):
        traffic.hit(key, 2, predicted=None)
    job = drift_monitor.next_job(traffic, set(), {ONE: 1.0, TWO: 2.0, THREE: 0.0})
    assert job is not None and job.why == "unprofiled"
    assert (job.key, job.why, job.queries) == (TWO, "unprofiled", traffic.queries_of(TWO))
    assert drift_monitor.next_job(traffic, set(), {THREE: 0.0, b"unknown": 9.0}) is None
    drift(drift_monitor, traffic, THREE)
    assert drift_monitor.next_job(traffic, ALL, {ONE: 1.0}) is None


def test_a_context_is_profiled_once_it_was_hit_twice() -> None:
    drift_monitor, traffic = DriftMonitor(), Traffic()
    traffic.hit(ONE, predicted=None)
    assert drift_monitor.next_job(traffic, set(), HERE) is None
    traffic.hit(ONE, predicted=None)
    assert why(drift_monitor.next_job(traffic, set(), HERE)) == "unprofiled"


def test_what_failed_is_left_alone_for_8_hits_and_others_are_not() -> None:
    drift_monitor, traffic = DriftMonitor(every=8), Traffic()
    traffic.hit(ONE, 2, predicted=None)
    assert drift_monitor.next_job(traffic, set(), HERE) == Job("unprofiled", ONE, traffic.queries_of(ONE))
    drift_monitor.failed(ONE)
    for _ in range(8):
        assert drift_monitor.next_job(traffic, set(), HERE) is None
        traffic.hit(ONE, predicted=None)
    assert why(drift_monitor.next_job(traffic, set(), HERE)) == "unprofiled"
    drift_monitor.failed(ONE)
    traffic.hit(TWO)
    assert why(drift_monitor.next_job(traffic, ALL, HERE)) == "observe"


def test_a_profile_from_elsewhere_ends_the_wait_after_a_failure() -> None:
    drift_monitor, traffic = DriftMonitor(every=8), Traffic()
    traffic.hit(ONE, 2, predicted=None)
    drift_monitor.next_job(traffic, set(), HERE)
    drift_monitor.failed(ONE)
    drift_monitor.profiled(ONE)
    traffic.hit(ONE)
    assert why(drift_monitor.next_job(traffic, ALL, HERE)) == "observe"


def test_what_the_recorder_forgot_is_forgotten() -> None:
    drift_monitor, traffic = DriftMonitor(), Traffic()
    traffic.hit(ONE, 20)
    drift(drift_monitor, traffic, ONE)
    traffic.forget(ONE)
    assert drift_monitor.next_job(traffic, ALL, HERE) is None
    assert not drift_monitor.is_drifted(ONE)
    traffic.hit(ONE)
    assert why(drift_monitor.next_job(traffic, ALL, HERE)) == "observe"


def test_a_context_that_is_recorded_anew_unseen_is_due_again() -> None:
    drift_monitor, traffic = DriftMonitor(), Traffic()
    traffic.hit(ONE, 20)
    drift_monitor.next_job(traffic, ALL, HERE)
    drift_monitor.observe(ONE, 0.9, 0.9)
    traffic.forget(ONE)
    traffic.hit(ONE)
    job = drift_monitor.next_job(traffic, ALL, HERE)
    assert job is not None and job.why == "observe"
    assert job.queries == traffic.queries_of(ONE)


@pytest.mark.parametrize("figures", [(-0.1, 8, 2), (1.1, 8, 2), (float("nan"), 8, 2), (0.3, 0, 2), (0.3, 8, 0)])
def test_figures_out_of_range_are_refused(figures: tuple[float, int, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        DriftMonitor(*figures)


def test_a_quality_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        DriftMonitor().observe(ONE, 0.9, float("nan"))


EVENTS = st.lists(
    st.tuples(st.sampled_from(sorted(ALL)), st.sampled_from(["exact", "lossy", "work", "work badly", "fail"])),
    max_size=80,
)


@given(events=EVENTS)
def test_work_runs_out_when_no_hit_comes(events: list[tuple[bytes, str]]) -> None:
    """Whatever happened before, doing every job as it is chosen ends: nothing is measured round and round."""
    drift_monitor, traffic, known = DriftMonitor(every=3), Traffic(max_queries=3), set[bytes]()

    def work(observed: float, *, fails: bool = False) -> bool:
        job = drift_monitor.next_job(traffic, known, HERE)
        if job is None:
            return False
        assert job.queries
        if fails:
            drift_monitor.failed(job.key)
        elif job.why == "observe":
            for query in job.queries:
                assert query.predicted is not None
                drift_monitor.observe(job.key, query.predicted, observed)
        else:
            assert (job.key in known) or job.why == "unprofiled" or drift_monitor.is_drifted(job.key)
            drift_monitor.profiled(job.key)
            known.add(job.key)
        return True

    for key, event in events:
        match event:
            case "exact" | "lossy":
                traffic.hit(key, predicted=None if event == "exact" else 0.9)
            case "work":
                work(0.9)
            case "work badly":
                work(0.0)
            case "fail":
                work(0.9, fails=True)
    num_jobs = 0
    while work(0.0):
        num_jobs += 1
    assert num_jobs <= 3 * len(ALL)
