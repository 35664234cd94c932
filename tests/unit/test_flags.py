"""docs/flags.md is what the flags say of themselves. Run as a program, this file writes it."""

from __future__ import annotations

from pathlib import Path

from sglang_evicpress.decode_budget.scores import SCORES
from sglang_evicpress.decode_budget.settings import CLIENT_BUDGETS, METHODS
from sglang_evicpress.flags import FLAGS
from sglang_evicpress.tables import markdown

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def page() -> str:
    rows = [[f"`{flag.option}`", flag.default, f"{flag.text}."] for flag in FLAGS]
    lead = "Flags of `python -m sglang.launch_server`; each but `--kv-policy` needs a policy."
    return "\n".join(["# Flags", "", lead, "", *markdown(["flag", "default", "what"], rows, num_text=3), ""])


def test_the_page_of_flags_is_that_of_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), f"run python {__file__}"


def test_help_names_every_choice() -> None:
    texts = {flag.name: flag.text for flag in FLAGS}
    choices = {"kv_decode_method": METHODS, "kv_decode_score": SCORES, "kv_decode_client_budgets": CLIENT_BUDGETS}
    for name, names in choices.items():
        assert [choice for choice in names if choice not in texts[name]] == []


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
