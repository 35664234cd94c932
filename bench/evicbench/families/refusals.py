"""Families that are refused: the real server, started on the configuration of a tiny one, says so in one sentence."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from transformers import AutoConfig

from evicbench.families.run import arguments
from evicbench.families.table import Refused
from evicbench.testbed.server import Server

STATUS = 2
OPENING = "sglang: error: "


def last_line(refused: Refused) -> tuple[int, str]:
    """Exit status, and the last line that the server printed. Raises TimeoutExpired if it goes on to run."""
    with tempfile.TemporaryDirectory(prefix=f"refused-{refused.name}-") as name:
        folder = Path(name)
        config = AutoConfig.for_model(refused.model_type, **refused.settings).to_dict()
        config = {**config, "architectures": [refused.architecture]}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        status, lines = Server(*arguments(folder, 1, ("keydiff@0.5",)), model=folder).run_to_end()
        return status, lines[-1] if lines else ""


def is_refused(refused: Refused, status: int, line: str) -> bool:
    """True if it is the sentence that the table asks for."""
    return status == STATUS and line.startswith(OPENING) and refused.says in line and "--kv-policy" in line
