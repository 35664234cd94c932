"""Prompts are cut where the context ends, at whole blocks and pages."""

from __future__ import annotations

import pytest

from sglang_evicpress.profiler.contexts import GivenQuestion
from sglang_evicpress.profiler.prompts import ContextTooShort, Prompts, Template


def prompts_of(page_size: int) -> Prompts:
    return Prompts(lambda text: [*map(ord, text)], Template.parse("{context}{question}"), page_size)


@pytest.mark.parametrize(("page_size", "num_tokens"), [(1, 192), (16, 192), (128, 128), (96, 192)])
def test_a_context_is_whole_blocks_and_pages(page_size: int, num_tokens: int) -> None:
    tokens, (asked,) = prompts_of(page_size).split("x" * 200, [GivenQuestion("why?")])
    assert len(tokens) == num_tokens
    assert [*tokens, *asked.tokens] == [ord(letter) for letter in "x" * 200 + "why?"]


def test_a_context_of_less_than_a_page_is_too_short() -> None:
    with pytest.raises(ContextTooShort, match="share 200 tokens: expected at least 256"):
        prompts_of(256).split("x" * 200, [GivenQuestion("why?")])
