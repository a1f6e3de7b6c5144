"""What a run is judged by, with numbers computed by hand."""

import math

import pytest

from holdfast.bench.measures import Run, by_method, paired, percent, spread

# Three tasks in turn: the second one is best remembered right after it, the first one never again.
KNOWN = Run(
    "m", 0, [[0.9, 0.1, 0.2], [0.7, 0.8, 0.1], [0.5, 0.6, 0.7]],
    nll=[[0.1, 3.0, 3.0], [0.5, 0.2, 3.0], [1.0, 0.6, 0.2]], untrained=[0.1, 0.05, 0.15], lowest=[None, 0.4, 0.35],
    settled=[None, 0.7, 0.55],
    learning_seconds=[1.0, 2.0, 3.0], remembering_seconds=[0.5, 0.5, 0.5], kept_bytes=[10, 20, 30],
    learning_bytes=[100, 300, 200], remembering_bytes=[50, 50, 400],
)  # fmt: skip
JOINT = Run("joint", 0, [[0.9, 0.8, 0.7]], learning_seconds=[6.0])


def run(seed, average, method="m"):
    return Run(method, seed, [[average]])


def test_the_measures_of_a_known_matrix():
    assert KNOWN.average == pytest.approx(0.6)
    assert KNOWN.forgetting == pytest.approx(((0.9 - 0.5) + (0.8 - 0.6)) / 2)
    assert KNOWN.newest == pytest.approx(0.8)
    assert KNOWN.backward == pytest.approx(((0.5 - 0.9) + (0.6 - 0.8)) / 2)
    assert KNOWN.average_nll == pytest.approx((1.0 + 0.6 + 0.2) / 3)
    assert KNOWN.so_far == pytest.approx([0.9, 0.75, 0.6])
    assert spread([1.0, 3.0]) == pytest.approx((2.0, 2**0.5))
    assert list(by_method([KNOWN, Run("n", 0, [[1.0]]), KNOWN])) == ["m", "n"]


def test_forgetting_is_from_the_best_and_backward_transfer_from_when_it_was_new():
    improved = Run("m", 0, [[0.5, 0.1, 0.1], [0.9, 0.8, 0.1], [0.7, 0.6, 0.7]])
    assert improved.forgetting == pytest.approx(((0.9 - 0.7) + (0.8 - 0.6)) / 2)
    assert improved.backward == pytest.approx(((0.7 - 0.5) + (0.6 - 0.8)) / 2)
    guessed = Run("m", 0, [[0.5, 0.95, 0.1], [0.9, 0.8, 0.1], [0.7, 0.6, 0.7]])  # before it was learned: no memory
    assert guessed.forgetting == improved.forgetting


def test_what_is_known_better_at_the_end_than_ever_before_is_forgotten_by_less_than_nothing():
    assert Run("m", 0, [[0.5, 0.1, 0.1], [0.6, 0.8, 0.1], [0.9, 0.7, 0.7]]).forgetting == pytest.approx(
        ((0.6 - 0.9) + (0.8 - 0.7)) / 2
    )


def test_forward_transfer_is_what_is_known_before_its_turn_over_the_untrained_model():
    # Task 2 just before its turn: 0.1 against 0.05; task 3: 0.1 against 0.15.
    assert KNOWN.forward == pytest.approx((0.05 - 0.05) / 2)
    assert Run("m", 0, [[0.9, 0.3], [0.8, 0.9]], untrained=[0.1, 0.1]).forward == pytest.approx(0.2)
    assert math.isnan(Run("m", 0, [[0.9, 0.3], [0.8, 0.9]]).forward)


def test_the_gap_is_the_dip_below_where_the_earlier_tasks_end_up():
    # While task 2 was learned, task 1 fell to 0.4 and ended at 0.7; then both fell to 0.35 and ended at 0.55.
    assert KNOWN.gap == pytest.approx(((0.7 - 0.4) + (0.55 - 0.35)) / 2)
    assert math.isnan(JOINT.gap)


def test_the_lowest_after_a_switch_is_a_mean_over_the_switches():
    assert KNOWN.lowest_after_a_switch == pytest.approx((0.4 + 0.35) / 2)
    assert math.isnan(JOINT.lowest_after_a_switch)


def test_costs_are_summed_over_stages_and_memory_is_the_most():
    assert KNOWN.seconds == pytest.approx(7.5)
    assert KNOWN.peak_bytes == 400
    assert (JOINT.seconds, JOINT.peak_bytes) == (6.0, 0)


def test_what_is_not_learned_in_turn_has_nothing_to_forget():
    assert not JOINT.in_turn
    assert JOINT.average == pytest.approx(0.8)
    assert all(math.isnan(getattr(JOINT, name)) for name in ("forgetting", "newest", "backward", "forward"))
    assert JOINT.so_far == []


def test_a_mean_over_seeds_that_has_no_number_has_none():
    assert all(map(math.isnan, spread([1.0, math.nan])))
    assert all(map(math.isnan, spread([1.0, math.inf])))
    assert spread([2.0]) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("values", "text"),
    [([0.5, 0.7], "60.0 ± 14.1"), ([0.123], "12.3"), ([0.5, math.nan], "–"), ([1.0, 1.0, 1.0], "100.0 ± 0.0")],
)
def test_percent_is_mean_and_deviation(values, text):
    assert percent(values) == text


def test_paired_differences_are_seed_by_seed():
    ours = [run(0, 0.80), run(1, 0.90), run(2, 0.70), run(9, 0.10)]
    theirs = [run(2, 0.60), run(0, 0.75), run(1, 0.75)]
    found = paired(ours, theirs)
    # 0.05, 0.15, 0.10: their mean 0.1, deviation 0.05, standard error 0.05 / √3.
    assert found.difference == pytest.approx(0.1)
    assert found.error == pytest.approx(0.05 / 3**0.5)
    assert found.seeds == 3
    # t = 0.1 / 0.0289 = 3.46, below Student's 4.303 for 2 degrees of freedom.
    assert not found.clear
    assert paired(ours[:3], [run(seed, one.accuracy[0][0] - 0.1) for seed, one in enumerate(ours[:3])]).clear
    assert paired(ours, [run(5, 0.5)]) is None
    assert not paired([run(0, 0.9)], [run(0, 0.1)]).clear  # one seed tells nothing


@pytest.mark.parametrize(
    ("seeds", "bound"),
    [
        (2, 12.7062), (3, 4.3027), (4, 3.1824), (5, 2.7764), (6, 2.5706), (7, 2.4469), (8, 2.3646), (9, 2.3060),
        (10, 2.2622), (11, 2.2281), (12, 2.2010), (16, 2.1314), (31, 2.0423),
    ],
)  # fmt: skip
def test_beyond_chance_is_students_t_with_any_number_of_seeds(seeds, bound):
    """The differences are as much above their mean as below it, and of an odd number one is at it."""
    apart = [0.01 * (-1) ** seed if seed < seeds // 2 * 2 else 0.0 for seed in range(seeds)]
    error = 0.01 * (seeds // 2 * 2 / (seeds - 1) / seeds) ** 0.5
    for times, clear in ((0.998, False), (1.002, True)):
        mean = times * bound * error
        found = paired([run(seed, 0.5 + mean + each) for seed, each in enumerate(apart)],
                       [run(seed, 0.5) for seed in range(seeds)])  # fmt: skip
        assert found.error == pytest.approx(error)
        assert found.clear is clear
