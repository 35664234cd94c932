"""The table of docs/endpoints.md is what the operations say of themselves. Run as a program, this file writes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_evicpress.introspect.openapi import described, table
from sglang_evicpress.introspect.operation import Access, Operation, asks
from sglang_evicpress.introspect.operations import OPERATIONS, Inspectable
from sglang_evicpress.introspect.parameters import AFTER_NODE, NODE_ID, TOKENS

PAGE = Path(__file__).parents[3] / "docs" / "endpoints.md"
SERVED = [operation for operation in OPERATIONS.values() if operation.path]


def written(page: str) -> str:
    """The page, with its table of calls as it is to be."""
    head, _, rest = page.partition("| call | what |")
    _, _, behind = rest.partition("\n\n")
    return head + "\n".join(table(SERVED)) + "\n\n" + behind


def test_the_page_of_endpoints_has_the_table_of_calls() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == written(page), f"run python {__file__}"
    assert page.count("| GET `") + page.count("| POST `") == len(SERVED) > 20


@pytest.mark.parametrize("operation", SERVED, ids=lambda operation: operation.name)
def test_every_argument_in_a_path_is_read(operation: Operation) -> None:
    assert {name for name in operation.path.split("/") if name.startswith("{")} <= {
        f"{{{argument.name}}}" for argument in operation.arguments
    }


def test_statuses_and_arguments_follow_from_the_row() -> None:
    read = asks(Inspectable.describe_node, NODE_ID, named=(AFTER_NODE, TOKENS))
    got = described(Operation("a", read, "GET", "/evicpress/a/{node_id}", text="A"))
    assert set(got["responses"]) == {"200", "400", "401", "403", "404", "500", "503", "504"}
    assert [(one["name"], one["in"], one["required"]) for one in got["parameters"]] == [
        ("node_id", "path", True),
        ("after", "query", False),
        ("cursor", "query", False),
        ("tokens", "query", False),
    ]
    posted = described(Operation("a", read, "POST", "/evicpress/a", Access.ACT, may_conflict=True, text="A"))
    assert set(posted["responses"]) == {"200", *map(str, (400, 401, 403, 408, 409, 413, 500, 503, 504))}
    assert posted["requestBody"]["content"]["application/json"]["schema"]["required"] == ["node_id"]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
