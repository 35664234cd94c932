"""Quality expected of a measured context: what its own few questions say, weighed against what all contexts do.

The best linear estimate of a context's mean losses from those that were measured in all its forms together: credibility
(Bühlmann, ASTIN Bulletin 4, 1967; Jewell, 1974, for vectors), empirical Bayes (Efron and Morris, Biometrika 59, 1972).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from sglang_evicpress.core import Form
from sglang_evicpress.quality.running_stats import RunningStats

PRIOR_CONTEXTS = 2.0
"""Contexts that the spread taken for granted counts for: that contexts differ as much as the questions about one do."""

CONFIDENCE = 0.5
"""Standard errors of the mean over contexts that less is believed of all of them: few contexts show little."""

LEAST_VARIANCE = 1e-6
"""Of a measured mean, however alike the answers were: a spread of 0.001."""

MAX_FORMS = 64
"""Forms that are judged together, those that came first: time grows with the cube of their number."""

DECIMALS = 6
"""Of qualities: what linear algebra leaves beyond may differ between processes, and ranks must expect the same."""

Matrix = NDArray[np.float64]


class Credibility:
    """Sums over contexts that can be put in and taken out again. Forms may differ between contexts.

    A form in which contexts hardly differ, as one that only quantises, is told by all contexts; one in which they
    differ much by the context's own answers, and by those in forms that go with it.
    """

    def __init__(self) -> None:
        self._seen: dict[bytes, Mapping[Form, RunningStats]] = {}
        self._at: dict[Form, int] = {}
        self._contexts: Matrix = np.zeros((0, 0))  # that have both forms
        self._losses: Matrix = np.zeros((0, 0))  # of the row's form, over those
        self._products: Matrix = np.zeros((0, 0))
        self._shares: Matrix = np.zeros(0)  # sum of 1 / questions
        self._between: Matrix | None = None

    def add(self, key: bytes, forms: Mapping[Form, RunningStats]) -> None:
        """The context ``key`` was measured; each form was observed at least once."""
        for form in forms:
            if form not in self._at and len(self._at) < MAX_FORMS:
                self._at[form] = len(self._at)
                self._contexts, self._losses = np.pad(self._contexts, (0, 1)), np.pad(self._losses, (0, 1))
                self._products, self._shares = np.pad(self._products, (0, 1)), np.pad(self._shares, (0, 1))
        self._seen[key] = {form: seen for form, seen in forms.items() if form in self._at}
        self._sum(self._seen[key], 1.0)

    def remove(self, key: bytes) -> None:
        """A context that was added is no more. Forms that no other has go with it."""
        self._sum(self._seen.pop(key), -1.0)
        left = [form for form, at in self._at.items() if self._contexts[at, at] > 0.0]
        if len(left) < len(self._at):
            ats = [self._at[form] for form in left]
            grid = np.ix_(ats, ats)
            self._contexts, self._losses = self._contexts[grid], self._losses[grid]
            self._products, self._shares = self._products[grid], self._shares[ats]
            self._at = {form: at for at, form in enumerate(left)}

    def expected(self, key: bytes, variances: Mapping[Form, float]) -> dict[Form, float]:
        """Quality in [0, 1] of a context that was added, in each of its forms that are judged together; ``variances``
        of every form that was added are those of the answers to the questions about one context."""
        forms = self._seen[key]
        if not forms:
            return {}
        within = np.array([variances[form] for form in self._at])
        if self._between is None:
            self._between = self._spread(within)
        ats = [self._at[form] for form in forms]
        between, noise = self._between[np.ix_(ats, ats)], within[ats] / [seen.count for seen in forms.values()]
        contexts = self._contexts[ats, ats]
        means = self._losses[ats, ats] / contexts
        own = np.array([1.0 - seen.mean for seen in forms.values()])
        weights = np.linalg.solve(between + np.diag(noise + LEAST_VARIANCE), own - means)
        shares = np.maximum(self._shares[ats], 0.0)  # sums of floats do not come back to 0 by themselves
        errors = np.sqrt((between.diagonal().clip(0.0) + within[ats] * shares / contexts) / contexts)
        losses = means + between @ weights + CONFIDENCE * errors
        return dict(zip(forms, np.round(np.clip(1.0 - losses, 0.0, 1.0), DECIMALS).tolist(), strict=True))

    def _sum(self, forms: Mapping[Form, RunningStats], sign: float) -> None:
        ats = [self._at[form] for form in forms]
        lost = np.array([1.0 - seen.mean for seen in forms.values()])
        grid = np.ix_(ats, ats)
        self._contexts[grid] += sign
        self._losses[grid] += sign * lost[:, None]
        self._products[grid] += sign * np.outer(lost, lost)
        self._shares[ats] += [sign / seen.count for seen in forms.values()]
        self._between = None

    def _spread(self, within: Matrix) -> Matrix:
        """Covariance of the forms' losses between contexts: that of the means less what few questions add to it."""
        both, contexts = np.maximum(self._contexts, 1.0), self._contexts.diagonal()
        found = (self._products - self._losses * self._losses.T / both) / np.maximum(self._contexts - 1.0, 1.0)
        values, vectors = np.linalg.eigh(found - np.diag(within * self._shares / contexts))
        spread: Matrix = (vectors * np.maximum(values, 0.0)) @ vectors.T
        trust = np.sqrt((contexts - 1.0) / (contexts - 1.0 + PRIOR_CONTEXTS))
        return spread * np.outer(trust, trust) + np.diag((1.0 - trust**2) * within)
