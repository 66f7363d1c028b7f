"""Ctrl-C while planning ends the planning, wherever it comes, and planning again works."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import assert_trains_as_eager, planned, step, tight_budget
from models import case, in_turn
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import rkgb.cost.memory
import rkgb.pipeline
import rockmate
from rockmate import Attachment, Rockmate, attach
from rockmate.calls.capture import Capture
from rockmate.rotor import Checkpointable
from solvers import ChainPlanner
from solvers.rotor.plans import ALGORITHMS


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Python's own handler: workers of a parallel run ignore Ctrl-C. The test leaves its handler as it was."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


def interrupt(*_: Any) -> None:
    signal.raise_signal(signal.SIGINT)


def in_a_finalizer() -> None:
    type("Finalized", (), {"__del__": interrupt})()


def in_a_callback_of_a_weak_reference() -> None:
    referred = nn.Linear(1, 1)
    reference = weakref.ref(referred, interrupt)
    del referred
    assert reference() is None


def in_a_callback_of_the_collector() -> None:
    def once(*_: Any) -> None:
        gc.callbacks.remove(once)
        interrupt()

    gc.callbacks.append(once)
    gc.collect()


def after(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, what: Callable[[], None]) -> None:
    """``what`` runs after the first call of ``owner.name``, also of one that fails."""
    original = getattr(owner, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            monkeypatch.setattr(owner, name, original)
            what()

    monkeypatch.setattr(owner, name, run)


def lost(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """What Python drops from now on, and pytest then does not see."""
    dropped: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: dropped.append(args.exc_type))
    return dropped


LOSSES = (in_a_finalizer, in_a_callback_of_a_weak_reference, in_a_callback_of_the_collector)


PLACES = [(rkgb.pipeline, "D_to_S"), (ChainPlanner, "solve"), (Capture, "run"), (Attachment, "_run")]


@pytest.mark.parametrize(("place", "losing"), in_turn(PLACES, LOSSES))
def test_an_interrupt_that_python_drops(
    place: tuple[Any, str], losing: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    c = case("dropout_mlp")
    model, eager, args = c.model(), c.model(), c.call(0)[0]
    budget = tight_budget(model, args)
    after(monkeypatch, *place, losing)
    dropped = lost(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        Rockmate(model, args, budget, costs="flops")
    assert dropped == [KeyboardInterrupt]
    rk = Rockmate(model, args, budget, costs="flops")
    assert rk.plan.recomputed > 0
    assert_trains_as_eager(eager, rk, lambda _, call: step(call, *c.call(2)))


def test_an_interrupt_that_is_dropped_ends_every_way_to_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call of another shape, another budget, the frontier; plans that were there stay."""
    c = case("gpt")
    model, (ids,) = c.model(), c.call(0)[0]
    budget = tight_budget(model, (ids,))
    rk = Rockmate(model, (ids,), budget, costs="flops")
    plan = rk.plan
    dropped = lost(monkeypatch)

    def other_budget() -> None:
        rk.budget = budget + 1000

    ways: list[tuple[Callable[[], Any], Any, str]] = [
        (lambda: rk(ids[:1]), rkgb.pipeline, "D_to_S"),
        (other_budget, ChainPlanner, "solve"),
        (rk.frontier, ChainPlanner, "frontier"),
        (lambda: rockmate.frontier(model, (ids,), costs="flops"), ChainPlanner, "frontier"),
    ]
    for way, owner, name in ways:
        after(monkeypatch, owner, name, in_a_finalizer)
        with pytest.raises(KeyboardInterrupt):
            way()
        assert rk.plan is plan and rk.budget == budget
    assert dropped == [KeyboardInterrupt] * len(ways)


def test_an_interrupt_that_rotor_does_not_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(4, 8)
    call = Checkpointable(model, costs="flops")
    dropped = lost(monkeypatch)
    after(monkeypatch, rockmate.rotor.checkpointable, "measure_chain", in_a_finalizer)
    with pytest.raises(KeyboardInterrupt):
        call.measure(x)
    call.measure(x)
    search = ALGORITHMS["persistent"]
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setitem(ALGORITHMS, "persistent", lambda *args: (in_a_finalizer(), search(*args))[1])
        call.compute_sequence("1 MiB")
    assert call.sequence is None
    call.compute_sequence("1 MiB")
    assert dropped == [KeyboardInterrupt] * 2


class TakenLate:
    """A lock; Ctrl-C comes when it is first taken, before whoever takes it knows."""

    def __init__(self, lock: Any) -> None:
        self.lock, self.interrupts = lock, [interrupt]

    def acquire(self, timeout: float) -> bool:
        taken: bool = self.lock.acquire(timeout=timeout)
        while self.interrupts:
            self.interrupts.pop()()
        return taken

    def release(self) -> None:
        self.lock.release()


def test_an_interrupt_while_a_context_is_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements exclude one another by a lock, which is given back."""
    c = case("dropout_mlp")
    model, args = c.model(), c.call(0)[0]
    budget = tight_budget(model, args)
    lock = rkgb.cost.memory._MEASURING
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(rkgb.cost.memory, "_MEASURING", TakenLate(lock))
        Rockmate(model, args, budget, costs="flops")
    assert not lock.locked()
    assert Rockmate(model, args, budget, costs="flops").plan.recomputed > 0


def test_an_interrupt_while_torchdynamo_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code calls Python there, and a process may end where that raises: it goes on to a safe place."""
    c = case("dropout_mlp")
    model, args = c.model(), c.call(0)[0]
    went_on = []
    after(monkeypatch, FakeTensorMode, "dispatch", lambda: (interrupt(), went_on.append(1)))
    with pytest.raises(KeyboardInterrupt):
        Rockmate(model, args, "90%", costs="flops")
    assert went_on == [1]
    assert_trains_as_eager(c.model(), planned(c)[1], lambda _, call: step(call, *c.call(2)))


def test_a_time_limit_while_torchdynamo_captures_is_no_reason_to_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchDynamo takes what the handler raises for an error of its own."""
    c = case("dropout_mlp")
    model, args = c.model(), c.call(0)[0]
    handle = attach(model, tight_budget(model, args), costs="flops")

    def handler(*_: Any) -> None:
        raise TimeoutError("enough")

    before = signal.signal(signal.SIGALRM, handler)
    try:
        after(monkeypatch, FakeTensorMode, "dispatch", lambda: signal.raise_signal(signal.SIGALRM))
        with pytest.raises(TimeoutError, match="enough"):
            model(*args)
        assert signal.getsignal(signal.SIGALRM) is handler
    finally:
        signal.signal(signal.SIGALRM, before)
    step(model, *c.call(2))
    assert handle.plan is not None
    assert not handle.reason


def test_a_handler_that_raises_nothing_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some end the epoch first: planning goes on."""
    c = case("dropout_mlp")
    model, args = c.model(), c.call(0)[0]
    budget = tight_budget(model, args)
    called = []

    def handler(*_: Any) -> None:
        called.append(1)

    signal.signal(signal.SIGINT, handler)
    after(monkeypatch, rkgb.pipeline, "D_to_S", interrupt)
    after(monkeypatch, ChainPlanner, "solve", in_a_finalizer)
    assert Rockmate(model, args, budget, costs="flops").plan.recomputed > 0
    assert called == [1, 1]
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is handler


PROGRAM = """
import faulthandler, signal, sys, time
sys.path[:0] = sys.argv[1:4]
faulthandler.enable()
signal.signal(signal.SIGINT, signal.default_int_handler)
from against_eager import assert_trains_as_eager, planned, step, tight_budget
from models import case
from rockmate import Rockmate
c = case("gpt")
model, args = c.model(), c.call(0)[0]
budget = tight_budget(model, args)
Rockmate(model, args, budget, costs="flops")
start = time.monotonic()
Rockmate(model, args, budget, costs="flops")
print(time.monotonic() - start, flush=True)
for _ in range(int(sys.argv[4])):
    try:
        print("planning", flush=True)
        while True:
            Rockmate(model, args, budget, costs="flops")
    except KeyboardInterrupt:
        pass
eager, rk = planned(c)
assert_trains_as_eager(eager, rk, lambda _, call: step(call, *c.call(2)))
print("trains", flush=True)
"""

INTERRUPTS = 8
PATIENCE = 600.0
"""Seconds for all of it, some fifteen where nothing else runs; less than a test may take."""


def test_a_real_interrupt_while_planning(tmp_path: Path) -> None:
    """Ctrl-C at any moment ends it, and planning again works; in a process that can be ended if it does not."""
    here, log = Path(__file__).parent, tmp_path / "errors"
    command = [sys.executable, "-c", PROGRAM, *map(str, (here, here.parent, here.parents[1])), str(INTERRUPTS)]
    with (
        log.open("w") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=tmp_path) as process,
    ):
        # On SIGABRT it says where every thread is, and ends, native code or not.
        watch = threading.Timer(PATIENCE, process.send_signal, (signal.SIGABRT,))
        watch.start()
        assert process.stdout is not None
        try:
            seconds = float(process.stdout.readline() or 0)
            for k in range(INTERRUPTS):
                if process.stdout.readline() != "planning\n":
                    break
                time.sleep(seconds * (k + 0.5) / INTERRUPTS)
                process.send_signal(signal.SIGINT)
            told, code = process.stdout.read(), process.wait()
        finally:
            watch.cancel()
            process.kill()
    assert (told, code) == ("trains\n", 0), f"Ctrl-C did not end the planning:\n{log.read_text()}"


WHILE_IMPORTED = """
import signal, sys, torch, rockmate
class Once:
    def find_spec(self, name, path, target=None):
        if name == "torch._dynamo.guards":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8)), torch.randn(64, 8)
handle = rockmate.attach(model, "90%", costs="flops", on_infeasible="least", cache=False)
assert "torch._dynamo" not in sys.modules
sys.meta_path.insert(0, Once())
try:
    model(x)
except KeyboardInterrupt:
    print("interrupted")
model(x).sum().backward()
print(handle.plans_made)
"""


def test_ctrl_c_while_torchs_compiler_is_imported() -> None:
    done = subprocess.run([sys.executable, "-c", WHILE_IMPORTED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["interrupted", "1"]
