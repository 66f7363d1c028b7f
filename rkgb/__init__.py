"""Graphs of PyTorch modules: B (basic), D (data flow), S (simplified), K (forward and backward)."""

from rkgb import Atools, Btools, Dtools, Ktools, Stools
from rkgb.blocks.summary import Summary
from rkgb.errors import GraphError, MeasureError, MismatchError, RenderWarning, TraceError, UnsupportedError
from rkgb.pipeline import Graphs, make_all_graphs
from rkgb.render import print_all_graphs, print_graph, test_rkgb
from rkgb.sample import Sample

__all__ = [
    "Atools",
    "Btools",
    "Dtools",
    "GraphError",
    "Graphs",
    "Ktools",
    "MeasureError",
    "MismatchError",
    "RenderWarning",
    "Sample",
    "Stools",
    "Summary",
    "TraceError",
    "UnsupportedError",
    "make_all_graphs",
    "print_all_graphs",
    "print_graph",
    "test_rkgb",
]
