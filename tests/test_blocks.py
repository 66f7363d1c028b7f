"""The tools one by one, by the names of the first rkgb; blocks as graphs of their own."""

from __future__ import annotations

import pytest
import torch
from models import ZOO, Case
from torch import nn

import rkgb
from rkgb import Atools, Btools, Dtools, Ktools, Stools
from rkgb.cost.measure import measure_nodes
from rkgb.trees import tensors_of
from rockmate.demo.gpt import GPT


def test_one_call_a_stage() -> None:
    model, sample = GPT(3, 32, 4, 16, 64), torch.randint(64, (2, 16))
    b = Btools.make_B(model, sample)
    d = Dtools.B_to_D(b, model, sample)
    s = Stools.D_to_S(d)
    k = Ktools.S_to_K(s, model, sample)
    whole = rkgb.make_all_graphs(model, sample)
    assert (str(b), str(d), str(k)) == (str(whole.B), str(whole.D), str(whole.K))
    cut = Stools.cut(s)
    assert str(cut) == str(whole.S)
    equivalent_classes, list_K, list_S = Atools.S_list_to_K_list_eco(cut, model, sample)
    assert equivalent_classes == [[0], [1, 2, 3], [4]]
    assert list_K[1] is list_K[2] is list_K[3]
    assert [len(block.nodes) for block in list_S] == [len(list_K[b].nodes) for b in (0, 1, 4)]


def keyword_sample() -> dict[str, torch.Tensor]:
    return {"input": torch.randn(3, 4)}


@pytest.mark.parametrize("sample", [torch.randn(3, 4), (torch.randn(3, 4),), [torch.randn(3, 4)], keyword_sample()])
def test_samples_of_every_form(sample: rkgb.Sample) -> None:
    model = nn.Linear(4, 4)
    b = Btools.make_B(model, sample)
    s = Stools.D_to_S(Dtools.B_to_D(b, model, sample))
    assert [node.name for node in Ktools.S_to_K(s, model, sample).nodes] == ["linear"]


@pytest.mark.parametrize("case", ZOO, ids=lambda case: case.name)
def test_blocks_are_the_whole_in_parts(case: Case) -> None:
    model = case.model()
    args, kwargs = case.call(0)
    inputs = tensors_of((args, kwargs))
    b = Btools.make_B(model, args, kwargs)
    s = Stools.cut(Stools.D_to_S(Dtools.B_to_D(b, model, args, kwargs)), target=4, largest=6)
    costs = measure_nodes(s, model, inputs, "flops")
    k = Ktools.S_to_K(s, model, inputs, costs)
    blocks = Atools.S_list_to_K_list_eco(s, model, inputs, costs)
    assert sorted(b for members in blocks.classes for b in members) == list(range(len(s.blocks)))
    for (start, stop), block in zip(s.blocks, blocks.K, strict=True):
        block.verify()
        block.s.verify()
        whole = k.nodes[start:stop]
        assert [n.time for n in block.nodes] == [n.time for n in whole]
        assert [n.peak for n in block.nodes] == [n.peak for n in whole]
        assert [n.rerun for n in block.nodes] == [n.rerun for n in whole]
        for mine, other in zip(block.nodes, whole, strict=True):
            assert [block.data[d].bytes for d in mine.makes] == [k.data[d].bytes for d in other.makes]
            inside = [d for d in other.reads if k.data[d].owner >= start]
            assert [block.data[d].bytes for d in mine.reads] == [k.data[d].bytes for d in inside]
            assert (mine.backward is None) == (other.backward is None)
            if mine.backward and other.backward:
                assert mine.backward.time == other.backward.time


def test_gradients_of_a_block_are_those_of_the_whole_less_what_waits_outside() -> None:
    model, sample = GPT(3, 32, 4, 16, 64), torch.randint(64, (2, 16))
    graphs = rkgb.make_all_graphs(model, sample, costs="flops")
    costs = measure_nodes(graphs.S, model, [sample], "flops")
    blocks = Atools.S_list_to_K_list_eco(graphs.S, model, sample, costs)
    for (start, stop), block in zip(graphs.S.blocks, blocks.K, strict=True):
        pairs = [
            (mine.backward, whole.backward)
            for mine, whole in zip(block.nodes, graphs.K.nodes[start:stop], strict=True)
            if mine.backward and whole.backward
        ]
        assert len({whole.before - mine.before for mine, whole in pairs}) == 1
        assert len({whole.peak - mine.peak for mine, whole in pairs}) == 1
        outputs = sum(block.s.d.values[v].bytes for v in block.s.d.outputs if block.s.d.values[v].requires_grad)
        assert pairs[-1][0].before == outputs


def test_a_block_whose_gradients_are_there_has_its_own_graph() -> None:
    model, sample = GPT(3, 32, 4, 16, 64), torch.randint(64, (2, 16))
    for p in model.layers[1].parameters():
        p.grad = torch.zeros_like(p)
    s = Stools.cut(Stools.D_to_S(Dtools.B_to_D(Btools.make_B(model, sample), model, sample)))
    blocks = Atools.S_list_to_K_list_eco(s, model, sample, measure_nodes(s, model, [sample], "flops"))
    assert blocks.classes[1] == [1, 2, 3]
    assert blocks.K[1] is blocks.K[3] and blocks.K[1] is not blocks.K[2]
    first = [next(n.backward for n in blocks.K[b].nodes if n.backward) for b in (1, 2)]
    layer = sum(p.nbytes for p in model.layers[1].parameters())
    assert first[0].after - first[1].after == layer  # made here and kept, or added to what is there
