"""The sizes of graphs, counted by hand on a model that is small enough."""

from __future__ import annotations

import torch
from models import Skip
from torch import nn

from rkgb import Summary, make_all_graphs
from rkgb.blocks.summary import interfaces, summarize


def test_a_module_counted_by_hand() -> None:
    graphs = make_all_graphs(Skip(), torch.randn(8, 8), costs="flops")
    # ones, triu; linear; 3 × (linear, mul); add with its view
    assert [node.name for node in graphs.S.nodes] == ["ones", "triu", "linear", *["linear", "mul"] * 3, "add"]
    s = graphs.S.with_blocks(((0, 3), (3, 7), (7, 10)))
    assert summarize(graphs.D, s, (0, 1, 2)) == Summary(
        operations=11, nodes=10, blocks=3, classes=3, largest_block=4, widest_interface=2, interface_bytes=512
    )
    names = [[s.d.storages[x].owner for x in passed] for passed in interfaces(s)]
    assert names == [[2], [2, 6], []]  # D nodes: the first linear, and the second mul
    assert str(summarize(graphs.D, s, (0, 1, 2))) == (
        "operations 11 · nodes 10 · blocks 3 · classes 3 · largest block 4 · widest interface 2 (512 B)"
    )


def test_graphs_know_their_sizes() -> None:
    graphs = make_all_graphs(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8), costs="flops")
    assert graphs.summary() == Summary(2, 2, 1, 1, 2, 0, 0)
