"""What a second run takes beside its operations, in the problem that solvers are given."""

from __future__ import annotations

import torch
from torch import nn

from rkgb import make_all_graphs
from rkgb.device import Cpu, kind_of
from rockmate.planning.problem import problem_of
from rockmate.planning.room import usual_room


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
