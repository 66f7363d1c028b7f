"""The text of S is a graph: it reads back, and passes run on texts that no model was traced for."""

from __future__ import annotations

from textwrap import dedent

import pytest
import torch
from models import ZOO, case
from torch import nn

from rkgb import Atools
from rkgb.cost.measure import Cost
from rkgb.graphs import S_graph
from rkgb.Ktools import K_graph, S_to_K
from rkgb.pipeline import make_S
from rkgb.Stools import TextError, cut, parse_S


def read(text: str) -> S_graph:
    return parse_S(dedent(text))


def traced(name: str) -> S_graph:
    c = case(name)
    return make_S(c.model(), *c.call(1))[2]


@pytest.mark.parametrize("name", [c.name for c in ZOO])
def test_text_reads_back(name: str) -> None:
    s = traced(name)
    found = parse_S(str(s))
    assert str(found) == str(s)
    assert parse_S(str(found)) == found
    assert cut(found.with_blocks(())).blocks == s.blocks
    for known, now in zip(s.nodes, found.nodes, strict=True):
        assert (known.name, known.label, known.random, known.fixed) == (now.name, now.label, now.random, now.fixed)
        assert known.saved.private == now.saved.private


LAYER = """\
h{0}.up: float32[4, 8] = linear(x{0}, h{0}.weight)  # saves x{0}, h{0}.weight
h{0}.act: float32[4, 8] = gelu(h{0}.up)  # saves h{0}.up
x{1}: float32[4, 8] = add(x{0}, h{0}.act)
"""


def layers(count: int) -> str:
    """So many residual layers."""
    weights = "".join(f"h{k}.weight: float32[8, 8] = parameter\n" for k in range(count))
    body = "".join(LAYER.format(k, k + 1) for k in range(count))
    return f"x0: float32[4, 8] = input 0\n{weights}{body}return x{count}"


def test_cuts_lie_where_one_tensor_crosses() -> None:
    s = cut(parse_S(layers(4)), target=3, largest=6)
    assert s.blocks == ((0, 3), (3, 6), (6, 9), (9, 12))
    assert Atools.classes(s) == [0, 1, 1, 1]  # the first reads an input, which needs no gradient
    assert s.made_by == ("cut",)


def test_what_needs_no_gradient_and_depends_on_none_does_not_cross() -> None:
    s = read("""
        x: float32[4, 8] = input 0
        mask: bool[4, 8] = ones()  # fixed; no grad
        a: float32[4, 8] = where(x, mask)  # saves mask; no grad
        b: float32[4, 8] = where(a, mask)  # saves mask; no grad
        return b
        """)
    assert cut(s, target=1, largest=1).blocks == ((0, 2), (2, 3))


def test_other_shapes_are_another_class() -> None:
    text = layers(2).replace("h1.weight: float32[8, 8]", "h1.weight: float32[8, 8] strides [1, 8]")
    assert Atools.classes(cut(parse_S(text), target=3, largest=6)) == [0, 1]


def test_a_block_on_its_own_reads_inputs() -> None:
    block = Atools.block_graph(cut(parse_S(layers(3)), target=3, largest=6), 1)
    assert str(block) == dedent("""\
        # S, made by block_graph 1
        h1.weight: float32[8, 8] = parameter
        x1: float32[4, 8] grad = input 0
        # block 0
        h1.up: float32[4, 8] = linear(x1, h1.weight)  # saves x1, h1.weight
        h1.act: float32[4, 8] = gelu(h1.up)  # saves h1.up
        x2: float32[4, 8] = add(x1, h1.act)
        return x2""")


def differentiated(s: S_graph, *costs: Cost) -> K_graph:
    return S_to_K(s, nn.Module(), [], costs)


def test_data_of_K_are_storages_and_what_only_a_backward_reads() -> None:
    s = read("""
        x: float32[4, 8] = input 0
        w: float32[8, 8] = parameter
        up.view: float32[8, 4] in up = linear(x, w)  # saves x, 16 bytes
        act: float32[8, 4] = relu(up.view)  # saves act
        return act
        """)
    k = differentiated(s, Cost(1, 144, 2, 256, 256, 256, 128, (0,), (None, None)), Cost(1, 128, 1, 256, results=(0,)))
    assert str(k) == dedent("""\
        # K, made by S_to_K
        fwd up() -> up:128, up.saved:16
        fwd act(up) -> act:128
        loss
        bwd act(act)
        bwd up(up.saved)""")
    assert [node.peak for node in k.nodes] == [144, 128]


def test_what_changes_a_buffer_or_draws_from_no_gradient_has_no_backward() -> None:
    s = read("""
        x: float32[4] = input 0
        count: int64[] = buffer
        () = count.add: add_(count)  # writes count; fixed; no grad
        noise: float32[4] = rand(x)  # random; no grad
        y: float32[4] = mul(x, noise)  # no grad
        return y
        """)
    k = differentiated(s, Cost(1, 0), Cost(1, 16), Cost(1, 16))
    assert [node.rerun for node in k.nodes] == [False, True, True]
    assert all(node.backward is None for node in k.nodes)
    assert [node.name for node in k.nodes] == ["count.add", "noise", "y"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x: float32[4] = input 0\ny: float32[4] = relu(z)\nreturn y", "line 2: z is not defined"),
        ("x: float32[4] = input 0\nx: float32[4] = relu(x)\nreturn x", "line 2: x is defined again"),
        ("x: float32[4] = input 0\ny = relu(x)\nreturn y", "line 2: 'y' does not define values"),
        ("x: float32[4] = input 0", "no line of outputs"),
        ("x: float32[4] = input 0\nreturn x\nreturn x", "line 3: nothing comes behind the outputs"),
        ("hello", "line 1: this is neither a source nor a node"),
        ("x: float7[4] = input 0\nreturn x", "line 1: .*float7"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(TextError, match=message):
        parse_S(text)


def test_operations_from_text_do_not_run() -> None:
    node = parse_S(layers(1)).d.nodes[0]
    with pytest.raises(Exception, match="linear was read from text, and cannot be run"):
        node.op(torch.zeros(1))
