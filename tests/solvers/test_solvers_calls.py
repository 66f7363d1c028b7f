"""Which way each call of a step runs: against all combinations."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.calls import Phase, Way, least_of, level, share
from solvers.errors import InfeasibleError

SIZES = st.integers(0, 50)
WAYS = st.builds(Way, SIZES, st.integers(50, 90), st.integers(50, 100), st.integers(0, 100), st.sampled_from([0, 20]))


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[Way]], list[Phase]]:
    """Choices of up to four calls, and their phases."""
    choices = draw(st.lists(st.lists(WAYS, min_size=1, max_size=5), min_size=1, max_size=4))
    phases = []
    for call in range(len(choices)):
        for backward in (False, True):
            others = [k for k in range(len(choices)) if k != call and draw(st.booleans())]
            phases.append(Phase(call, backward, tuple(others), draw(st.sampled_from([0, 0, 10]))))
    return choices, phases


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(80, 250), st.sampled_from([1, 10**7]))
def test_the_choice_is_the_best_of_all_and_the_least_budget_is_exact(
    step: tuple[list[list[Way]], list[Phase]], budget: int, unit: int
) -> None:
    """Also where sizes are larger than the solver's units."""
    choices = [[Way(*(x * unit for x in w))._replace(time=w.time) for w in ways] for ways in step[0]]
    phases = [phase._replace(made=phase.made * unit) for phase in step[1]]
    peaks = {ways: max(level(phase, ways) for phase in phases) for ways in itertools.product(*choices)}
    fitting = [sum(way.time for way in ways) for ways, peak in peaks.items() if peak <= budget * unit]
    if fitting:
        found = share(choices, phases, budget * unit)
        assert peaks[tuple(found)] <= budget * unit
        assert sum(way.time for way in found) == min(fitting)
    else:
        with pytest.raises(InfeasibleError) as error:
            share(choices, phases, budget * unit)
        assert error.value.min_budget == min(peaks.values())
        assert peaks[tuple(least_of(choices, phases))] == min(peaks.values())
