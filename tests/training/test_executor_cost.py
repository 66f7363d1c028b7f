"""What the executor does beside kernels: counted, since times are nobody's promise here."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from programs import load
from torch import nn

import rkgb
import rockmate
from rkgb.program import source_values
from rockmate.demo.gpt import GPT
from rockmate.run.executor import CallState
from rockmate.run.functions import needs_no_recording
from solvers import all_baselines


def test_work_in_python_does_not_grow_with_the_batch(tmp_path: Path) -> None:
    launch, rows = load("benchmarks/executor.py").main(["--short", "--out", str(tmp_path / "executor.json")])
    written = json.loads((tmp_path / "executor.json").read_text())
    assert len(written["python"]) == len(rows) == 4
    assert [step["what"] for step in written["launch"]["steps"]] == [step.what for step in launch.steps]
    assert launch.reruns > 0
    assert launch.steps[0].forward_to_eager == 1
    assert {step.what for step in launch.steps} >= {
        "attached, budget does not bind",
        "attached, planned, nothing runs again",
    }
    keep, tight = rows[:2], rows[2:]
    assert {row.batch for row in keep} == {row.batch for row in tight} == {4, 8}
    for pair in (keep, tight):
        assert pair[0].schedule_steps == pair[1].schedule_steps
        assert pair[0].calls == pair[1].calls
    assert keep[0].run_again == 0 < tight[0].run_again


def calls_of(function: Callable[[], object]) -> int:
    """Calls of Python functions while ``function`` runs."""
    calls = 0

    def count(_: FrameType, event: str, __: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls


def test_few_python_calls_for_each_packed_tensor_and_each_rerun() -> None:
    """From the second step on, as the first one learns what is packed where. A second run is counted with what is
    handed to autograd afterwards and with putting back generators, which are most of the calls.
    """
    bench = load("benchmarks/executor.py")
    model = GPT(2, 32, 4, 16, 256)
    ids = torch.randint(256, (1, 16))
    keeping = bench.planned(model, ids, 100, None)._last
    everything = bench.scheduled(keeping, all_baselines(keeping.plan.problem)["recompute all"])
    found = []
    for runnable in (keeping, keeping, everything, everything):
        state = CallState(runnable.program, source_values(runnable.program.s.d.sources, model, [ids]))
        outputs: list[torch.Tensor] = []
        forward = calls_of(lambda state=state, outputs=outputs: outputs.extend(state.forward()))  # type: ignore[misc]
        loss = outputs[0].sum()
        found.append((forward, calls_of(loss.backward), len(state.store.slots)))
    _, (forward, backward, _), _, (with_packs, with_reruns, packed) = found
    reruns = everything.plan.recomputed
    assert 0 < with_packs - forward <= 7 * packed, (with_packs - forward) / packed
    assert 0 < with_reruns - backward <= 20 * reruns, (with_reruns - backward) / reruns


def test_second_runs_are_recorded_only_where_that_could_matter() -> None:
    """Operations with a kernel of their own, and those whose parts look at their arguments alone, are not."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h: torch.Tensor = self.lstm(torch.tanh(self.linear(x)))[0]
            return h.sin()

    nodes = rkgb.make_all_graphs(Net(), torch.randn(2, 3, 8)).D.nodes
    recorded = {node.name: not needs_no_recording(node) for node in nodes}
    found = {name: recorded[name] for name in ("linear", "tanh", "lstm", "sin")}
    assert found == {"linear": False, "tanh": False, "lstm": True, "sin": False}


@pytest.mark.parametrize("progress", [None, False])
def test_one_step_is_timed_and_told(progress: bool | None, caplog: pytest.LogCaptureFixture) -> None:
    """After twenty steps that ran something again; the results are those of other steps."""
    torch.manual_seed(0)
    model, ids = GPT(2, 32, 4, 16, 256), torch.randint(256, (16, 16))
    eager = copy.deepcopy(model)
    rockmate.attach(model, "70%", costs="flops", progress=progress)
    counts = []
    with caplog.at_level("INFO", "rockmate"):
        for k in range(26):
            for m in (model, eager):
                m.zero_grad()
                torch.manual_seed(k)
                m(ids).square().mean().backward()
            pairs = zip(model.parameters(), eager.parameters(), strict=True)
            assert all(torch.equal(p.grad, q.grad) for p, q in pairs if p.grad is not None and q.grad is not None)
            lines = [r.getMessage() for r in caplog.records if "what runs again took" in r.getMessage()]
            counts.append(len(lines))
    assert counts[:20] == [0] * 20 and counts[-1] == (progress is None)
    if lines:
        assert re.search(r"took \d+\.\d % .* after 20 planned steps; \d+\.\d % was predicted, of", lines[0])
