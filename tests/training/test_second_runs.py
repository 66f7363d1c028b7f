"""What a second run takes beside its operations, in the problem that solvers are given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from rkgb import make_all_graphs
from rkgb.device import Cpu, kind_of
from rkgb.Ktools import K_graph
from rkgb.sample import call_of
from rockmate import Rockmate, measure_peak
from rockmate.planning.options import PlanOptions
from rockmate.planning.prepare import make_planner
from rockmate.planning.problem import clocks_without_reruns, problem_of, usual_room
from solvers import Loss, Run


def test_a_plan_counts_the_python_around_a_second_run_and_a_step_takes_what_was_measured() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU(), nn.Dropout(0.1))))
    graphs = make_all_graphs(model, torch.randn(2048, 256))
    alone = problem_of(graphs, usual_room(graphs.K, None), "flops")
    found = problem_of(graphs, usual_room(graphs.K, None), "measured")
    more = Cpu().beside_a_rerun(sum(x.bytes for x in graphs.D.storages))
    assert more > 13_000
    for before, now in zip(alone.nodes, found.nodes, strict=True):
        assert now.time - before.time == (more if now.rerun else 0)
    backwards = [(b.backward, n.backward) for b, n in zip(alone.nodes, found.nodes, strict=True)]
    assert all(now.time < before.time for before, now in backwards if before is not None and now is not None)
    assert alone.eager_time - len(alone.nodes) <= found.eager_time <= alone.eager_time


def test_where_python_takes_longer_than_all_backwards_these_take_nothing() -> None:
    graphs = make_all_graphs(nn.Sequential(*(nn.Tanh() for _ in range(20))), torch.zeros(2, requires_grad=True))
    found = problem_of(graphs, usual_room(graphs.K, None), "measured")
    assert all(n.backward and n.backward.time >= 0 for n in found.nodes)
    found.verify()


def test_it_grows_with_what_a_step_uses_until_nothing_stays_in_the_caches() -> None:
    cpu = kind_of(torch.device("cpu"))
    few, some, much, more = (cpu.beside_a_rerun(size) for size in (0, 2**24, 2**26, 2**30))
    assert 0 < few < some < much == more


def test_a_gpu_does_not_wait_for_python() -> None:
    assert kind_of(torch.device("cuda")).beside_a_rerun(2**30) == 0


GELUS = {1, 3, 5, 7}


def with_launches(k: K_graph, gelu: tuple[int, int], linear: tuple[int, int]) -> K_graph:
    """``k``, of linear layers and GELUs in turns, with these nanoseconds of the host and of the device for each."""
    nodes = []
    for i, n in enumerate(k.nodes):
        launch, run = gelu if i in GELUS else linear
        assert n.backward is not None
        backward = replace(n.backward, launch=2 * launch, time=2 * run)
        nodes.append(replace(n, launch=launch, time=run, warm=run, backward=backward))
    return replace(k, nodes=tuple(nodes))


@pytest.mark.parametrize(
    ("gelu", "linear", "again"),
    [
        ((1_000, 100_000), (1_000, 900_000), "gelu"),  # the device is the bottleneck
        ((9_000_000, 100_000), (1_000_000, 900_000), "linear"),  # it waits for the host
    ],
)
def test_the_side_that_is_the_bottleneck_decides(gelu: tuple[int, int], linear: tuple[int, int], again: str) -> None:
    """What runs again is what that side does quickly, and the plan's overhead is that of the two clocks."""
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())))
    planner = make_planner(model, call_of(torch.randn(512, 32), None), PlanOptions("flops"))
    graphs = replace(planner.graphs, K=with_launches(planner.graphs.K, gelu, linear))
    planner = replace(planner, graphs=graphs, problem=problem_of(graphs, planner.room, "measured"))
    plan = planner.plan(planner.eager_peak - 2**16)
    reruns = [step.node for step in plan.schedule[plan.schedule.index(Loss()) :] if isinstance(step, Run)]
    assert reruns
    assert all((i in GELUS) == (again == "gelu") for i in reruns)
    kept, clocks = clocks_without_reruns(graphs.K), plan.clocks
    assert kept is not None and clocks is not None
    assert plan.predicted_overhead == clocks.time / kept.time - 1 > 0
    assert planner.plan(planner.eager_peak).predicted_overhead == 0


@pytest.mark.parametrize(
    "norm",
    [
        lambda: nn.GroupNorm(4, 16),
        lambda: nn.GroupNorm(4, 16, affine=False),
        lambda: nn.InstanceNorm2d(16, affine=True),
        lambda: nn.BatchNorm2d(16),
        lambda: nn.LayerNorm([16, 16, 16]),
        lambda: nn.RMSNorm([16, 16, 16]),
    ],
    ids=["group", "group without weights", "instance", "batch", "layer", "rms"],
)
def test_results_that_run_again_keep_nothing_of_their_own_graph(norm: Callable[[], nn.Module]) -> None:
    """Recorded second runs have a graph, which must not keep what their backward reads: it lives as long as they."""
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(5) for m in (nn.Conv2d(16, 16, 3, 1, 1), norm(), nn.SiLU())))
    rk = Rockmate(model, torch.randn(8, 16, 16, 16), "45%", costs="flops", cache=False)
    x = torch.randn(8, 16, 16, 16)

    def step() -> None:
        rk.zero_grad()
        rk(x).square().mean().backward()

    for _ in range(2):
        step()
    rk.zero_grad()
    assert rk.plan.recomputed > 0
    assert measure_peak(step, "cpu") <= rk.plan.predicted_peak + Cpu.scalars
