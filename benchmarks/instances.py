"""Synthetic graphs like the public ones: training graphs of chains and transformers, and layered graphs."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

from solvers import Backward, Block, Data, GraphNode, GraphProblem, Node, Problem


def with_backward(forward: list[GraphNode]) -> GraphProblem:
    """A training graph: ``forward``, then one gradient node per forward node, in reverse.

    The gradient node of i reads the gradient nodes of i's readers, and the outputs of i's inputs; it takes twice the
    time of i, and its output is as large as what i reads (as i's own output, if it reads nothing).
    """
    count = len(forward)
    readers: list[list[int]] = [[] for _ in forward]
    for i, node in enumerate(forward):
        for j in node.reads:
            readers[j].append(i)
    nodes = list(forward)
    for i in reversed(range(count)):
        gradients = [2 * count - 1 - j for j in readers[i]]
        size = sum(forward[j].size for j in forward[i].reads) or forward[i].size
        reads = tuple(sorted({*forward[i].reads, *gradients, *([i] if not readers[i] else [])}))
        nodes.append(GraphNode(f"grad.{forward[i].name}", 2 * forward[i].time, size, reads))
    return GraphProblem(tuple(nodes))


class _Builder:
    def __init__(self, batch: int, length: int, width: int, heads: int) -> None:
        self.nodes: list[GraphNode] = []
        self.tokens, self.length, self.width, self.heads = batch * length, length, width, heads

    def add(self, name: str, time: int, numbers: int, *reads: int) -> int:
        self.nodes.append(GraphNode(name, max(1, time), 4 * numbers, tuple(sorted(set(reads)))))
        return len(self.nodes) - 1

    def light(self, name: str, numbers: int, *reads: int) -> int:
        """An elementwise operation: its time is that of moving its bytes."""
        return self.add(name, numbers // 500, numbers, *reads)

    def product(self, name: str, inner: int, numbers: int, *reads: int) -> int:
        """A matrix product of ``inner`` multiplications per number of its result."""
        return self.add(name, 2 * inner * numbers // 20_000 + numbers // 500, numbers, *reads)

    def attention(self, name: str, x: int, memory: int) -> int:
        hidden, scores = self.tokens * self.width, self.tokens * self.length * self.heads
        norm = self.light(f"{name}.norm", hidden, x)
        q = self.product(f"{name}.q", self.width, hidden, norm)
        k = self.product(f"{name}.k", self.width, hidden, norm if memory == x else memory)
        v = self.product(f"{name}.v", self.width, hidden, norm if memory == x else memory)
        s = self.product(f"{name}.scores", self.width // self.heads, scores, q, k)
        p = self.light(f"{name}.softmax", scores, s)
        d = self.light(f"{name}.dropout", scores, p)
        o = self.product(f"{name}.mix", self.length, hidden, d, v)
        out = self.product(f"{name}.out", self.width, hidden, o)
        return self.light(f"{name}.add", hidden, out, x)

    def feed_forward(self, name: str, x: int) -> int:
        hidden = self.tokens * self.width
        norm = self.light(f"{name}.norm", hidden, x)
        up = self.product(f"{name}.up", self.width, 4 * hidden, norm)
        act = self.light(f"{name}.gelu", 4 * hidden, up)
        down = self.product(f"{name}.down", 4 * self.width, hidden, act)
        drop = self.light(f"{name}.dropout", hidden, down)
        return self.light(f"{name}.add", hidden, drop, x)


def encoder_decoder(layers: int, batch: int = 8, length: int = 256, width: int = 512, heads: int = 8) -> GraphProblem:
    """The training graph of a transformer with ``layers`` encoder and as many decoder layers: 84 nodes a pair."""
    b = _Builder(batch, length, width, heads)
    x = memory = b.light("source", b.tokens * width)
    for layer in range(layers):
        memory = b.attention(f"enc{layer}.attention", memory, memory)
        memory = b.feed_forward(f"enc{layer}.mlp", memory)
    x = b.light("target", b.tokens * width)
    for layer in range(layers):
        x = b.attention(f"dec{layer}.self", x, x)
        x = b.attention(f"dec{layer}.cross", x, memory)
        x = b.feed_forward(f"dec{layer}.mlp", x)
    b.light("loss", 1, x)
    return with_backward(b.nodes)


def layered(count: int, seed: int, density: float = 0.2, skips: float = 0.14) -> GraphProblem:
    """A random layered graph: wider with ``count``; each node reads some of the layer before, and a few older ones."""
    draw = random.Random(seed)
    width = max(2, round(count**0.7 / 5))
    layers: list[list[int]] = []
    nodes: list[GraphNode] = []
    while len(nodes) < count:
        size = min(count - len(nodes), max(1, round(width * draw.uniform(0.25, 1.75))))
        layer = list(range(len(nodes), len(nodes) + size))
        for i in layer:
            reads = {j for j in layers[-1] if draw.random() < density} | {draw.choice(layers[-1])} if layers else set()
            if len(layers) > 1 and draw.random() < skips:
                reads.add(draw.choice(draw.choice(layers[:-1])))
            nodes.append(GraphNode(f"n{i}", draw.randrange(1000), 10 * draw.randrange(1, 500), tuple(sorted(reads))))
        layers.append(layer)
    return GraphProblem(tuple(nodes))


def training_step(count: int, seed: int) -> Problem:
    """A random training step of ``count`` forward nodes: several data a node, generator states, outputs held."""
    draw = random.Random(seed)
    data: list[Data] = []
    nodes: list[Node] = []
    for i in range(count):
        made = tuple(range(len(data), len(data) + draw.randrange(1, 3)))
        reads = {draw.choice(nodes[j].makes) for j in range(max(0, i - 4), i) if draw.random() < 0.5}
        data += [Data(f"d{i}", draw.randrange(1000), i) for _ in made]
        peak = sum(data[d].size for d in made) + draw.randrange(200)
        rng = 16 if draw.random() < 0.1 else 0
        nodes.append(
            Node(f"n{i}", draw.randrange(100), tuple(sorted(reads)), made, peak, None, draw.random() < 0.9, rng)
        )
    gradients = 0
    for i in reversed(range(count)):
        if draw.random() < 0.8:
            after = draw.randrange(1000)
            own = {d for d in (*nodes[i].reads, *nodes[i].makes) if draw.random() < 0.6}
            peak = max(gradients, after) + draw.randrange(200)
            backward = Backward(draw.randrange(200), tuple(sorted(own)), gradients, peak, after)
            nodes[i] = replace(nodes[i], backward=backward)
            gradients = after
    cuts = sorted({0, count, *(draw.randrange(count) for _ in range(count // 4))})
    blocks = tuple(Block(a, b, k) for k, (a, b) in enumerate(pairwise(cuts)))
    held = frozenset(nodes[-1].makes[:1])
    return Problem(tuple(nodes), tuple(data), held, draw.randrange(1000), blocks)
