"""Verdicts on made-up scores: each kind of rule, at its edges, with runs missing and with what is no number."""

import math

import pytest

from zoo.claims.judge import (
    FAILS,
    HOLDS,
    NOT_RUN,
    Bound,
    Finding,
    Margin,
    NearBest,
    Solved,
    Under,
    figure,
    judge,
    settle,
    wilson,
)


def scores(**arms):
    """``DN=[.9, .8]``: an accuracy a seed; None: that seed gave nothing."""
    return {
        arm: {seed: {"test/accuracy": value} for seed, value in enumerate(values) if value is not None}
        for arm, values in arms.items()
    }


def outcome(rule, found, seeds=(0, 1), lost=None):
    return judge([rule], found, seeds, lost or {}).outcome


MARGIN = Margin("DN", ("LA",), "test/accuracy", 0.25)


@pytest.mark.parametrize(
    ("own", "theirs", "expected"),
    [
        ([0.75, 1.0], [0.5, 0.5], HOLDS),  # 0.25 in binary: the edge counts
        ([0.749, 1.0], [0.5, 0.5], FAILS),  # the other seed's lead does not make up for it
        ([0.9, 0.1], [0.5, 0.5], FAILS),
        ([0.9], [0.5, 0.5], NOT_RUN),  # one seed of two decides nothing when it holds
        ([0.6], [0.5, 0.5], FAILS),  # and decides when it does not
        ([0.9, None], [None, 0.5], NOT_RUN),  # seeds are paired, so these two are of no use together
        ([], [0.5, 0.5], NOT_RUN),
        ([0.9, math.nan], [0.5, 0.5], NOT_RUN),
        ([0.9, -math.inf], [0.5, 0.5], FAILS),
    ],
)
def test_a_margin_must_be_there_in_every_seed(own, theirs, expected):
    assert outcome(MARGIN, scores(DN=own, LA=theirs)) == expected


def test_a_margin_over_several_arms_is_one_over_each():
    rule = Margin("DN,GA", ("DN", "LA"), "test/accuracy")
    assert outcome(rule, scores(**{"DN,GA": [0.9, 0.9], "DN": [0.8, 0.9], "LA": [0.1, 0.1]})) == HOLDS
    assert outcome(rule, scores(**{"DN,GA": [0.9, 0.9], "DN": [0.8, 0.91], "LA": [0.1, 0.1]})) == FAILS
    assert outcome(rule, scores(**{"DN,GA": [0.9, 0.9], "DN": [0.8, 0.9]})) == NOT_RUN


def test_less_is_better_where_the_figure_is_a_loss():
    rule = Margin("DN", ("LA",), "test/accuracy", 0.25, lower=True)
    assert outcome(rule, scores(DN=[0.5, 0.5], LA=[0.75, 0.75])) == HOLDS
    assert outcome(rule, scores(DN=[0.75, 0.75], LA=[0.5, 0.5])) == FAILS


@pytest.mark.parametrize(
    ("least", "most", "values", "expected"),
    [
        (0.5, math.inf, [0.5, 0.6], HOLDS),
        (0.5, math.inf, [0.499, 0.6], FAILS),
        (-math.inf, 0.5, [0.5, 0.4], HOLDS),
        (-math.inf, 0.5, [0.501, 0.4], FAILS),
        (0.4, 0.5, [0.45, 0.6], FAILS),
        (0.4, 0.5, [0.45, None], NOT_RUN),
    ],
)
def test_a_bound_counts_its_edge_and_asks_every_seed(least, most, values, expected):
    assert outcome(Bound("DN", "test/accuracy", least, most), scores(DN=values)) == expected


def test_under_compares_two_figures_of_one_run_and_equal_is_not_under():
    rule = Under("DN", "val/bpb", "val/unigram")
    for value, expected in ((4.6, HOLDS), (4.7, FAILS), (4.8, FAILS), (math.nan, NOT_RUN)):
        assert outcome(rule, {"DN": {0: {"val/bpb": value, "val/unigram": 4.7}}}, seeds=(0,)) == expected
    assert outcome(rule, {"DN": {0: {"val/bpb": 1.0}}}, seeds=(0,)) == NOT_RUN


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, 0.95, 0.99, 0.5, 0.5], HOLDS),  # 3 of 5, the edge 0.95 among them
        ([1.0, 0.949, 0.99, 0.5, 0.5], FAILS),
        ([1.0, 1.0, 1.0, None, None], HOLDS),  # what is missing could not turn it
        ([0.5, 0.5, 0.5, None, None], FAILS),
        ([1.0, 1.0, 0.5, None, None], NOT_RUN),
        ([], NOT_RUN),
    ],
)
def test_a_solved_share_is_decided_as_soon_as_it_is(values, expected):
    assert outcome(Solved("DN", "test/accuracy", at=0.95, share=0.6), scores(DN=values), seeds=range(5)) == expected


def test_a_solved_share_tells_its_interval_median_and_best():
    found = Solved("DN", "test/accuracy", at=0.95, share=0.6).find(scores(DN=[1.0, 0.5, 0.97, 0.96, 0.4]), range(5))
    assert "3 of 5 solved" in found.words
    assert "interval 0.23 to 0.88" in found.words
    assert "median 0.960, best 1.000" in found.words


@pytest.mark.parametrize(
    # Figures of the interval's own formula, worked out by hand and in agreement with published tables.
    ("solved", "n", "low", "high"),
    [(0, 5, 0.0, 0.43448), (5, 5, 0.56552, 1.0), (3, 5, 0.23072, 0.88238), (8, 10, 0.49016, 0.94332)],
)
def test_wilsons_interval(solved, n, low, high):
    assert wilson(solved, n) == pytest.approx((low, high), abs=5e-6)


def test_near_the_best_takes_the_best_of_all_arms_and_waits_for_them():
    rule = NearBest(("DN,GA",), ("GA", "DN", "DN,GA"), "test/accuracy", 0.01)
    assert outcome(rule, scores(**{"GA": [1.0, 2.0], "DN": [1.2, 2.2], "DN,GA": [1.01, 1.9]})) == HOLDS
    assert outcome(rule, scores(**{"GA": [1.0, 2.0], "DN": [1.2, 2.2], "DN,GA": [1.02, 1.9]})) == FAILS
    assert outcome(rule, scores(**{"GA": [1.0, 2.0], "DN,GA": [1.5, 1.9]})) == NOT_RUN


def test_one_broken_rule_decides_even_where_the_runs_of_another_are_missing():
    rules = [Bound("DN", "test/accuracy", least=0.9), Bound("GDN", "test/accuracy", least=0.9)]
    assert judge(rules, scores(DN=[0.5]), (0,), {"GDN": "no time"}).outcome == FAILS
    verdict = judge(rules, scores(DN=[0.95]), (0,), {"GDN": "no time", "LA": "of no interest"})
    assert (verdict.outcome, verdict.reason) == (NOT_RUN, "GDN: no time")
    assert [finding.held for finding in verdict.findings] == [True, None]


def test_the_words_hold_the_figures_of_all_seeds():
    words = MARGIN.find(scores(DN=[0.9, 0.8], LA=[0.5, 0.4]), (0, 1)).words
    assert words == "test/accuracy: DN 0.900 0.800; LA 0.500 0.400 (leads 0.400 0.400, wanted 0.25)"


def test_a_figure_may_be_the_difference_of_two():
    assert figure({"4x/loss": 2.5, "1x/loss": 1.0}, "4x/loss - 1x/loss") == 1.5
    assert math.isnan(figure({"4x/loss": 2.5}, "4x/loss - 1x/loss"))
    assert math.isnan(figure({}, "test/accuracy"))


def test_findings_without_training_settle_a_claim_and_none_is_no_success():
    assert settle([Finding("a", True), Finding("b", True)]).outcome == HOLDS
    assert settle([Finding("a", True), Finding("b", False)]).outcome == FAILS
    assert settle([]).outcome == FAILS
