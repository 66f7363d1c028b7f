"""Every stage of the way from a module to its schedule: its text for small models, its invariants for all."""

from __future__ import annotations

import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import ZOO, BasicBlock, ResNet, TwoInTwoOut, case, randn
from torch import nn

from rkgb import Atools
from rkgb.pipeline import Graphs, make_all_graphs
from rockmate import Rockmate, frontier
from rockmate.demo.gpt import GPT
from solvers import parse_schedule


def text(stages: dict[str, object]) -> str:
    """One file of all stages. Files are named without line numbers, which any edit would change."""
    shown = "\n\n".join(f"== {stage}\n{graph}" for stage, graph in stages.items())
    return re.sub(r"(\w+\.py):\d+", r"\1", shown)


def check_golden(name: str, shown: str) -> None:
    """Assert that ``shown`` is the text of the file ``golden/name``; ROCKMATE_UPDATE=1 writes it instead."""
    path = Path(__file__).parent / "golden" / name
    if os.environ.get("ROCKMATE_UPDATE") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(shown + "\n", encoding="utf-8")
    else:
        expected = path.read_text(encoding="utf-8")
        assert shown + "\n" == expected, (
            "run again with ROCKMATE_UPDATE=1 if the change is meant, and read the difference"
        )


def graphs_of(model: nn.Module, *args: torch.Tensor) -> Graphs:
    return make_all_graphs(model, args, costs="flops")


@functools.cache
def zoo_graphs(name: str) -> Graphs:
    """Of a case, made once."""
    c = case(name)
    args, kwargs = c.call(1)
    return make_all_graphs(c.model(), args, kwargs, costs="flops")


class Views(nn.Module):
    """Views, an in-place operation, a buffer changed, and random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(8, 8), nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.seen += 1
        h = self.lin(x).relu_().view(-1, 2, 4).transpose(0, 1)
        return self.out(nn.functional.dropout(h * 2, 0.5))


TINY: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (
        lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)),
        (64, 8),
    ),
    "norm": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 2)),
        (32, 8),
    ),
    "views": (Views, (16, 8)),
    "residual": (lambda: BasicBlock(4, 8, 2), (2, 4, 8, 8)),
}


@pytest.mark.parametrize("name", TINY)
def test_text_of_each_stage(name: str) -> None:
    make, shape = TINY[name]
    torch.manual_seed(0)
    model, x = make(), randn(*shape, seed=1)
    graphs = graphs_of(model, x)
    stages = {"B": graphs.B, "D": graphs.D, "S": graphs.S, "K": graphs.K}
    if name != "residual":  # the temporary memory of convolutions, and so the plan, depends on the processor
        least = frontier(model, x, costs="flops").min_budget
        stages["schedule"] = Rockmate(model, x, least, costs="flops").plan.program()
    check_golden(f"{name}.txt", text(stages))


def test_text_of_two_inputs_and_two_outputs() -> None:
    torch.manual_seed(0)
    graphs = graphs_of(TwoInTwoOut(), randn(4, 16, seed=1), randn(4, 12, seed=2))
    stages = {"B": graphs.B, "D": graphs.D, "S": graphs.S, "K": graphs.K}
    check_golden("two_in_two_out.txt", text(stages))


@pytest.mark.parametrize("name", [c.name for c in ZOO])
def test_invariants_of_each_stage(name: str) -> None:
    graphs = zoo_graphs(name)
    for graph in (graphs.B, graphs.D, graphs.S, graphs.K):
        graph.verify()


@pytest.mark.parametrize("name", [c.name for c in ZOO])
def test_blocks_partition_the_nodes_in_order(name: str) -> None:
    graphs = zoo_graphs(name)
    assert [i for start, stop in graphs.S.blocks for i in range(start, stop)] == list(range(len(graphs.S.nodes)))
    assert len(graphs.classes) == len(graphs.S.blocks)


@pytest.mark.parametrize("name", [c.name for c in ZOO])
def test_graphs_are_the_same_every_time(name: str) -> None:
    first, again = zoo_graphs(name), zoo_graphs.__wrapped__(name)
    assert [str(g) for g in (again.B, again.D, again.S, again.K)] == [
        str(g) for g in (first.B, first.D, first.S, first.K)
    ]
    assert [n.time for n in again.K.nodes] == [n.time for n in first.K.nodes]


@pytest.mark.parametrize("name", ["mlp", "gpt", "resnet_basic"])
def test_a_printed_schedule_reads_back(name: str) -> None:
    c = case(name)
    args, kwargs = c.call(1)
    model = c.model()
    least = frontier(model, args, sample_kwargs=kwargs, costs="flops").min_budget
    plan = Rockmate(model, args, least, sample_kwargs=kwargs, costs="flops").plan
    assert parse_schedule(plan.problem, plan.program()) == plan.schedule


def test_equal_layers_are_of_one_class() -> None:
    torch.manual_seed(0)
    graphs = graphs_of(GPT(5, 32, 4, 16, 64), torch.zeros(2, 16, dtype=torch.int64))
    assert max(graphs.classes.count(k) for k in set(graphs.classes)) >= 4
    keys = Atools.block_keys(graphs.S)
    for i, j in itertools.combinations(range(len(keys)), 2):
        assert (keys[i] == keys[j]) == (graphs.classes[i] == graphs.classes[j])


def test_blocks_of_other_shapes_are_of_other_classes() -> None:
    torch.manual_seed(0)
    same = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(12)]
    other = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(12)]
    graphs = graphs_of(nn.Sequential(*same, *other), randn(4, 16, seed=1))
    names = [tuple(graphs.S.nodes[i].name for i in range(a, b)) for a, b in graphs.S.blocks]
    assert len(set(names)) > 1
    for i, j in itertools.combinations(range(len(names)), 2):
        if names[i] != names[j]:
            assert graphs.classes[i] != graphs.classes[j]


def test_a_tied_weight_is_one_source() -> None:
    graphs = zoo_graphs("tied")
    keys = [s.key for s in graphs.B.sources.values() if s.kind == "parameter"]
    assert sorted(keys) == ["embedding.weight", "layer.bias", "layer.weight"]


def test_views_and_in_place_operations_are_no_nodes_of_their_own() -> None:
    torch.manual_seed(0)
    graphs = graphs_of(Views(), randn(16, 8, seed=1))
    assert not {"view", "transpose", "relu_"} & {n.name for n in graphs.S.nodes}
    assert [n.name for n in graphs.S.nodes if n.fixed] == ["add_"]


def test_tracing_leaves_the_model_as_it_was() -> None:
    torch.manual_seed(0)
    model = ResNet(BasicBlock, (4, 8), 1)
    before = {k: t.clone() for k, t in model.state_dict().items()}
    state = torch.get_rng_state()
    graphs_of(model, randn(2, 3, 8, 8, seed=1))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_each_node_knows_its_line() -> None:
    first = inspect.getsourcelines(Views.forward)[1]
    lines = [node.line for node in graphs_of(Views(), randn(16, 8, seed=1)).B.nodes]
    assert lines == [f"test_stages.py:{first + k}" for k in (2, 3, 3, 3, 3, 4, 4, 4)]
