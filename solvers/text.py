"""Schedules as text: ``format_schedule`` prints one, ``parse_schedule`` reads it back.

Each step has a line. Its comment has the walker's figures, and is ignored by the parser::

    def step():                          # peak 6.0 MiB in bwd.relu, time +21.0 %
        h1, s1 = fwd.lin1(x)             # 2.0 MiB
        del x                            # 1.5 MiB
        loss()                           # 2.5 MiB
        bwd.lin1(s1)                     # 3.0 MiB

The schedule of a ``GraphProblem`` has ``fwd`` and ``del`` lines only. The output of a node has the node's name.
``solvers.files.files`` prints and parses problems.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from solvers.errors import ScheduleError
from solvers.liveness import makes_of, reads_of
from solvers.problem import Problem
from solvers.schedule import Bwd, Del, Loss, Run, Schedule, Step
from solvers.units import show_bytes
from solvers.walker import walk
from solvers.whole.graph import GraphProblem
from solvers.whole.walker import walk_graph

_CALL = re.compile(r"(?:(?P<makes>[^=()]*?) = )?(?P<verb>fwd|bwd)\.(?P<node>[^\s()=,]+)\((?P<reads>[^()]*)\)")
_WIDTH, _WIDEST = 48, 80  # columns before the comments


def format_bytes(size: int) -> str:
    """``size`` bytes as text, such as ``1.5 MiB``: exact below one KiB, with one decimal above."""
    return f"{size} B" if abs(size) < 1024 else show_bytes(size)


def unique_names(names: Iterable[str]) -> tuple[str, ...]:
    """Printable names, one for each of ``names``, all different: repeated names get their index as a suffix."""
    clean = [re.sub(r"[^\w.]", "_", name) or "_" for name in names]
    count = Counter(clean)
    taken = {name for name, n in count.items() if n == 1}
    unique: list[str] = []
    for index, name in enumerate(clean):
        if count[name] > 1:
            name = f"{name}_{index}"
            while name in taken:
                name += "_"
            taken.add(name)
        unique.append(name)
    return tuple(unique)


class _Names:
    """The printed names of the nodes and data of one problem."""

    def __init__(self, problem: Problem | GraphProblem) -> None:
        self.nodes = unique_names(n.name for n in problem.nodes)
        self.data = self.nodes if isinstance(problem, GraphProblem) else unique_names(d.name for d in problem.data)

    def join(self, data: Iterable[int]) -> str:
        return ", ".join(self.data[d] for d in data)


def _line(problem: Problem | GraphProblem, names: _Names, step: Step) -> str:
    match step:
        case Run(i) | Bwd(i) if not 0 <= i < len(problem.nodes):
            return f"{'fwd' if isinstance(step, Run) else 'bwd'}.?{i}()"
        case Del(d) if not 0 <= d < len(names.data):
            return f"del ?{d}"
    read = names.join(reads_of(problem, step))
    match step:
        case Run(i):
            made = names.join(makes_of(problem, step))
            return f"{made} = fwd.{names.nodes[i]}({read})" if made else f"fwd.{names.nodes[i]}({read})"
        case Bwd(i):
            return f"bwd.{names.nodes[i]}({read})"
        case Del(d):
            return f"del {names.data[d]}"
        case Loss():
            return f"loss({read})"
        case _:
            return f"?{step!r}"


def format_schedule(problem: Problem | GraphProblem, schedule: Schedule, places: Sequence[str] = ()) -> str:
    """``schedule`` as a program, with the memory of each step; a forbidden one prints, with the reason.

    ``places``: the user's source line of each node, to be shown beside its forward and its backward. The program then
    also says where each block begins, forward and backward.
    """
    names = _Names(problem)
    lines = [_line(problem, names, step) for step in schedule]
    try:
        walked = walk_graph(problem, schedule) if isinstance(problem, GraphProblem) else walk(problem, schedule)
    except ScheduleError as error:
        head, memory = f"not valid: {error}", [""] * len(lines)
    else:
        at = lines[walked.peak_step] if lines else "nothing"
        head = f"peak {format_bytes(walked.peak)} at {at}, time {100 * walked.overhead:+.1f} %"
        memory = [format_bytes(size) for size in walked.timeline]
    width = min(max([_WIDTH, *(len(line) + 4 for line in lines)]), _WIDEST)
    longest = max(map(len, memory), default=0) if places else 0
    text = [f"{'def step():':<{width}}  # {head}"]
    headings = _headings(problem, schedule) if places and isinstance(problem, Problem) else {}
    seen: set[int] = set()
    for k, (step, line, used) in enumerate(zip(schedule, lines, memory, strict=True)):
        text += [f"    # {headings[k]}"] if k in headings else []
        again = isinstance(step, Run) and step.node in seen
        if isinstance(step, Run):
            seen.add(step.node)
        place = places[step.node] if places and isinstance(step, Run | Bwd) else ""
        comment = "  ".join(
            part for part in (used.ljust(longest), place, "recompute" if again else "") if part
        ).rstrip()
        text.append(f"    {line:<{width - 4}}  # {comment}" if comment else f"    {line}")
    return "\n".join(text) + "\n"


def _headings(problem: Problem, schedule: Schedule) -> dict[int, str]:
    """Where in the schedule each block begins, as a line; what runs again belongs to the next backward."""
    names = unique_names(node.name for node in problem.nodes)
    block_of = {i: b for b, block in enumerate(problem.blocks) for i in range(block.start, block.stop)}
    places: list[tuple[int, bool] | None] = []  # of each step: block, and whether in the backward phase
    following: int | None = None  # the next backward
    for step in reversed(schedule):
        following = step.node if isinstance(step, Bwd) else None if isinstance(step, Loss) else following
        node = step.node if isinstance(step, Run | Bwd) else None
        places.append(
            None if node is None else (block_of[node if following is None else following], following is not None)
        )
    found: dict[int, str] = {}
    current: tuple[int, bool] | None = None
    for k, place in enumerate(reversed(places)):
        if place is not None and place != current:
            current = b, in_backward = place
            ends = " … ".join(dict.fromkeys((names[problem.blocks[b].start], names[problem.blocks[b].stop - 1])))
            found[k] = f"block {b}{', backward' if in_backward else ''}: {ends}"
    return found


def parse_schedule(problem: Problem | GraphProblem, text: str) -> Schedule:
    """The schedule that ``format_schedule`` printed as ``text``. ``ScheduleError`` names a line that is no step."""
    names = _Names(problem)
    nodes = {name: i for i, name in enumerate(names.nodes)}
    data = {name: d for d, name in enumerate(names.data)}
    steps: list[Step] = []
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.split("#", 1)[0].strip()
        if line and line != "def step():":
            step = _parse_line(line, nodes, data)
            if step is None or _line(problem, names, step) != line:
                hint = "" if step is None else f"; this problem has: {_line(problem, names, step)}"
                raise ScheduleError(f"line {number}: cannot read {line!r}{hint}")
            steps.append(step)
    return tuple(steps)


def _parse_line(line: str, nodes: dict[str, int], data: dict[str, int]) -> Step | None:
    if re.fullmatch(r"loss\([^()]*\)", line):
        return Loss()
    if line.startswith("del ") and line[4:] in data:
        return Del(data[line[4:]])
    call = _CALL.fullmatch(line)
    if call is None or call["node"] not in nodes:
        return None
    i = nodes[call["node"]]
    return Run(i) if call["verb"] == "fwd" else Bwd(i)
