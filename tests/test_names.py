"""Display names: each tensor has one from S to the program of the plan, with the path of the module that makes it."""

from __future__ import annotations

import functools
import re

import pytest
import torch
from models import BasicBlock, ResNet, case, randn
from torch import nn

from rkgb.graphs import S_graph
from rkgb.pipeline import make_all_graphs
from rkgb.render.drawing import draw
from rockmate import Plan, Rockmate, attach, frontier
from rockmate.demo.gpt import GPT

MODELS = {
    "gpt": (lambda: GPT(2, 32, 4, 16, 64), torch.arange(32).view(2, 16)),
    "resnet": (lambda: ResNet(BasicBlock, (4, 8), 1), randn(8, 3, 32, 32, seed=1)),
}
WAYS = ("whole", "captured")


@functools.cache
def plan_of(name: str, way: str) -> Plan:
    """Of a whole trace, or of a graph that TorchDynamo captured; some nodes run again."""
    torch.manual_seed(0)
    make, x = MODELS[name]
    model = make()
    options = {"costs": "flops", "cache": False}
    if way == "whole":
        least = frontier(model, x, costs="flops").min_budget
        return Rockmate(model, x, int(1.1 * least), **options).plan
    attachment = attach(model, plan_of(name, "whole").budget, **options)
    model(x).sum().backward()
    (call,) = attachment.plans
    assert call.plan is not None
    return call.plan


def names_in(program: str) -> set[str]:
    """Names of nodes and data in the statements of a printed program."""
    code = "\n".join(line.split("#")[0] for line in program.splitlines()[1:])
    return set(re.findall(r"[\w.]+", re.sub(r"\b(fwd|bwd)\.|\b(del|loss)\b", "", code)))


def paths(s: S_graph) -> list[tuple[str, str]]:
    """The label of each node, and the path of the submodule that its main operation is of."""
    ops = [next(s.d.nodes[op] for op in n.ops if s.d.nodes[op].label == n.label) for n in s.nodes]
    return [(op.label, op.path) for op in ops]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_one_set_of_names_from_s_to_the_program(name: str, way: str) -> None:
    plan = plan_of(name, way)
    k, s = plan.graph, plan.graph.s
    nodes, data = {n.name for n in k.nodes}, {d.name for d in k.data}
    assert plan.recomputed
    assert names_in(plan.program()) == nodes | data
    assert nodes == {n.label for n in s.nodes}
    assert {d.name for d in k.data if d.storage is not None} == {
        s.d.storage_names[x] for n in s.nodes for x in n.storages
    }
    table = str(plan).rpartition("from … to\n")[2]
    ends = [line.split("  ")[-1].strip().split(" … ") for line in table.splitlines()]
    assert {name for pair in ends for name in pair} <= nodes
    at = re.search(r"^predicted peak .*, (?:at the|in the backward of|in) (.*)$", str(plan), re.MULTILINE)
    assert at and at[1] in nodes | {"loss"}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_names_have_the_path_of_the_module(name: str, way: str) -> None:
    named = paths(plan_of(name, way).graph.s)
    assert all(label == path or label.startswith(f"{path}.") for label, path in named if path)
    assert sum(bool(path) for _, path in named) > len(named) / 2


@pytest.mark.parametrize("name", MODELS)
def test_both_ways_give_the_same_names(name: str) -> None:
    whole, captured = (plan_of(name, way).graph.s for way in WAYS)
    assert paths(whole) == paths(captured)


def test_a_leaf_is_named_by_its_path_alone() -> None:
    s = make_all_graphs(GPT(1, 32, 4, 16, 64), torch.arange(32).view(2, 16), costs="flops").S
    labels = [n.label for n in s.nodes]
    assert {"layers.0.norm1", "layers.0.attention.qkv", "layers.0.attention.softmax", "layers.0.add_1"} <= set(labels)
    assert len(set(labels)) == len(labels)


class Shared(nn.Module):
    """A leaf that is called twice, a result in two tensors, and a name that is no identifier."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()
        self.add_module("no-name", nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act(self._modules["no-name"](self.act(x)))
        values, indices = (2 * x).topk(2)
        return values * indices


def test_names_are_numbered_where_there_are_several() -> None:
    graphs = make_all_graphs(Shared(), randn(4, 8, seed=1), costs="flops")
    assert [n.label for n in graphs.S.nodes] == ["act", "no_name", "act_1", "mul", "topk", "mul_1"]
    assert [d.name for d in graphs.K.data][4:6] == ["topk.values", "topk.indices"]


def test_other_values_of_a_storage_are_named_after_it() -> None:
    d = make_all_graphs(case("gpt").model(), *case("gpt").call(1), costs="flops").D
    for v, value in d.values.items():
        name = d.storage_names[value.storage]
        owned = d.storages[value.storage].owner is not None
        assert not owned or d.names[v] == name or d.names[v].startswith(f"{name}.")
    assert len({d.names[v] for v in d.values}) == len(d.values)


class Flattened(nn.Module):
    """The result is a view, in the memory of another value."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x)).flatten()


def test_pictures_have_the_names_of_the_texts() -> None:
    graphs = make_all_graphs(Flattened(), randn(4, 8, seed=1), costs="flops")
    assert str(graphs.D).endswith("return relu.flatten") and str(graphs.S).endswith("return relu")
    for graph, returned in ((graphs.D, "relu.flatten"), (graphs.S, "relu"), (graphs.K, "relu")):
        assert f">{returned}<BR/>" in draw(graph).source
    assert ">relu.flatten<" not in draw(graphs.S).source
