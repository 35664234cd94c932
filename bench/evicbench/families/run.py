"""One family from its random checkpoint to a line: written, served, asked, compared with transformers."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from evicbench.codecs.path import Setting
from evicbench.correctness.findings import TOLERANCE, Finding, judged
from evicbench.correctness.reference import Reference
from evicbench.families.cases import play, plays, uncompressed
from evicbench.families.checkpoint import write
from evicbench.families.table import Family
from evicbench.testbed.server import GUESSED, Server, ServerError

SEEN = 10 * TOLERANCE
"""Least distance of an answer over a wrong cache, in log probabilities."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """``why``: in words, if the family is not served or its answers are wrong. ``worst``: the largest difference of a
    log probability; ``least_control``: the smallest that a wrong cache made."""

    family: Family
    page_size: int
    verdict: str
    why: str
    num_answers: int
    worst: float
    least_control: float
    seconds: float

    @property
    def is_exact(self) -> bool:
        return self.verdict == "exact"

    def __str__(self) -> str:
        told = [self.family.name, self.family.covers, f"page {self.page_size}", self.verdict]
        if self.num_answers:
            told.append(f"{self.num_answers} answers off by {self.worst:.1e} at most")
        if math.isfinite(self.least_control):
            told.append(f"wrong caches by {self.least_control:.2g} at least")
        return " | ".join([*told, f"{self.seconds:.0f} s", *([self.why] if self.why else [])])


def arguments(folder: Path, page_size: int, forms: Sequence[str]) -> tuple[str, ...]:
    """Room for everything, so that nothing moves but what is moved by hand; computing is taken to be dear."""
    config = folder / "policy.json"
    config.write_text(json.dumps({"prefill_per_token_s": 1.0}), encoding="utf-8")
    return (
        *("--kv-policy", "evicpress", *GUESSED, "--max-total-tokens", "16384", "--skip-tokenizer-init"),
        *("--kv-policy-config", str(config), "--max-running-requests", "4", "--page-size", str(page_size)),
        *("--kv-host-gb", "0.3", "--kv-ssd-dir", str(folder / "ssd"), "--kv-ssd-gb", "0.5"),
        *("--kv-forms", ",".join(("exact", *forms)), "--trust-remote-code"),
    )


def measure(family: Family, page_size: int) -> Outcome:
    """Serve the family and compare its answers. Whoever does not start, or answers otherwise than transformers without
    any compressed KV, is told apart from one whose compressed KV is wrong."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"family-{family.name}-") as name:
        folder = Path(name)
        served, wanted = "not served", ""
        plain: list[Finding] = []
        findings: list[Finding] = []
        try:
            reference_folder, model = write(family, folder)
            reference = Reference(reference_folder, sees_queries=family.sees_queries)
            with Server(*arguments(folder, page_size, family.forms), *family.arguments, model=model) as server:
                setting = Setting(server, reference, folder / "ssd", page_size)
                plain = play(setting, "uncompressed", uncompressed)
                served = "differs uncompressed"
                if judged(plain)[0]:
                    served = "wrong"
                    for what, run in plays(family.forms).items():
                        findings += play(setting, what, run)
                    violations = server.post("/evicpress/check")["violations"]
                    if violations:
                        findings.append(Finding("integrity", (str(violations),)))
        except ServerError as error:
            wanted = reason(str(error))
    is_right, worst, said = judged([*plain, *findings])
    controls = [min(each.controls) for each in findings if each.controls]
    if served == "wrong" and is_right:
        served = "exact" if min(controls) > SEEN else "blind"
    if not wanted and served != "exact":
        wanted = said
    num_answers = sum(1 for each in (*plain, *findings) if each.num_tokens)
    least = min(controls, default=math.nan)
    return Outcome(family, page_size, served, wanted, num_answers, worst, least, time.monotonic() - begin)


def reason(log: str) -> str:
    """The line of a server's end that says why: the last that names an error, or the last of all."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if "Error" in line or "error:" in line]
    return ([*lines[-1:], *errors] or ["it said nothing"])[-1][:300]
