"""Problems for the tests of the solvers: hand-written, random, and a transformer chain."""

from __future__ import annotations

from solvers.problem import Backward, Block, Data, Node, Problem

MIB = 2**20


def gpt_chain(layers: int, batch: int = 8, seq: int = 512, dim: int = 512, heads: int = 8) -> Problem:
    """``layers`` transformer layers of 17 nodes each; times from a flop and bandwidth count."""
    act = batch * seq * dim * 4
    att = batch * heads * seq * seq * 4
    nodes: list[Node] = []
    data: list[Data] = []
    pending: list[tuple[str, list[int], int, int, list[int], bool, int, int]] = []

    def flops(m: int, k: int, n: int) -> float:
        return 2 * m * k * n / 60e12 + 4 * (m * k + k * n + m * n) / 4e12

    def move(size: int) -> float:
        return size / 4e12

    def add(name: str, ins: list[int], out: int, extra: int, keeps: list[int], own: bool, seconds: float) -> int:
        """``ins``: positions of nodes whose outputs are read; ``keeps``: which of them the backward reads."""
        pending.append((name, ins, out, extra, keeps, own, round(seconds * 1e9), 0))
        return len(pending) - 1

    x = -1
    rows = batch * seq
    for layer in range(layers):
        p = f"h{layer}."
        ln1 = add(p + "ln1", [x], act, rows * 8, [x], False, move(2 * act))
        qkv = add(p + "qkv", [ln1], 3 * act, 0, [ln1], False, flops(rows, dim, 3 * dim))
        qk = add(p + "qk", [qkv], att, 0, [qkv], False, flops(batch * heads * seq, dim // heads, seq))
        mask = add(p + "mask", [qk], att, 0, [], False, move(2 * att))
        soft = add(p + "softmax", [mask], att, 0, [], True, move(2 * att))
        drop = add(p + "drop", [soft], att, att // 4, [], False, move(2 * att))
        av = add(p + "av", [drop, qkv], act, 0, [drop, qkv], False, flops(batch * heads * seq, seq, dim // heads))
        merge = add(p + "merge", [av], act, 0, [], False, move(2 * act))
        proj = add(p + "proj", [merge], act, 0, [merge], False, flops(rows, dim, dim))
        drop2 = add(p + "drop2", [proj], act, act // 4, [], False, move(2 * act))
        add1 = add(p + "add1", [drop2, x], act, 0, [], False, move(3 * act))
        ln2 = add(p + "ln2", [add1], act, rows * 8, [add1], False, move(2 * act))
        fc1 = add(p + "fc1", [ln2], 4 * act, 0, [ln2], False, flops(rows, dim, 4 * dim))
        gelu = add(p + "gelu", [fc1], 4 * act, 0, [fc1], False, move(8 * act))
        fc2 = add(p + "fc2", [gelu], act, 0, [gelu], False, flops(rows, 4 * dim, dim))
        drop3 = add(p + "drop3", [fc2], act, act // 4, [], False, move(2 * act))
        x = add(p + "add2", [drop3, add1], act, 0, [], False, move(3 * act))
    outs: list[int] = []
    makes: list[tuple[int, ...]] = []
    for i, (name, _, out, extra, _, _, _, _) in enumerate(pending):
        outs.append(len(data))
        made = [len(data)]
        data.append(Data(name, out, i))
        if extra:
            made.append(len(data))
            data.append(Data(f"{name}.saved", extra, i))
        makes.append(tuple(made))
    gradients = {len(pending) - 1}
    figures: dict[int, tuple[int, int, int]] = {}
    for i in reversed(range(len(pending))):
        before = sum(data[outs[g]].size for g in gradients)
        gradients |= {j for j in pending[i][1] if j >= 0}
        peak = sum(data[outs[g]].size for g in gradients)
        gradients.discard(i)
        figures[i] = (before, peak, sum(data[outs[g]].size for g in gradients))
    for i, (name, ins, _, _, keeps, own, time, _) in enumerate(pending):
        reads = [outs[j] for j in keeps if j >= 0] + ([outs[i]] if own else []) + list(makes[i][1:])
        before, peak, after = figures[i]
        nodes.append(
            Node(
                name=name,
                time=time,
                reads=tuple(outs[j] for j in ins if j >= 0),
                makes=makes[i],
                peak=sum(data[d].size for d in makes[i]),
                backward=Backward(2 * time, tuple(reads), before, peak, after),
            )
        )
    blocks = tuple(Block(17 * k, 17 * (k + 1), 0) for k in range(layers))
    return Problem(tuple(nodes), tuple(data), frozenset({outs[x]}), act, blocks)


def lin_relu_lin() -> Problem:
    """Two linear layers around a relu, by hand: one block per node, sizes in MiB."""
    data = (Data("x", MIB, 0), Data("h1", 2 * MIB, 1), Data("h2", 2 * MIB, 2), Data("y", MIB, 3))
    nodes = (
        Node("input", 0, (), (0,), MIB, None),
        Node("lin1", 100, (0,), (1,), 2 * MIB, Backward(200, (0,), 2 * MIB, 3 * MIB, 0)),
        Node("relu", 10, (1,), (2,), 2 * MIB, Backward(10, (2,), 2 * MIB, 4 * MIB, 2 * MIB)),
        Node("lin2", 50, (2,), (3,), MIB, Backward(100, (2,), MIB, 3 * MIB, 2 * MIB)),
    )
    blocks = (Block(0, 2, 0), Block(2, 4, 1))
    return Problem(nodes, data, frozenset({3}), MIB, blocks)
