"""Several graphs of one step under one budget, against brute force."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from solvers import InfeasibleError
from solvers import sequence as module
from solvers.sequence import Choice, Stage, choose

BYTES = st.integers(0, 20)
CHOICES = st.builds(Choice, BYTES, BYTES, BYTES, BYTES, BYTES, BYTES)
STAGES = st.lists(
    st.builds(Stage, st.lists(CHOICES, min_size=1, max_size=4).map(tuple), *5 * [BYTES]),
    max_size=4,
)


def peak(stages: Sequence[Stage], chosen: Sequence[int]) -> int:
    """By the events of a step, one after the other."""
    taken = [stage.choices[k] for stage, k in zip(stages, chosen, strict=True)]
    levels = [0]
    kept = 0
    for stage, choice in zip(stages, taken, strict=True):
        levels += [kept + stage.before + choice.forward, kept + choice.kept + choice.released + stage.after]
        kept += choice.kept
    for stage, choice in reversed(list(zip(stages, taken, strict=True))):
        kept -= choice.kept
        levels += [kept + stage.beside + choice.backward, kept + stage.later + choice.later, kept + stage.rest]
    return max(levels)


def best(stages: Sequence[Stage], budget: int) -> int | None:
    """The least time of all combinations within ``budget``."""
    times = [
        sum(stage.choices[k].time for stage, k in zip(stages, chosen, strict=True))
        for chosen in itertools.product(*(range(len(s.choices)) for s in stages))
        if peak(stages, chosen) <= budget
    ]
    return min(times, default=None)


@given(STAGES, st.integers(0, 80))
def test_the_least_time_of_all_combinations(stages: list[Stage], budget: int) -> None:
    wanted = best(stages, budget)
    if wanted is None:
        with pytest.raises(InfeasibleError) as caught:
            choose(stages, budget)
        least = caught.value.min_budget
        assert best(stages, least) is not None
        assert best(stages, least - 1) is None
        return
    chosen = choose(stages, budget)
    assert peak(stages, chosen) <= budget
    assert sum(stage.choices[k].time for stage, k in zip(stages, chosen, strict=True)) == wanted


@given(STAGES, st.integers(0, 80))
def test_with_few_partial_solutions_what_is_found_still_fits(stages: list[Stage], budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MOST", 2)
        try:
            chosen = choose(stages, budget)
        except InfeasibleError:
            return  # the fastest of the partial solutions left out may have been the one that fits
    assert peak(stages, chosen) <= budget


def test_a_long_sequence_is_solved_at_once() -> None:
    choices = tuple(Choice(100 - 9 * k, 150, 150 + k, 10 * k * k) for k in range(12))
    stages = [Stage(choices, 3 * i, 5, 2 * i, 2 * i, 1) for i in range(100)]
    chosen = choose(stages, 6000)
    assert peak(stages, chosen) <= 6000
    assert peak(stages, [0] * 100) > 6000
