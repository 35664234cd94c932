"""The catalog against a plain dictionary of all that was put, in which everything is computed anew."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from sglang_evicpress.core import EXACT, Form
from sglang_evicpress.policy.quality_curves import Curves
from sglang_evicpress.quality.catalog import LOW_QUANTILE, UNPOOLED_VARIANCE, Catalog
from sglang_evicpress.quality.credibility import MAX_FORMS
from sglang_evicpress.quality.profile import Profile
from sglang_evicpress.quality.running_stats import RunningStats

HALF, MOST, KNORM = Form("keydiff", 0.5), Form("keydiff", 0.8), Form("knorm", 0.5)
FORMS = (HALF, MOST, KNORM)


def make_profile(key: int, forms: Mapping[Form, list[float]]) -> Profile:
    stats = {form: RunningStats.of(values) for form, values in forms.items()}
    return Profile(b"%016d" % key, 64, stats, "logprob", "0" * 16, 4, 1.0)


def filled(*profiles: Profile, prior: Curves | None = None) -> Catalog:
    catalog = Catalog(prior)
    for profile in profiles:
        catalog.put(profile)
    return catalog


def test_empty_catalog_believes_the_prior() -> None:
    catalog = Catalog(Curves.prior())
    assert catalog.default == catalog.mean == catalog.curves_of(bytes(16)) == Curves.prior()
    assert len(catalog) == 0 and list(catalog) == [] and catalog.get(bytes(16)) is None


def test_empty_catalog_without_a_prior_knows_only_the_exact_form() -> None:
    catalog = Catalog(None)
    for curves in (catalog.default, catalog.mean, catalog.curves_of(bytes(16))):
        assert curves.knows(EXACT) and curves.quality(EXACT) == 1.0
        assert not curves.knows(HALF) and curves.quality(HALF) == 0.0


def test_counts_of_which_rounding_leaves_nothing_are_no_spread() -> None:
    catalog = Catalog(None)
    for key, count in ((1, 1.25), (2, 2.0**53), (2, 1.0)):
        stats = {HALF: RunningStats(count, 0.5, 0.0)}
        catalog.put(Profile(b"%016d" % key, 64, stats, "logprob", "0" * 16, 4, 1.0))
    assert 0.0 <= catalog.default.quality(HALF) <= 0.5


def test_prior_is_not_believed_once_there_is_a_profile() -> None:
    catalog = filled(make_profile(1, {HALF: [0.4]}), prior=Curves.prior())
    for curves in (catalog.default, catalog.mean, catalog.curves_of(b"%016d" % 1)):
        assert curves.knows(HALF) and not curves.knows(KNORM)


def test_own_curve_is_nearer_to_that_of_all_the_less_was_asked_about_the_context() -> None:
    others = [make_profile(key, {HALF: [0.4, 0.6, 0.5 + key / 100]}) for key in range(20)]
    once = filled(*others, make_profile(30, {HALF: [0.9]})).curves_of(b"%016d" % 30).quality(HALF)
    often = filled(*others, make_profile(30, {HALF: [0.9] * 50})).curves_of(b"%016d" % 30).quality(HALF)
    assert 0.55 < once < 0.7 < 0.8 < often < 0.9
    assert not filled(*others).curves_of(b"%016d" % 1).knows(KNORM)


def test_forms_beyond_those_that_are_judged_together_have_their_lower_bounds() -> None:
    forms = {Form("keydiff", (index + 1) / 100): [0.4, 0.6] for index in range(MAX_FORMS + 1)}
    curves = filled(make_profile(1, forms)).curves_of(b"%016d" % 1)
    together, apart = (curves.quality(form) for form in list(forms)[-2:])
    assert apart == pytest.approx(RunningStats.of([0.4, 0.6]).lower_bound(0.02)) != pytest.approx(together)


def test_unprofiled_context_is_trusted_as_the_least_of_few_and_the_second_of_eleven() -> None:
    means = [0.9, 0.3, 0.8, 0.5, 0.7, 0.6, 0.95, 0.4, 0.25, 0.85]
    catalog = filled(*(make_profile(key, {HALF: [mean]}) for key, mean in enumerate(means)))
    doubt = UNPOOLED_VARIANCE**0.5
    assert catalog.default.quality(HALF) == catalog.curves_of(bytes(16)).quality(HALF) == pytest.approx(0.25 - doubt)
    catalog.put(make_profile(10, {HALF: [1.0], MOST: [0.99]}))
    assert catalog.default.quality(HALF) == pytest.approx(0.3 - doubt)
    assert catalog.default.quality(MOST) == pytest.approx(0.99 - doubt)  # the one that has it
    assert catalog.mean.quality(HALF) == pytest.approx(statistics.fmean([*means, 1.0]))


def test_a_codec_has_a_quality_of_its_own_alone_and_with_a_press() -> None:
    alone, both = Form(codec="int8"), Form("keydiff", 0.5, "int8")
    profile = make_profile(1, {HALF: [0.5, 0.5], both: [0.3, 0.3], alone: [0.9, 0.9]})
    catalog = filled(profile)
    for curves in (catalog.default, catalog.mean, catalog.curves_of(profile.key)):
        assert [curves.quality(form) for form in (HALF, both, alone)] == pytest.approx([0.5, 0.3, 0.9])
        assert curves.quality(Form("keydiff", 0.75, "int8")) == pytest.approx(0.65)  # 1 - 0.25 - 0.1


def test_catalog_may_be_put_into_while_it_is_walked() -> None:
    catalog = filled(*(make_profile(key, {HALF: [0.5]}) for key in range(3)))
    for profile in catalog:
        catalog.put(profile)
    assert len(catalog) == 3


def test_catalog_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="max_profiles is 0: expected at least 1"):
        Catalog(None, max_profiles=0)


class AgainstDictionary(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.catalog = Catalog(None, max_profiles=4)
        self.profiles: dict[int, dict[Form, list[float]]] = {}  # least recently used first

    @rule(
        key=st.integers(0, 6),
        forms=st.dictionaries(
            st.sampled_from(FORMS), st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4), min_size=1
        ),
    )
    def put(self, key: int, forms: dict[Form, list[float]]) -> None:
        removed = self.catalog.put(make_profile(key, forms))
        self.profiles.pop(key, None)
        self.profiles[key] = forms
        if len(self.profiles) > 4:
            oldest = next(iter(self.profiles))
            assert removed == make_profile(oldest, self.profiles.pop(oldest))
        else:
            assert removed is None

    @rule(key=st.integers(0, 6))
    def touch(self, key: int) -> None:
        self.catalog.touch(b"%016d" % key)
        if key in self.profiles:
            self.profiles[key] = self.profiles.pop(key)

    @invariant()
    def holds_what_was_put(self) -> None:
        assert list(self.catalog) == [make_profile(key, forms) for key, forms in self.profiles.items()]
        assert len(self.catalog) == len(self.profiles)
        for key in range(7):  # whom looking at leaves as old as it was
            name = b"%016d" % key
            assert (name in self.catalog) == (self.catalog.get(name) is not None) == (key in self.profiles)

    @invariant()
    def curves_are_those_of_what_it_holds(self) -> None:
        for form in FORMS:
            means = sorted(statistics.fmean(forms[form]) for forms in self.profiles.values() if form in forms)
            default, mean = self.catalog.default, self.catalog.mean
            if means:
                assert mean.quality(form) == pytest.approx(statistics.fmean(means), abs=1e-12)
            spread = [forms[form] for forms in self.profiles.values() if len(forms.get(form, ())) > 1]
            freedom = sum(len(values) - 1 for values in spread)
            squares = sum(statistics.variance(values) * (len(values) - 1) for values in spread)
            variance = squares / freedom if spread else UNPOOLED_VARIANCE
            seen = [RunningStats.of(forms[form]) for forms in self.profiles.values() if form in forms]
            bounds = [max(0.0, each.lower_bound(variance)) for each in seen]
            if bounds:
                low = sorted(bounds)[int(LOW_QUANTILE * (len(bounds) - 1))]
                # Of a variance that is 0, what is left of sums that came and went is not, and has a root.
                assert default.quality(form) == pytest.approx(low, abs=1e-6)

    @invariant()
    def curves_are_those_of_a_catalog_that_never_held_anything_else(self) -> None:
        anew = filled(*(make_profile(key, forms) for key, forms in self.profiles.items()))
        for key, forms in self.profiles.items():
            curves, expected = (catalog.curves_of(b"%016d" % key) for catalog in (self.catalog, anew))
            for form in forms:
                assert curves.quality(form) == pytest.approx(expected.quality(form), abs=1e-4)


TestAgainstDictionary = AgainstDictionary.TestCase
