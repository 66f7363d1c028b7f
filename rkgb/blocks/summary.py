"""How large the graphs of a module are, as one line."""

from __future__ import annotations

from dataclasses import dataclass

from rkgb.graphs import D_graph, S_graph
from rkgb.units import format_bytes


@dataclass(frozen=True, slots=True)
class Summary:
    """Sizes of the graphs of one module.

    ``operations``: nodes of D. ``nodes``: nodes of S. ``classes``: distinct blocks. ``largest_block``: the most nodes
    of a block that may be recomputed, on which its integer program decides. ``widest_interface``: the most storages
    that cross from a block to later ones, without ambient ones such as masks. ``interface_bytes``: the most bytes that
    cross.
    """

    operations: int
    nodes: int
    blocks: int
    classes: int
    largest_block: int
    widest_interface: int
    interface_bytes: int

    def __str__(self) -> str:
        return (
            f"operations {self.operations} · nodes {self.nodes} · blocks {self.blocks} · classes {self.classes} · "
            f"largest block {self.largest_block} · widest interface {self.widest_interface} "
            f"({format_bytes(self.interface_bytes)})"
        )


def summarize(d: D_graph, s: S_graph, classes: tuple[int, ...]) -> Summary:
    """The sizes of ``d`` and of ``s``, which is cut; ``classes``: one number a block."""
    passed = interfaces(s)
    return Summary(
        operations=len(d.nodes),
        nodes=len(s.nodes),
        blocks=len(s.blocks),
        classes=len(set(classes)),
        largest_block=max((sum(not n.fixed for n in s.nodes[a:b]) for a, b in s.blocks), default=0),
        widest_interface=max(map(len, passed), default=0),
        interface_bytes=max((sum(s.d.storages[x].bytes for x in each) for each in passed), default=0),
    )


def interfaces(s: S_graph) -> list[tuple[int, ...]]:
    """For each block the storages that it or earlier blocks make and later blocks read, without ambient ones."""
    last = {s.d.values[v].storage: i for i, node in enumerate(s.nodes) for v in node.reads}
    made = [(x, i) for i, node in enumerate(s.nodes) if not node.fixed for x in node.storages]
    return [tuple(x for x, i in made if i < stop <= last.get(x, i)) for _, stop in s.blocks]
