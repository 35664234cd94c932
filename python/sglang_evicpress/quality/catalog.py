"""The profiles of one model in memory, and what they say of contexts that have none. Touches no file and no clock."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import nsmallest

import numpy as np
from numpy.typing import NDArray

from sglang_evicpress.core import Form
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.quality.credibility import Credibility
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.running_stats import RunningStats

UNPOOLED_VARIANCE = 0.05
"""Of a form's qualities over the queries of one context, while no profile has two of them: a spread of 0.22."""

LOW_QUANTILE = 0.1
"""An unprofiled context is taken for one that is worse than nine of ten."""


class Catalog:
    """At most ``max_profiles`` profiles, the least recently put or touched of which makes room. Not thread-safe.

    ``prior`` is what is believed while there is no profile at all; None believes in nothing but the exact form.
    """

    def __init__(self, prior: Curves | None, max_profiles: int = 10_000) -> None:
        if max_profiles < 1:
            raise ValueError(f"max_profiles is {max_profiles}: expected at least 1")
        self._prior = Curves.measured({}) if prior is None else prior
        self._max_profiles = max_profiles
        self._profiles: OrderedDict[bytes, Profile] = OrderedDict()  # least recently used first
        self._pools: dict[Form, _Pool] = {}
        self._credibility = Credibility()
        self._curves: dict[bytes, Curves] = {}  # of profiles, made when asked for
        self._default: Curves | None = None
        self._mean: Curves | None = None

    def __len__(self) -> int:
        return len(self._profiles)

    def __contains__(self, key: object) -> bool:
        return key in self._profiles

    def __iter__(self) -> Iterator[Profile]:
        """Least recently used first; puts during the walk do not disturb it."""
        return iter(tuple(self._profiles.values()))

    def page(self, after: bytes, limit: int) -> list[Profile]:
        """The first ``limit`` profiles of keys above ``after``, in order of their keys."""
        keys = nsmallest(limit, (key for key in self._profiles if key > after))
        return [self._profiles[key] for key in keys]

    def get(self, key: bytes) -> Profile | None:
        """The profile of that context. Looking is no use: see ``touch``."""
        return self._profiles.get(key)

    def touch(self, key: bytes) -> None:
        """The context was used; nothing happens when it has no profile."""
        if key in self._profiles:
            self._profiles.move_to_end(key)

    def put(self, profile: Profile) -> Profile | None:
        """Keep ``profile`` in place of any of the same context; returns that of another which had to make room."""
        known = self._profiles.pop(profile.key, None)
        removed = None
        if known is None and len(self._profiles) == self._max_profiles:
            _, removed = self._profiles.popitem(last=False)
        for gone in (known, removed):
            if gone is not None:
                self._leave(gone)
        self._profiles[profile.key] = profile
        for form, seen in profile.forms.items():
            self._pools.setdefault(form, _Pool()).add(profile.key, seen)
        self._credibility.add(profile.key, profile.forms)
        self._curves.clear()
        self._default = self._mean = None
        return removed

    def curves_of(self, key: bytes) -> Curves:
        """Qualities expected of the context by its own profile and, as far as that says little, by those of the others;
        lower bounds of forms that are too many for that. ``default`` when it has none.
        """
        profile = self._profiles.get(key)
        if profile is None:
            return self.default
        curves = self._curves.get(key)
        if curves is None:
            variances = {form: pool.variance for form, pool in self._pools.items()}
            bounds = {form: seen.lower_bound(variances[form]) for form, seen in profile.forms.items()}
            curves = self._curves[key] = _curves(bounds | self._credibility.expected(key, variances))
        return curves

    @property
    def default(self) -> Curves:
        """Curves of an unprofiled context: per form a low quantile of what the profiled ones' qualities are
        hardly below, so that less is believed of it than of nine in ten of them."""
        if self._default is None:
            self._default = self._over_profiles(
                lambda pool: float(np.quantile(pool.lower_bounds(), LOW_QUANTILE, method="lower"))
            )
        return self._default

    @property
    def mean(self) -> Curves:
        """Per form the mean of the profiles' mean qualities."""
        if self._mean is None:
            self._mean = self._over_profiles(lambda pool: float(pool.means().mean()))
        return self._mean

    def _over_profiles(self, figure: Callable[[_Pool], float]) -> Curves:
        """Forms differ in which profiles have them."""
        if not self._profiles:
            return self._prior
        return _curves({form: figure(pool) for form, pool in self._pools.items()})

    def _leave(self, profile: Profile) -> None:
        self._credibility.remove(profile.key)
        for form, seen in profile.forms.items():
            pool = self._pools[form]
            pool.remove(profile.key, seen)
            if not pool.seen:
                del self._pools[form]


@dataclass(slots=True)
class _Pool:
    """One form over all profiles that have it, by context, and what their variances are pooled of."""

    seen: dict[bytes, RunningStats] = field(default_factory=dict)
    num_spread: int = 0
    squares: float = 0.0
    freedom: float = 0.0

    @property
    def variance(self) -> float:
        """Within contexts, not between them."""
        has_spread = self.num_spread and self.freedom > 0.0  # of great counts nothing may be left by rounding
        return max(0.0, self.squares / self.freedom) if has_spread else UNPOOLED_VARIANCE

    def means(self) -> NDArray[np.float64]:
        return np.array([seen.mean for seen in self.seen.values()])

    def lower_bounds(self) -> NDArray[np.float64]:
        variance = self.variance
        return np.array([seen.lower_bound(variance) for seen in self.seen.values()])

    def add(self, key: bytes, seen: RunningStats) -> None:
        self.seen[key] = seen
        self._spread(seen, 1)

    def remove(self, key: bytes, seen: RunningStats) -> None:
        del self.seen[key]
        self._spread(seen, -1)

    def _spread(self, seen: RunningStats, sign: int) -> None:
        if seen.count <= 1.0:
            return
        self.num_spread += sign
        self.squares += sign * seen.squares
        self.freedom += sign * (seen.count - 1.0)
        if not self.num_spread:  # sums of floats do not come back to 0 by themselves
            self.squares = self.freedom = 0.0


def _curves(qualities: dict[Form, float]) -> Curves:
    return Curves.measured({form: min(max(quality, 0.0), 1.0) for form, quality in qualities.items()})
