"""A plan as a picture: what it says of each block and operation is what the schedule does."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import rkgb
from rkgb import RenderWarning
from rockmate import Plan, Rockmate, attach
from rockmate.demo.gpt import GPT
from rockmate.planning.picture import COLOURS, modules
from rockmate.planning.report import Fate, block_choices, fates
from solvers import Bwd, Loss, Run, Step, keep_everything, recompute_all, walk, with_deletes
from solvers.liveness import drop_useless_runs, forward_phase

dot = pytest.mark.skipif(shutil.which("dot") is None, reason="the program dot (Graphviz) is not installed")


@pytest.fixture(scope="module")
def plan() -> Plan:
    torch.manual_seed(0)
    return Rockmate(GPT(4, 32, 4, 16, 64), torch.arange(32).view(2, 16), "72%", costs="flops").plan


def often(plan: Plan) -> Plan:
    """The plan with another schedule, in which everything runs again before each backward that needs it."""
    order: list[Step] = [*forward_phase(plan.problem)]
    for i in plan.problem.backward_order():
        order += [Run(j) for j in range(i + 1) if plan.problem.nodes[j].rerun]
        order.append(Bwd(i))
    return replace(plan, schedule=with_deletes(plan.problem, drop_useless_runs(plan.problem, order)))


def boxes(source: str) -> dict[str, str]:
    """The nodes of a picture's source: key, and its attributes."""
    return dict(re.findall(r"^\t+(\w+) \[(.*?)\]$", source, re.MULTILINE | re.DOTALL))


def shape(path: Path) -> float:
    """The width of an SVG by its height."""
    width, height = re.findall(r'viewBox="0.00 0.00 (\S+) (\S+)"', path.read_text(encoding="utf-8"))[0]
    return float(width) / float(height)


def test_fates_are_what_the_schedule_does(plan: Plan) -> None:
    found = fates(plan.problem, plan.schedule)
    assert sum(len(fate.again) for fate in found) == plan.recomputed > 0
    assert sum(fate.kept for fate in found) == sum(c.kept for c in block_choices(plan.problem, plan.schedule))
    assert {fate.kind for fate in found} == {"kept", "again", "free"}
    order = plan.schedule
    for i, fate in enumerate(found):
        for j in fate.again:
            assert order.index(Loss()) < order.index(Run(i), order.index(Loss())) < order.index(Bwd(j))
    several = fates(plan.problem, often(plan).schedule)
    assert max(len(fate.again) for fate in several) > 1 and "often" in {fate.kind for fate in several}
    kept = fates(plan.problem, keep_everything(plan.problem))
    assert {fate.kind for fate in kept} == {"kept", "free"}
    assert not any(fate.kind == "kept" for fate in fates(plan.problem, recompute_all(plan.problem)) if fate.again)
    assert [Fate(8, 0, again).kind for again in ((), (1,), (1, 2))] == ["free", "again", "often"]


def drawn_nodes(plan: Plan) -> Iterator[tuple[int, str]]:
    """The operations that the picture of a plan shows, with the attributes of their boxes."""
    for key, look in boxes(plan.picture().source).items():
        if number := re.fullmatch(r"n(\d+)", key):
            yield int(number[1]), look


def test_each_operation_has_the_colour_of_its_fate_its_module_and_its_line(plan: Plan) -> None:
    shown = {}
    for each in (plan, often(plan)):
        found = fates(each.problem, each.schedule)
        for i, look in drawn_nodes(each):
            fate, node = found[i], each.problem.nodes[i]
            assert f'fillcolor="{COLOURS[fate.kind]}"' in look
            assert f"<B>{node.name}</B>" in look and "gpt.py:" in look
            assert ("runs again" in look) == bool(fate.again)
            assert (f"runs again {len(fate.again)} times" in look) == (len(fate.again) > 1)
            shown[fate.kind] = look
    assert set(shown) == set(COLOURS)
    assert "layers.0.attention.qkv" in plan.picture().source


def test_the_chain_has_every_block_with_its_figures(plan: Plan) -> None:
    source = plan.picture().source
    found = boxes(source)
    for b, choice in enumerate(block_choices(plan.problem, plan.schedule)):
        look = found[f"chain{b}"]
        assert f"block {b} · " in look and f"keeps {choice.kept / 1024:.1f} KiB" in look
        share = f"+{100 * choice.time / plan.problem.eager_time:.1f} %"
        assert (f"runs again: {choice.reruns} of " in look and share in look) or not choice.reruns
    assert "layers.1" in found["chain2"] and "norm, head" in found["chain5"]
    peak = [key for key, look in found.items() if "the peak: " in look]
    problem = plan.problem_with_usual_loss()
    at = plan.schedule[walk(problem, plan.schedule).peak_step]
    assert isinstance(at, Bwd | Run)
    inside = [f"chain{b}" for b, block in enumerate(problem.blocks) if block.start <= at.node < block.stop]
    assert peak == inside
    for means in ("kept for the backward", "dropped, runs again once", "runs again several times", "not needed"):
        assert means in source


def test_blocks_that_are_treated_alike_are_drawn_once(plan: Plan) -> None:
    everything = replace(plan, schedule=keep_everything(plan.problem))
    source = everything.picture().source
    assert "the same: blocks 2–4" in source and "cluster_block1" in source and "cluster_block2" not in source
    drawn = {i for i, _ in drawn_nodes(everything)}
    blocks = plan.problem.blocks
    assert drawn == {i for b in (0, 1, 5) for i in range(blocks[b].start, blocks[b].stop)}


@dot
def test_print_graph_takes_a_plan(plan: Plan, tmp_path: Path) -> None:
    path = rkgb.print_graph(plan, directory=tmp_path)
    assert path == tmp_path / "Plan.svg" and (tmp_path / "Plan.gv").exists()
    text = html.unescape(path.read_text(encoding="utf-8"))
    assert re.search(r'xlink:title="runs again before bwd\.[^"]*gpt\.py:\d+', text)
    assert 0.5 < shape(path) < 2
    assert 0.5 < shape(rkgb.print_graph(often(plan), "often", directory=tmp_path)) < 2
    pdf = rkgb.print_graph(plan, render_format="pdf", directory=tmp_path)
    assert pdf.read_bytes().startswith(b"%PDF")
    said = rkgb.print_graph(plan, render_format="text", directory=tmp_path)
    assert said.read_text(encoding="utf-8") == f"{plan}\n"


def test_without_dot_the_source_is_written(plan: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.warns(RenderWarning, match="dot is not installed"):
        path = rkgb.print_graph(plan, directory=tmp_path)
    assert path == tmp_path / "Plan.gv" and "the chain of blocks" in path.read_text(encoding="utf-8")


def test_no_plan_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"NoneType is no graph.*the plan of an attached model is None until"):
        rkgb.print_graph(None, directory=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="type is no graph"):
        rkgb.print_graph(Plan, directory=tmp_path)  # type: ignore[arg-type]


class Broken(nn.Module):
    """Two captured graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32), nn.Tanh()) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()  # type: ignore[no-untyped-call]
        result: torch.Tensor = self.second(x)
        return result


@dot
def test_the_plan_of_a_followed_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(256, 32)
    handle = attach(model, "90%", costs="flops")
    for _ in range(2):
        model(x).square().mean().backward()
        model.zero_grad()
    assert handle.plan is not None
    path = rkgb.print_graph(handle.plan, directory=tmp_path)
    assert path.name == "FollowedPlan.svg" and "addmm" in path.read_text(encoding="utf-8")


def test_modules_of_a_block_are_said_in_few_words(plan: Plan) -> None:
    s = plan.graph.s
    names = [modules(s, block.start, block.stop) for block in plan.problem.blocks]
    assert names == ["tokens … drop", "layers.0", "layers.1", "layers.2", "layers.3", "norm, head"]
    assert modules(s, 0, 0) == "no submodule"
