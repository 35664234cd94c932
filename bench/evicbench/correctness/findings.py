"""Checks of a server against the reference, summed up into lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from evicbench.report import Line

TOLERANCE = 5e-4  # difference of a log probability in fp32; the largest seen is 2.6e-4


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of a server against the reference; an answer when it has tokens.

    ``difference``: largest of the log probabilities; ``wrong``: tokens that are not the reference's, but for ``ties``;
    ``controls``: the difference that wrong caches make (all tokens, survivors shifted, positions closed up).
    """

    case: str
    problems: tuple[str, ...] = ()
    difference: float = 0.0
    num_tokens: int = 0
    wrong: int = 0
    ties: int = 0
    controls: tuple[float, float, float] | None = None

    @property
    def ok(self) -> bool:
        return self.is_within(TOLERANCE)

    def is_within(self, tolerance: float) -> bool:
        return not self.problems and not self.wrong and self.difference <= tolerance


def judged(findings: Sequence[Finding], tolerance: float = TOLERANCE) -> tuple[bool, float, str]:
    """True if there are answers and all is well; the largest difference of an answer; tokens and faults in words."""
    bad = [finding for finding in findings if not finding.is_within(tolerance)]
    answers = [finding for finding in findings if finding.num_tokens]
    wrong, tokens = sum(finding.wrong for finding in answers), sum(finding.num_tokens for finding in answers)
    said = f"{len(answers)} answers, {wrong} of {tokens} tokens wrong ({sum(each.ties for each in answers)} ties)"
    if bad:
        said += f"; {len(bad)} bad, first {bad[0].case}: {'; '.join(bad[0].problems) or f'{bad[0].difference:.1e}'}"
    return bool(answers) and not bad, max((finding.difference for finding in answers), default=math.nan), said


def summary(what: str, findings: Sequence[Finding]) -> Line:
    ok, worst, said = judged(findings)
    target = f"log probabilities within {TOLERANCE:.0e}, no token wrong"
    return Line(what, target, f"{worst:.1e}, {said}", ok)


def sensitivity(what: str, findings: Sequence[Finding]) -> Line:
    """That a wrong cache would have been seen in every single answer."""
    least = [min(kind) for kind in zip(*(finding.controls for finding in findings if finding.controls), strict=True)]
    names = ("full cache", "one survivor per head shifted", "positions closed up")
    figure = ", ".join(f"{name} {off:.2g}" for name, off in zip(names, least, strict=False))
    return Line(
        what,
        f"every wrong cache off by more than {10 * TOLERANCE:.0e}",
        f"least of all answers: {figure}",
        bool(least) and min(least) > 10 * TOLERANCE,
    )
