"""S: the simplified graph. A node is an operation, with the views of its result and the in-place operations on it."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from rkgb.blocks.uses import moved_uses, with_aliases
from rkgb.graphs import D_graph, S_graph, S_node, Saved
from rkgb.trace.guards import is_guard
from rkgb.trace.operators import STATISTICS


def statistics_of(d: D_graph, node: S_node) -> tuple[int, ...]:
    """The running statistics that ``node`` changes, of which a second run works on copies."""
    written = {x for op in node.ops if d.nodes[op].name in STATISTICS for x in d.facts[op].writes}
    return tuple(v for v in node.reads if d.values[v].storage in written)


def D_to_S(d: D_graph) -> S_graph:
    """Group the nodes of ``d`` that share memory. The graph is one block until ``cut``.

    Where an operation is moved to the memory that it changes, it reads its arguments through aliases, so that gradients
    are added in eager mode's order (see ``rkgb/blocks/uses.py``).
    """
    groups = _all_groups(d)
    while moved := moved_uses(d, groups):
        d = with_aliases(d, moved)
        groups = _all_groups(d)
    uses: dict[int, set[int]] = {v: {-1} for v in d.outputs}
    for index, ops in enumerate(groups):
        for op in ops:
            for v in d.nodes[op].reads():
                uses.setdefault(v, set()).add(index)
    nodes: list[S_node] = []
    clean: set[int] = {v for v in d.sources if not d.values[v].requires_grad}  # no gradient reaches these
    changed, statistics = _changed_sources(d)
    for index, ops in enumerate(groups):
        once = any(_reads_changing(d, op, changed, statistics) or d.facts[op].unseen for op in ops)
        nodes.append(_node(d, ops, index, uses, clean, once))
    s = S_graph(d, tuple(nodes), ((0, len(nodes)),) if nodes else (), (*d.made_by, "D_to_S"))
    s.verify()
    return s


def _all_groups(d: D_graph) -> list[list[int]]:
    """The groups, in the order in which they run."""
    together = _groups(d)
    groups = _ordered(d, together)
    late: set[int] = set()
    while more := _late_views(d, groups) - late:  # without these views, a group may leave others late
        late |= more
        groups = _ordered(d, [*([k for k in ops if k not in late] for ops in together), *_chains(d, sorted(late))])
    return groups


def _groups(d: D_graph) -> list[list[int]]:
    """Groups of D nodes that share memory; each node is in one."""
    from networkx.utils import UnionFind

    owner = [s.owner for s in d.storages]
    union = UnionFind(range(len(d.nodes)))
    readers: dict[int, list[int]] = {}  # storage -> D nodes that read it so far
    for k, (node, facts) in enumerate(zip(d.nodes, d.facts, strict=True)):
        for v in node.outputs:
            home = owner[d.values[v].storage]
            if home is not None:
                union.union(home, k)
        for s in facts.writes:
            home = owner[s]
            if home is not None:  # nodes that read the old content belong to the same group
                union.union(home, k, *readers.get(s, ()))
        for v in node.reads():
            readers.setdefault(d.values[v].storage, []).append(k)
    return [sorted(group) for group in union.to_sets()]


def _ordered(d: D_graph, groups: list[list[int]]) -> list[list[int]]:
    """The groups in a topological order close to the program's; groups that depend on each other become one."""
    import networkx as nx

    of = {op: g for g, ops in enumerate(groups) for op in ops}
    maker = {v: k for k, n in enumerate(d.nodes) for v in n.outputs}
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(groups)))
    last_write: dict[int, int] = {}
    readers: dict[int, list[int]] = {}  # of each storage, since the last write
    for k, node in enumerate(d.nodes):
        sources = [of[maker[v]] for v in node.reads() if v in maker]
        read = {d.values[v].storage for v in node.reads()}
        sources += [of[last_write[s]] for s in read.union(d.facts[k].writes) if s in last_write]
        sources += [of[reader] for s in d.facts[k].writes for reader in readers.pop(s, ())]
        for s in read:
            readers.setdefault(s, []).append(k)
        graph.add_edges_from((g, of[k]) for g in sources if g != of[k])
        last_write.update(dict.fromkeys(d.facts[k].writes, k))
    random = [of[k] for k, f in enumerate(d.facts) if f.random]
    graph.add_edges_from((a, b) for a, b in itertools.pairwise(random) if a != b)  # draws stay in order
    merged = nx.condensation(graph)
    members = {c: sorted(op for g in data["members"] for op in groups[g]) for c, data in merged.nodes(data=True)}
    order = nx.lexicographical_topological_sort(merged, key=lambda c: _position(d, members[c]))
    return [members[c] for c in order]


def _late_views(d: D_graph, groups: list[list[int]]) -> set[int]:
    """Views that stay where the program takes them, so that gradients are added in eager mode's order.

    Autograd adds the gradients of a value's uses in reverse order. The order decides how a sum of three is rounded, and
    the strides of a sum of two. So a view is not moved to its base if the base has other uses, and if later groups
    begin before the view is taken.
    """
    uses: dict[int, int] = dict.fromkeys(d.outputs, 1)
    written: dict[int, int] = {}  # storage -> the last write
    for k, node in enumerate(d.nodes):
        written.update(dict.fromkeys(d.facts[k].writes, k))
        if _differentiable(d, k):
            for v in node.reads():
                uses[v] = uses.get(v, 0) + 1
    late: set[int] = set()
    made_late: set[int] = set()
    begins = len(d.nodes)  # the first operation of the groups behind
    for ops in reversed(groups):
        for k in ops:
            node = d.nodes[k]
            if _is_view(d, k) and written.get(d.values[node.outputs[0]].storage, -1) < k:
                base = node.reads()[0]
                if base in made_late or (begins < k and uses[base] >= 2):
                    late.add(k)
                    made_late.update(node.outputs)
        begins = min([begins, *(k for k in ops if _differentiable(d, k))])
    return late


def _differentiable(d: D_graph, k: int) -> bool:
    return any(d.values[v].requires_grad for v in d.nodes[k].outputs)


def _is_view(d: D_graph, k: int) -> bool:
    """Whether D node k returns a view of memory that an earlier node allocated, through which gradients flow.

    It reads nothing else that the program makes, as a function of the user's may: else it could not be taken anew with
    its base alone.
    """
    outputs = d.nodes[k].outputs
    owners = {d.storages[d.values[v].storage].owner for v in outputs}
    if not _differentiable(d, k) or d.facts[k].writes or len(owners) != 1 or owners & {k, None}:
        return False
    return all(d.storages[d.values[v].storage].owner in owners for v in d.nodes[k].reads() if v not in d.sources)


def _chains(d: D_graph, views: list[int]) -> list[list[int]]:
    """The views in groups: a view of the view before it joins its group."""
    chains: list[list[int]] = []
    for k in views:
        before = d.nodes[chains[-1][-1]].outputs if chains and chains[-1][-1] == k - 1 else ()
        if set(d.nodes[k].reads()) & set(before):
            chains[-1].append(k)
        else:
            chains.append([k])
    return chains


def _position(d: D_graph, ops: list[int]) -> int:
    """The preferred place of a group in the program: that of its first operation that is no view.

    A group stands later if it reads a value that is made later (an in-place sum with another branch).
    """
    real = [
        k
        for k in ops
        if d.facts[k].writes or any(d.storages[d.values[v].storage].owner == k for v in d.nodes[k].outputs)
    ]
    return min(real, default=ops[0])


def _changed_sources(d: D_graph) -> tuple[set[int], set[int]]:
    """Storages of inputs and buffers that the program changes, and those of them that are running statistics."""
    changed: set[int] = set()
    statistics: set[int] = set()
    for node, facts in zip(d.nodes, d.facts, strict=True):
        found = (s for s in facts.writes if d.storages[s].owner is None)
        (statistics if node.name in STATISTICS else changed).update(found)
    return changed, statistics


def _reads_changing(d: D_graph, k: int, changed: set[int], statistics: set[int]) -> bool:
    """Whether D node k reads an input or buffer that the program changes, so that it cannot run again."""
    node = d.nodes[k]
    read = {d.values[v].storage for v in node.reads()}
    own = d.facts[k].writes if node.name in STATISTICS else ()
    return not read.isdisjoint(changed) or not read.isdisjoint(statistics.difference(own))


def saved_by(d: D_graph, ops: Sequence[int], storages: Collection[int]) -> Saved:
    """What ``ops`` save. Of what they allocate beside ``storages`` only they know, as of what is private to each."""
    known = dict.fromkeys(s for op in ops for s in d.facts[op].saved.storages)
    inner = [s for s in known if d.storages[s].owner in ops and s not in storages]
    private = (*(b for op in ops for b in d.facts[op].saved.private), *(d.storages[s].bytes for s in inner))
    return Saved(tuple(s for s in known if s not in inner), private)


def _node(d: D_graph, ops: list[int], index: int, uses: dict[int, set[int]], clean: set[int], once: bool) -> S_node:
    made = [v for op in ops for v in d.nodes[op].outputs]
    reads = tuple(dict.fromkeys(v for op in ops for v in d.nodes[op].reads() if v not in made))
    makes = tuple(v for v in made if uses.get(v, set()) - {index})
    mine = {s for s in {d.values[v].storage for v in made} if d.storages[s].owner in ops}
    storages = tuple(dict.fromkeys(s for v in makes for s in [d.values[v].storage] if s in mine))
    main = next((op for op in ops if any(d.values[v].storage in mine for v in d.nodes[op].outputs)), ops[0])
    requires_grad = any(d.values[v].requires_grad for v in made)
    random = any(d.facts[op].random for op in ops)
    pure = not requires_grad and not random and all(v in clean for v in reads)
    if pure:
        clean.update(made)
    return S_node(
        name=d.nodes[main].name,
        ops=tuple(ops),
        reads=reads,
        makes=makes,
        storages=storages,
        saved=saved_by(d, ops, storages),
        requires_grad=requires_grad,
        random=random,
        fixed=once
        or pure
        or (not mine and all(_is_view(d, op) for op in ops))
        or all(is_guard(d.nodes[op]) for op in ops),
        label=d.nodes[main].label,
    )
