"""Numbers that an ``autograd.Function`` is given, or computes with, in a captured program.

TorchDynamo captures the two parts of such a function as programs of their own, which are given the numbers that differ
between calls, and compute with them. Here these computations move in front of the function. Where a part multiplies a
tensor by a number, or the like, the number becomes an argument that may be a tensor: see ``rockmate.calls.numbers``.
"""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

from torch import fx

from rockmate.calls.numbers import TYPES, NumberUse, is_number, type_beside


def move_numbers_out(program: fx.GraphModule) -> None:
    """Move what functions in ``program`` compute with numbers alone in front of them."""
    called = [n for n in program.graph.nodes if str(getattr(n.target, "_name", "")) == "autograd_function_apply"]
    times = Counter(str(body.target) for node in called for body in node.args[:2])
    moved = [
        node
        for node in called
        if all(times[str(body.target)] == 1 for body in node.args[:2]) and _Function(program, node).moved()
    ]
    if moved:
        program.recompile()


class _Function:
    """One call of an ``autograd.Function``.

    ``forward`` is given ``arguments`` and returns outputs, and what is ``kept``; ``backward`` is given gradients of the
    outputs, and then what is kept, and returns a gradient for each argument.
    """

    def __init__(self, program: fx.GraphModule, node: fx.Node) -> None:
        self.graph, self.node = program.graph, node
        self.forward, self.backward = (getattr(program, str(body.target)) for body in node.args[:2])  # type: ignore[union-attr]
        self.arguments: list[Any] = list(node.args[2:])
        outputs, kept = _returned(self.forward)
        self.outputs: Any = outputs
        self.kept: list[Any] = list(kept)
        self.gradients: list[Any] = list(_returned(self.backward))
        self.added: dict[NumberUse, tuple[fx.Node, fx.Node]] = {}  # the argument, and the input of forward

    def moved(self) -> bool:
        """Move its numbers out; whether it has any."""
        several = self.outputs if isinstance(self.outputs, (tuple, list)) else (self.outputs,)
        inputs, later = _inputs(self.forward), _inputs(self.backward)
        given = [
            (i, a) for i, a in zip(inputs, self.arguments, strict=False) if isinstance(a, fx.Node) and is_number(a)
        ]
        fits = len(inputs) == len(self.arguments) == len(self.gradients) and len(later) == len(several) + len(self.kept)
        if not given or not fits or any(isinstance(x, fx.Node) and is_number(x) for x in (*several, *self.gradients)):
            return False
        outside = self._computed_outside(self.forward, dict(given))
        of_kept = [(i, outside[k]) for i, k in zip(later[len(several) :], self.kept, strict=True) if k in outside]
        outside_later = self._computed_outside(self.backward, dict(of_kept))
        self.kept = [k for k in self.kept if k not in outside]
        for use, readers in _uses(self.forward, outside).items():
            _read(readers, self._argument(use)[1], use[1] is not None)
        for use, readers in _uses(self.backward, outside_later).items():
            self.kept.append(self._argument(use)[1])
            _read(readers, _new_input(self.backward, use[0]), use[1] is not None)
        stays = [i not in outside for i in inputs]
        left = [a for a, stay in zip(self.arguments, stays, strict=True) if stay]
        gradients = [g for g, stay in zip(self.gradients, stays, strict=True) if stay]
        _output(self.forward).args = ((self.outputs, tuple(self.kept)),)
        _output(self.backward).args = ((*gradients, *[None] * len(self.added)),)
        self.node.args = (*self.node.args[:2], *left, *(argument for argument, _ in self.added.values()))
        self.node.meta[TYPES] = {argument: dtype for (_, dtype), (argument, _) in self.added.items()}
        for body, gone in (self.forward, outside), (self.backward, outside_later):
            for x in reversed(gone):
                body.graph.erase_node(x)
            body.recompile()
        return True

    def _computed_outside(self, body: fx.GraphModule, known: dict[fx.Node, fx.Node]) -> dict[fx.Node, fx.Node]:
        """Numbers in ``body``, and the same in front of the call; ``known``: of its inputs."""
        for x in body.graph.nodes:
            read = x.all_input_nodes
            if x.op == "call_function" and read and is_number(x) and all(n in known for n in read):
                with self.graph.inserting_before(self.node):
                    known[x] = self.graph.node_copy(x, known.__getitem__)
        return known

    def _argument(self, use: NumberUse) -> tuple[fx.Node, fx.Node]:
        """A new argument that is the number of ``use``, and the input of the forward that it is given as."""
        if use not in self.added:
            with self.graph.inserting_before(self.node):
                argument = self.graph.call_function(operator.pos, (use[0],))
            argument.meta = dict(use[0].meta)
            self.added[use] = argument, _new_input(self.forward, use[0])
        return self.added[use]


def _uses(body: fx.GraphModule, outside: dict[fx.Node, fx.Node]) -> dict[NumberUse, list[tuple[fx.Node, fx.Node]]]:
    """Which numbers the other operations of ``body`` read: the readers, each with the number in ``body``."""
    found: dict[NumberUse, list[tuple[fx.Node, fx.Node]]] = {}
    for node in body.graph.nodes:
        if node not in outside and node.op != "output":
            for x in node.all_input_nodes:
                if x in outside:
                    found.setdefault((outside[x], type_beside(node, x)), []).append((node, x))
    return found


def _read(readers: list[tuple[fx.Node, fx.Node]], new: fx.Node, may_be_tensor: bool) -> None:
    """Let ``readers`` read ``new``; where it may be a tensor, in the order in which Python hands a number on."""
    for reader, number in readers:
        turned = may_be_tensor and reader.args[0] is number
        reader.replace_input_with(number, new)
        if turned:
            reader.args = tuple(reversed(reader.args))


def _inputs(body: fx.GraphModule) -> list[fx.Node]:
    return list(body.graph.find_nodes(op="placeholder"))


def _new_input(body: fx.GraphModule, like: fx.Node) -> fx.Node:
    """One more input of ``body``, the last, which is a number as ``like``."""
    *_, last = _inputs(body)
    with body.graph.inserting_after(last):
        found = body.graph.placeholder(f"{like.name}_outside")
    found.meta = dict(like.meta)
    return found


def _output(body: fx.GraphModule) -> fx.Node:
    found: fx.Node = next(iter(body.graph.find_nodes(op="output")))
    return found


def _returned(body: fx.GraphModule) -> Any:
    found = _output(body).args[0]
    return found if isinstance(found, (tuple, list)) else (found,)
