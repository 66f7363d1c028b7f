"""The reference semantics of schedules of a ``GraphProblem``: a walk that checks each step and counts bytes in use.

Shares no code with the solvers. Memory while a step executes is

- ``Run(i)``: live outputs before it (an older copy of its own included) + ``size`` + ``transient`` of node i;
- ``Del(i)``: live outputs after it.
"""

from __future__ import annotations

from solvers.errors import ProblemError, ScheduleError
from solvers.schedule import Del, Run, Schedule
from solvers.walker import Walk
from solvers.whole.graph import GraphProblem


def walk_graph(problem: GraphProblem, schedule: Schedule) -> Walk:
    """Check ``schedule`` and return its costs; time in the problem's unit.

    Raises ``ScheduleError``, which names the first step that is not allowed, and ``ProblemError`` if ``problem`` is not
    a ``GraphProblem`` (``walk`` is for a ``Problem``).
    """
    if not isinstance(problem, GraphProblem):
        raise ProblemError(
            f"walk_graph takes a GraphProblem; for a {type(problem).__name__} there may be another: walk"
        )
    nodes = problem.nodes
    live: set[int] = set()
    missing = set(range(len(nodes)))
    used = time = 0
    timeline: list[int] = []
    for at, step in enumerate(schedule):
        match step:
            case Run(i) if 0 <= i < len(nodes):
                node = nodes[i]
                for j in node.reads:
                    if j not in live:
                        raise ScheduleError(f"step {at} (run {node.name}) reads {nodes[j].name}, which is not live")
                timeline.append(used + node.size + node.transient)
                time += node.time
                missing.discard(i)
                if i not in live:
                    live.add(i)
                    used += node.size
            case Del(i) if 0 <= i < len(nodes):
                if i not in live:
                    raise ScheduleError(f"step {at} (del {nodes[i].name}) deletes an output that is not live")
                live.remove(i)
                used -= nodes[i].size
                timeline.append(used)
            case Run(i) | Del(i):
                raise ScheduleError(f"step {at}: no node {i}")
            case _:
                raise ScheduleError(f"step {at} ({step}): a schedule of a graph has Run and Del steps only")
    if missing:
        raise ScheduleError(f"step {len(schedule)} (end): {nodes[min(missing)].name} never ran")
    peak = max(timeline, default=0)
    eager = sum(node.time for node in nodes)
    return Walk(peak, timeline.index(peak) if timeline else 0, time, eager, tuple(timeline))
