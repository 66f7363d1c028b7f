"""Problems as text and files: every kind comes back equal, public graphs are read, bad ones refused with the place."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from graph_strategies import graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from solver_cases import lin_relu_lin
from solver_strategies import problems
from test_rotor import chains

from solvers import (
    GraphNode,
    GraphProblem,
    Problem,
    ProblemError,
    format_problem,
    parse_problem,
    read_problem,
    write_problem,
)
from solvers.rotor.chain import Chain

CHECKMATE = {
    "nodes": [
        {"name": "a", "id": 0, "cost_cpu": 3, "cost_ram": 10, "backward": False},
        {"name": "b", "id": 1, "cost_cpu": 4.0, "cost_ram": 10.5, "backward": True},
    ],
    "links": [{"source": 0, "target": 1}, {"source": 0, "target": 1}],
}
LAYERED = {
    "graph": {"order": [0, 7, 2, 1]},
    "nodes": [{"name": i, "duration": i / 4, "out_cost": 5 + i} for i in (0, 1, 2, 7)],
    "links": [{"0": 0, "1": 2}, {"0": 0, "1": 7}, {"0": 7, "1": 1}, {"0": 2, "1": 1}],
}


def read(tmp_path: Path, content: object) -> Any:
    path = tmp_path / "problem.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return read_problem(path)


@settings(deadline=None, max_examples=50)
@given(st.one_of(graphs(), problems(), chains()))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, problem: GraphProblem | Problem | Chain) -> None:
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    write_problem(problem, path)
    assert read_problem(path) == problem
    text = format_problem(problem)
    assert parse_problem(text) == problem
    assert json.loads(text) == json.loads(path.read_text())


LIN_RELU_LIN = """\
{
"format": "rockmate-problem",
"version": 1,
"kind": "step",
"nodes": [
  {"name": "input", "time": 0, "reads": [], "makes": [0], "peak": 1048576, "backward": null, "rerun": true, "rng": 0, \
"warm": null, "within": null},
"""


def test_text_has_a_line_for_each_node() -> None:
    text = format_problem(lin_relu_lin())
    assert text.startswith(LIN_RELU_LIN)
    assert text.splitlines()[-6:] == [
        '"blocks": [',
        '  {"start": 0, "stop": 2, "kind": 0},',
        '  {"start": 2, "stop": 4, "kind": 1}',
        "],",
        '"returned": []',
        "}",
    ]
    with pytest.raises(ProblemError, match=r"^is not JSON: Expecting value"):
        parse_problem("")
    with pytest.raises(ProblemError, match=r"^a chain has at least one stage"):
        parse_problem(json.dumps(ours("chain", stages=[], values=[], output_gradient=0)))


def test_a_graph_is_written_as_documented(tmp_path: Path) -> None:
    problem = GraphProblem((GraphNode("x", 2, 10**13, ()), GraphNode("y", 3, 1, (0,), 7)), "us")
    write_problem(problem, tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text()) == {
        "format": "rockmate-problem",
        "version": 1,
        "kind": "graph",
        "unit": "us",
        "scale": 1,
        "nodes": [
            {"name": "x", "time": 2, "size": 10**13, "reads": [], "transient": 0},
            {"name": "y", "time": 3, "size": 1, "reads": [0], "transient": 7},
        ],
    }


def test_checkmate_graphs(tmp_path: Path) -> None:
    """A link given twice is one; bytes are rounded up; whole times stay."""
    nodes = (GraphNode("a", 3, 10, ()), GraphNode("b", 4, 11, (0,)))
    assert read(tmp_path, CHECKMATE) == GraphProblem(nodes, "the file's own")


def test_layered_graphs(tmp_path: Path) -> None:
    """The file's order counts; times are scaled to whole numbers."""
    assert read(tmp_path, LAYERED) == GraphProblem(
        (
            GraphNode("0", 0, 5, ()),
            GraphNode("7", 175, 12, (0,)),
            GraphNode("2", 50, 7, (0,)),
            GraphNode("1", 25, 6, (1, 2)),
        ),
        "the file's own",
        100,
    )


def test_nodes_keep_the_order_of_the_file_as_far_as_links_allow(tmp_path: Path) -> None:
    nodes = [{"id": i, "cost_cpu": 1, "cost_ram": 1} for i in "dcba"]
    problem = read(tmp_path, {"nodes": nodes, "links": [{"source": "a", "target": "d"}]})
    assert [node.name for node in problem.nodes] == ["c", "b", "a", "d"]


def node(**fields: object) -> dict[str, object]:
    return {"nodes": [{"id": 0, "cost_cpu": 1, "cost_ram": 1, **fields}], "links": []}


def ours(kind: str, **fields: object) -> dict[str, object]:
    return {"format": "rockmate-problem", "version": 1, "kind": kind, **fields}


STEP: dict[str, Any] = {
    "nodes": [{"name": "f", "time": 1, "reads": [], "makes": [0], "peak": 4, "backward": None}],
    "data": [{"name": "d", "size": 4, "owner": 0}],
    "held": [],
    "loss": 0,
    "blocks": [{"start": 0, "stop": 1, "kind": 0}],
}
BAD: list[tuple[object, str]] = [
    ("{", "is not JSON: Expecting property name"),
    ("[]", "holds a list; expected an object"),
    ("{}", 'is neither of our format ("format": "rockmate-problem") nor a node-link graph'),
    (node(cost_ram=-1), "node 0 has cost_ram -1; expected a number from 0"),
    (node(cost_cpu="3"), "node 0 has cost_cpu '3'; expected a number from 0"),
    ('{"nodes": [{"id": 0, "cost_cpu": NaN, "cost_ram": 1}], "links": []}', "node 0 has cost_cpu nan; expected"),
    (node(id=None), "nodes[0] has the id None; expected a number or a string"),
    ({**node(), "links": [{"source": 0, "target": 5}]}, "a link leads from 0 to 5; there is no node 5"),
    ({**node(), "links": [{"source": 0, "target": 0}]}, "the graph has a cycle through or before node 0"),
    ({**node(), "links": [{"from": 0}]}, "the link {'from': 0} has neither source and target nor 0 and 1"),
    ({**LAYERED, "graph": {"order": [0, 1, 2, 7]}}, "graph.order has node 1 before 2, which it reads"),
    ({**LAYERED, "graph": {"order": [0, 1]}}, "graph.order does not name every node once"),
    ({"nodes": [{"weight": 1}], "links": []}, "nodes have neither cost_cpu and cost_ram nor duration and out_cost"),
    ({**CHECKMATE, "nodes": [CHECKMATE["nodes"][0]] * 2}, "two nodes have the id 0"),
    ({**ours("graph"), "version": 2}, "has version 2; this library reads version 1"),
    (ours("tree"), "has kind 'tree'; known: graph, step"),
    (ours("graph"), "graph lacks nodes"),
    (
        ours("graph", nodes=[{"name": "a", "time": 1.5, "size": 1, "reads": []}]),
        "graph.nodes[0].time is 1.5; expected int",
    ),
    (ours("graph", nodes=[{"name": "a", "time": 1, "size": 1, "reads": [0]}]), "node 0 (a) reads node 0, which is not"),
    (ours("graph", nodes=[], colour=1), "graph has an unknown field 'colour'"),
    (ours("step", **{**STEP, "held": [3]}), "the held data: there is no data 3"),
    (ours("step", **{**STEP, "data": [{"name": "d", "size": 4, "owner": 9}]}), "data 0 (d) has the owner 9"),
    (ours("step", **{**STEP, "blocks": None}), "step.blocks is None; expected a list"),
]


@pytest.mark.parametrize(("content", "message"), BAD)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, content: object, message: str) -> None:
    with pytest.raises(ProblemError) as error:
        read(tmp_path, content)
    assert str(error.value).startswith(f"{tmp_path / 'problem.json'}: {message}")


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="cannot be read: No such file"):
        read_problem(tmp_path / "none.json")
    with pytest.raises(ProblemError, match="cannot write a str; a problem is one of: GraphProblem, Problem"):
        write_problem("problem", tmp_path / "none.json")
    assert read(tmp_path, ours("step", **STEP)).eager_time == 1
