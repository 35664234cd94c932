"""Checks of a server against the reference, summed up into lines."""

from __future__ import annotations

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
        return not self.problems and not self.wrong and self.difference <= TOLERANCE


def summary(what: str, findings: Sequence[Finding]) -> Line:
    bad = [finding for finding in findings if not finding.ok]
    answers = [finding for finding in findings if finding.num_tokens]
    worst = max((finding.difference for finding in answers), default=0.0)
    wrong, tokens = sum(finding.wrong for finding in answers), sum(finding.num_tokens for finding in answers)
    ties = sum(finding.ties for finding in answers)
    figure = f"{len(answers)} answers: {worst:.1e}, {wrong} of {tokens} tokens wrong ({ties} ties)"
    if bad:
        figure += f"; {len(bad)} bad, first {bad[0].case}: {'; '.join(bad[0].problems) or f'{bad[0].difference:.1e}'}"
    return Line(what, f"log probabilities within {TOLERANCE:.0e}, no token wrong", figure, bool(answers) and not bad)


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
