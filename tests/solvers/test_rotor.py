"""rotor's dynamic program against brute force, its comparisons, the judge of sequences, and their text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from solvers.errors import InfeasibleError, ProblemError, ScheduleError
from solvers.rotor.chain import Chain, Stage
from solvers.rotor.costs import costs_of, of_least_memory
from solvers.rotor.ops import B, Fck, Fe, Fn, Loss, Operation, Sequence
from solvers.rotor.plans import (
    ALGORITHMS,
    ALIKE,
    no_checkpoint_sequence,
    persistent,
    revolve_sequence,
    segments_sequence,
    simplest,
)
from solvers.rotor.walk import walk_sequence

SIZES, TIMES = st.integers(0, 6), st.integers(0, 9)


@st.composite
def chains(draw: st.DrawFn, longest: int = 4) -> Chain:
    """Small chains in which every stage keeps its input, where the dynamic program counts exactly."""
    stages, values = [], [((0, 0),)]
    for i in range(draw(st.integers(1, longest))):
        out, held, forward_time = draw(SIZES), draw(SIZES), draw(TIMES)
        forward_peak = held + out + draw(SIZES)
        stage = Stage(
            name=f"stage {i}",
            forward_time=forward_time,
            tail=draw(st.integers(0, forward_time)),
            backward_time=draw(st.integers(0, 9)),
            held=held,
            forward_peak=forward_peak,
            pass_peak=out + draw(SIZES),
            stop_peak=draw(st.integers(held, forward_peak)),
            backward_peak=draw(SIZES),
            input_gradient=values[-1][0][1],
            parameter_gradients=draw(st.integers(0, 3)),
        )
        stages.append(stage)
        values.append(((i + 1, out),))
    return Chain(tuple(stages), tuple(values), values[-1][0][1], draw(SIZES))


def all_persistent(chain: Chain, s: int, t: int) -> Iterator[tuple[Operation, ...]]:
    """Every persistent sequence of stages s..t; t is their number in the first forward phase, which the loss ends."""
    if s > t:
        yield ()
    elif s == t == chain.length:
        yield (Loss(),)
    else:
        for rest in all_persistent(chain, s + 1, t):
            yield (Fe(s), *rest, B(s))
        for k in range(s + 1, t + 1):
            for later in all_persistent(chain, k, t):
                for earlier in all_persistent(chain, s, k - 1):
                    yield (Fck(s), *(Fn(j) for j in range(s + 1, k)), *later, *earlier)


@settings(max_examples=60, deadline=None)
@given(chains(), st.floats(0, 1))
def test_persistent_is_the_best_of_all(chain: Chain, share: float) -> None:
    walks = [walk_sequence(chain, Sequence(s)) for s in all_persistent(chain, 0, chain.length)]
    least, most = min(w.peak for w in walks), max(w.peak for w in walks)
    assert walk_sequence(chain, Sequence(of_least_memory(costs_of(chain)))).peak == least
    limit = max(1, int(least + share * (most - least)))
    if limit < least:
        with pytest.raises(InfeasibleError) as error:
            persistent(chain, limit, 100 * limit)
        assert error.value.min_budget == least
        return
    found = walk_sequence(chain, persistent(chain, limit, 100 * limit))
    assert found.peak <= limit
    assert found.time == min(w.time for w in walks if w.peak <= limit)


@settings(max_examples=40, deadline=None)
@given(chains(longest=9), st.floats(0.2, 1), st.integers(5, 60))
def test_every_algorithm_keeps_to_the_limit(chain: Chain, share: float, slots: int) -> None:
    limit = int(share * walk_sequence(chain, no_checkpoint_sequence(chain)).peak)
    for name, algorithm in ALGORITHMS.items():
        try:
            found = walk_sequence(chain, algorithm(chain, limit, slots))
        except InfeasibleError as error:
            assert error.min_budget > limit
            assert walk_sequence(chain, algorithm(chain, error.min_budget, slots)).peak <= error.min_budget, name
        else:
            assert found.peak <= limit, name


@settings(max_examples=30, deadline=None)
@given(chains(longest=8), st.floats(0.3, 1))
def test_persistent_is_no_worse_than_the_comparisons(chain: Chain, share: float) -> None:
    limit = max(1, int(share * walk_sequence(chain, no_checkpoint_sequence(chain)).peak))
    for name in ("rotor", "no_checkpoint", "sequential", "griewank"):
        try:
            other = walk_sequence(chain, ALGORITHMS[name](chain, limit, 100 * limit))
        except InfeasibleError:
            continue
        assert walk_sequence(chain, persistent(chain, limit, 100 * limit)).time <= other.time, name


def homogeneous(length: int) -> Chain:
    stage = Stage("s", 1, 0, 1, 1, 2, 1, 1, 0, 1, 0)
    values = tuple(((i, 1 if i else 0),) for i in range(length + 1))
    return Chain((stage,) * length, values, 1)


@settings(max_examples=60, deadline=None)
@given(chains(longest=5), st.floats(0.3, 1))
def test_the_simplest_takes_hardly_longer(chain: Chain, share: float) -> None:
    limit = max(1, int(share * walk_sequence(chain, no_checkpoint_sequence(chain)).peak))
    try:
        least = walk_sequence(chain, persistent(chain, limit, 100 * limit)).time
    except InfeasibleError:
        with pytest.raises(InfeasibleError):
            simplest(chain, limit, 100 * limit)
        return
    found = simplest(chain, limit, 100 * limit)
    walked = walk_sequence(chain, found)
    assert walked.peak <= limit
    assert walked.time <= (1 + ALIKE) * least
    try:
        alike = walk_sequence(chain, ALGORITHMS["sequential"](chain, limit, 100 * limit)).time <= (1 + ALIKE) * least
    except InfeasibleError:
        alike = False
    segments = any(found == segments_sequence(chain, n) for n in range(1, chain.length + 1))
    assert segments or not alike


def test_griewank_runs_as_often_as_binomial_checkpointing_must() -> None:
    """Griewank and Walther (2000): c checkpoints beside the input, binomial(c + r + 1, c + 1) stages, r reruns."""
    runs = [sum(isinstance(op, (Fn, Fck, Fe)) for op in revolve_sequence(homogeneous(10), c)) for c in (0, 2, 9)]
    assert runs[0] == 10 * 11 // 2  # from the start for every stage
    # l = binomial(5, 3) = 10 stages, c = 2, r = 2: l·r − binomial(c + r + 1, r − 1) = 20 − 5 advances, and one run of
    # each stage
    assert runs[1] == 15 + 10
    assert runs[2] == 9 + 10  # every stage but the last runs twice


def test_segments_are_those_of_checkpoint_sequential() -> None:
    assert repr(segments_sequence(homogeneous(5), 2)) == (
        "[Fck_0, Fn_1, Fe_2, Fe_3, Fe_4, Loss, B_4, B_3, B_2, Fe_0, Fe_1, B_1, B_0]"
    )


def test_values_that_share_memory_count_once() -> None:
    chain = homogeneous(3)
    shared = replace(chain, values=(chain.values[0], chain.values[1], chain.values[1], chain.values[3]))
    peaks = [walk_sequence(c, no_checkpoint_sequence(c)).peak for c in (chain, shared)]
    assert peaks[0] == peaks[1] + 1


def test_the_output_of_a_last_stage_that_runs_again_is_beside_that_of_the_caller() -> None:
    chain = homogeneous(1)
    chain = replace(chain, stages=(replace(chain.stages[0], keeps_output=True),))
    again = walk_sequence(chain, Sequence.parse("Fck_0, Loss, Fe_0, B_0"))
    # the output; and its gradient; and what the run to the last saved tensor allocates; with all that it keeps
    assert [m.peak for m in again.moments] == [1, 1 + 1, 2 + 1, 2 + 1 + 1]
    kept = walk_sequence(chain, no_checkpoint_sequence(chain))
    assert [m.peak for m in kept.moments] == [2, 2 + 1, 3]
    assert again.moments[-1].after == kept.moments[-1].after == 1 + 1  # and the gradient of the input


def test_text() -> None:
    sequence = Sequence((Fck(0), Fn(1), Fe(2), Loss(), B(2), Fe(0), Fe(1), B(1), B(0)))
    assert str(sequence) == "F_ck^0 F_∅^1 F_all^2 L B^2 F_all^0 F_all^1 B^1 B^0"
    assert repr(sequence) == "[Fck_0, Fn_1, Fe_2, Loss, B_2, Fe_0, Fe_1, B_1, B_0]"
    assert Sequence.parse(repr(sequence)) == sequence
    assert len(sequence) == 9 and sequence[3] == Loss() and sequence[:2] == (Fck(0), Fn(1))
    for wrong in ("Fx_1", "Fe_1:2", "B", "Fe_"):
        with pytest.raises(ScheduleError, match="is no operation"):
            Sequence.parse(f"[Fe_0, {wrong}]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Fe_0, Fe_1, Loss, B_0", "next backward is B_1"),
        ("Fe_0, B_0", "in the forward phase"),
        ("Fe_1, Loss", "stage 0 has to run"),
        ("Fck_0, Fn_1, Fck_0", "stage 2 has to run"),
        ("Fn_0, Fe_1, Loss, B_1, Fe_0", "input is not there"),
        ("Fe_0, Loss", "1 of 2 stages have run"),
        ("Fe_0, Fn_1, Loss, B_1", "what it reads is not there"),
        ("Fe_0, Fe_1, Loss, Loss", "in the backward phase"),
        ("Fe_0, Fe_1, Loss, B_1", "ends before B_0"),
        ("Fe_0, Fe_1, Loss, Fe_0", "is there already"),
        ("Fe_7", "the chain has 2 stages"),
    ],
)
def test_the_walker_refuses(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        walk_sequence(homogeneous(2), Sequence.parse(text))


def test_chains_that_cannot_be() -> None:
    stage = homogeneous(1).stages[0]
    with pytest.raises(ProblemError, match="at least one stage"):
        Chain((), (((0, 0),),), 0)
    for tail in (2, -1):
        with pytest.raises(ProblemError, match=f"tail is {tail}, no part of forward_time, 1"):
            replace(homogeneous(1), stages=(replace(stage, tail=tail),))
    with pytest.raises(ProblemError, match="stop_peak is 9 bytes, forward_peak 2"):
        replace(homogeneous(1), stages=(replace(stage, stop_peak=9),))


def test_chain_as_text() -> None:
    assert str(homogeneous(1)).splitlines() == [
        "stage  u_f  u_b  a  ā  o_f  o_b",
        "s        1    1  0  2    1    0",
        "slots of 1 bytes, times in ns",
    ]
