"""Graphs of PyTorch modules: B (basic), D (data flow), S (simplified), K (forward and backward)."""

from rkgb import Atools, Btools, Dtools, Ktools, Stools
from rkgb.errors import GraphError, MismatchError, TraceError, UnsupportedError
from rkgb.pipeline import Graphs, make_all_graphs

__all__ = [
    "Atools",
    "Btools",
    "Dtools",
    "GraphError",
    "Graphs",
    "Ktools",
    "MismatchError",
    "Stools",
    "TraceError",
    "UnsupportedError",
    "make_all_graphs",
]
