"""Checkpoints that wait until tokens are sent."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from sglang_evicpress.patches.cache.late_checkpoints import MOST_AT_ONCE, LateCheckpoints

pytestmark = pytest.mark.sglang


def test_checkpoints_wait_for_the_end_of_the_results_or_of_a_request_among_them() -> None:
    made: list[str] = []

    def keep(req: str, token_ids: Sequence[int], *, is_chunk: bool) -> None:
        made.append(f"{req}{token_ids}{' chunk' if is_chunk else ''}")

    late = LateCheckpoints(keep)
    late.keep("a", [1], is_chunk=False)
    assert made == ["a[1]"], "who is not among results waits for nothing"
    with late.deferring():
        late.keep("b", [2], is_chunk=False)
        late.keep("c", [3], is_chunk=False)
        assert len(made) == 1
        late.settle()
        assert made[1:] == ["b[2]", "c[3]"]
        late.keep("d", [4], is_chunk=False)
        late.keep("e", [5], is_chunk=True)
        assert made[3:] == ["e[5] chunk"], "its next part may be computed in the next batch"
    assert made[4:] == ["d[4]"]
    with late.deferring():
        pass
    assert len(made) == 5, "each once"


def test_of_many_prompts_some_wait_until_requests_are_received() -> None:
    made: list[str] = []
    late = LateCheckpoints(lambda req, token_ids, *, is_chunk: made.append(req))
    names = [str(number) for number in range(MOST_AT_ONCE + 2)]
    with late.deferring():
        for name in names:
            late.keep(name, [1], is_chunk=False)
    assert made == names[:MOST_AT_ONCE]
    late.settle()
    assert made == names, "in the order they came"
