"""The two clocks of a step: on hand-made schedules, and against a simulation that goes moment by moment."""

from __future__ import annotations

import random

import pytest

from solvers import Bwd, Loss, Run
from solvers.clocks import Clocks, Kernels, clocks, two_clocks


@pytest.mark.parametrize(
    ("steps", "queue", "time"),
    [
        ([], 4, 0),
        ([(2, 5)], 4, 7),
        ([(2, 5), (2, 5), (2, 5)], 4, 17),  # the device is the bottleneck: the first launch, then kernels
        ([(5, 2), (5, 2), (5, 2)], 4, 17),  # the host is: launches, then the last kernel
        ([(1, 10), (9, 1), (1, 1)], 4, 13),  # the long launch is behind a long kernel
        ([(1, 1), (9, 1), (1, 10)], 4, 21),  # nothing runs ahead of it
        ([(1, 10), (1, 10), (1, 10), (25, 1)], 4, 32),  # many launches wait, so that one may take long
        (
            [(1, 10), (1, 10), (1, 10), (25, 1)],
            1,
            47,
        ),  # the queue has one place: each launch waits for a kernel's begin
        ([(0, 3), (0, 4)], 4, 7),
        ([(3, 0), (4, 0)], 4, 7),
    ],
)
def test_a_step_by_hand(steps: list[tuple[int, int]], queue: int, time: int) -> None:
    found = two_clocks(steps, queue)
    assert found == Clocks(time, sum(run for _, run in steps), sum(launch for launch, _ in steps))


def moment_by_moment(steps: list[tuple[int, int]], queue: int) -> int:
    """The time of a step: at each moment the host launches if the queue has a place, and the device runs what is there.

    All durations are at least 1.
    """
    time = 0
    to_launch, waiting = list(steps), []
    launching = running = 0  # what is left of the launch and of the kernel that take place
    while to_launch or waiting or launching or running:
        if not launching and to_launch and len(waiting) < queue:
            launching = to_launch[0][0]
        time += 1
        running = max(0, running - 1)
        if launching:
            launching -= 1
            if not launching:
                waiting.append(to_launch.pop(0)[1])
        if not running and waiting:
            running = waiting.pop(0)
    return time


@pytest.mark.parametrize("seed", range(200))
def test_a_step_moment_by_moment(seed: int) -> None:
    draw = random.Random(seed)
    most = draw.choice([(3, 9), (9, 3), (6, 6)])
    steps = [(draw.randint(1, most[0]), draw.randint(1, most[1])) for _ in range(draw.randint(1, 30))]
    queue = draw.randint(1, 8)
    assert two_clocks(steps, queue).time == moment_by_moment(steps, queue)


KEPT = (Run(0), Run(1), Run(2), Loss(), Bwd(2), Bwd(1), Bwd(0))
AGAIN = (Run(0), Run(1), Run(2), Loss(), Bwd(2), Run(0), Run(1), Bwd(1), Bwd(0))


@pytest.mark.parametrize(
    ("run", "launch", "again", "kept", "more"),
    [
        (100, 10, 7, 10 + 9 * 100, 200),  # the device is busy: reruns cost what they take there
        (1, 10, 7, 3 * 10 + 3 * 20 + 2, 2 * 17),  # it waits: they cost their launches, and Python around them
    ],
)
def test_what_a_rerun_costs_on_either_side(run: int, launch: int, again: int, kept: int, more: int) -> None:
    kernels = Kernels(((launch, run),) * 3, ((2 * launch, 2 * run),) * 3, again)
    assert clocks(KEPT, kernels).time == kept
    assert clocks(AGAIN, kernels).time == kept + more


def test_what_is_said() -> None:
    assert str(Clocks(100, 59, 98)) == (
        "the device waits for Python: 41 % of the step; a larger batch makes recomputation cheaper"
    )
    assert str(Clocks(100, 97, 60)) == "the device, which waits for Python in 3 % of the step"
    assert Clocks(0, 0, 0).waiting == 0
