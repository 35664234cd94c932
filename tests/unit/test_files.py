"""JSON files of users."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_evicpress.files import read_json


@pytest.mark.parametrize("text", ['{"acme": {}, "acme": {"a": 1}}', '[{"acme": {"acme": 1, "b": 2, "acme": 3}}]'])
def test_a_name_that_is_there_twice_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tenants.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="^tenants has 'acme' more than once: expected every name once$"):
        read_json(str(path), "tenants")
