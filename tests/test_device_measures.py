"""How a GPU is measured, without one: its queue, allocator and threads have stand-ins that the tests describe."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import randn, square_loss
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rockmate
from rkgb.cost.clock import Clock, modelled_times
from rkgb.cost.measure import Known, beside_measured
from rkgb.cost.memory import _where, measure_memory, measure_peak, measure_phases
from rkgb.cost.node import times_by
from rkgb.cost.piece import backward_memory
from rkgb.device import KINDS, Cpu, Cuda, device_in_use
from rkgb.device.cpu import twice_the_largest_cache
from rkgb.device.kind import Moment, Timeline
from rkgb.device.profiled import ProfiledTimeline
from rkgb.errors import MeasureError
from rkgb.pipeline import make_all_graphs
from rockmate import Rockmate
from rockmate.planning.options import PlanOptions
from rockmate.planning.prepare import make_planner

GPU = torch.device("cuda:1")

# ------------------------------------------------------------------------------------------------ clock

LAUNCH = 20_000  # ns of the host for one kernel


class Queue:
    """Stands for a GPU's queue: kernels run in order, none before it was launched, and events when it is their turn."""

    def __init__(self) -> None:
        self.host = self.done = 0

    def launch(self, duration: int, cost: int = LAUNCH) -> None:
        self.host += cost
        self.done = max(self.host, self.done) + duration

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        queue = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self, stream: str) -> None:
                assert stream == "stream of cuda:1"
                self.at = max(queue.host, queue.done)

            def synchronize(self) -> None:
                queue.host = max(queue.host, self.at)

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e6

        monkeypatch.setattr("torch.cuda.Event", Event)
        monkeypatch.setattr("torch.cuda.current_stream", lambda device: f"stream of {device}")
        monkeypatch.setattr("torch.cuda.device", Guard)
        monkeypatch.setattr("torch.cuda._sleep", lambda cycles: queue.launch(cycles // 2))
        monkeypatch.setattr("rkgb.cost.clock.time", SimpleNamespace(perf_counter_ns=lambda: queue.host))


class Guard:
    def __init__(self, device: torch.device) -> None:
        assert device == GPU

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: Any) -> None:
        pass


class Kernels:
    """Stands for a node's run: so many kernels forward, each of so many ns; no backward."""

    device, layouts = GPU, ()

    def __init__(self, queue: Queue, duration: int, count: int = 1) -> None:
        self.queue, self.duration, self.count = queue, duration, count

    def forward(self) -> list[torch.Tensor]:
        for _ in range(self.count):
            self.queue.launch(self.duration)
        return []

    def ends(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        return results


@pytest.mark.parametrize(("duration", "count"), [(2_000, 1), (5_000, 1), (400_000, 1), (2_000, 300)])
def test_times_are_those_of_kernels_and_not_of_launches(
    monkeypatch: pytest.MonkeyPatch, duration: int, count: int
) -> None:
    """Also where launching alone takes longer than a millisecond: the first run tells how long the queue must wait."""
    queue = Queue()
    queue.install(monkeypatch)
    run: Any = Kernels(queue, duration, count)
    found = Clock(repeat=5).times(run)
    assert found.forward == duration * count
    assert found.launches == (LAUNCH * count, 0)


def test_a_plan_says_whether_the_device_waits_for_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where launches are timed, by a device that has some."""

    class Behind(Cpu):
        launches = True

    monkeypatch.setitem(KINDS, "cpu", Behind())
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
    plan = Rockmate(model, torch.randn(4, 8), "100%", cache=False).plan
    assert all(n.launch > 0 and n.backward.launch > 0 for n in plan.graph.nodes)
    assert plan.clocks is not None and f"bottleneck          {plan.clocks}" in str(plan)
    assert plan.clocks.device == sum(n.time + n.backward.time for n in plan.graph.nodes)
    assert plan.clocks.host == sum(n.launch + n.backward.launch for n in plan.graph.nodes)
    monkeypatch.undo()
    plan = Rockmate(model, torch.randn(4, 8), "100%", cache=False).plan
    assert plan.clocks is None and "bottleneck" not in str(plan)


def test_timed_backwards_get_random_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[torch.Tensor] = []
    monkeypatch.setattr("rkgb.cost.clock.run_backward", lambda ends, grads: given.extend(grads))
    run: Any = SimpleNamespace(
        device=torch.device("cpu"), forward=lambda: [torch.ones(8, requires_grad=True)], ends=lambda r: r, layouts=()
    )
    Clock(repeat=1).times(run)
    assert len(set(given[0].tolist())) == 8


@pytest.mark.parametrize(("took", "then"), [((18, 16), (16, 24, 10)), ((18, 20), (18, 22, 10)), ((15,), (15, 25, 10))])
def test_a_forward_that_runs_again_is_timed_from_memory_and_the_step_s_time_stays(
    monkeypatch: pytest.MonkeyPatch, took: tuple[int, ...], then: tuple[int, ...]
) -> None:
    """It is timed a second time only where it took much longer than from the caches."""
    caches, done = (torch.ones(4),), []
    piece: Any = SimpleNamespace(
        device=torch.device("cpu"),
        forward=lambda: done.append("forward") or [torch.ones(1)],
        ends=lambda results: results,
        layouts=(),
    )
    again = iter(took)
    unit = 100_000

    def once(_: Clock, run: Any, device: torch.device, launched: int = 0) -> tuple[list[int], int]:
        assert len(run(lambda: done.append("mark"))) == 1
        return [next(again) * unit], launched

    monkeypatch.setattr("rkgb.cost.clock.read", lambda tensors: done.append("read" if tensors is caches else "other"))
    monkeypatch.setattr(Clock, "medians", lambda *_: (10 * unit, 30 * unit))
    monkeypatch.setattr(Clock, "_once", once)
    assert Clock(again=caches).times(piece)[:3] == tuple(x * unit for x in then)
    assert done == ["forward", *len(took) * ("read", "mark", "forward", "mark")]
    assert Clock().times(piece) == (10 * unit, 30 * unit, 10 * unit, (0, 0))


def test_as_much_is_read_as_a_step_uses_or_caches_hold() -> None:
    for used, read in ((0, 0), (4096, 4096), (2**30, Cpu.caches)):
        again = Clock.of(nn.Linear(2, 2), used).again
        lines = sum(t.nelement() for t in again)
        assert 64 * lines == sum(t.untyped_storage().nbytes() for t in again) == read


def test_caches_are_twice_the_largest_that_the_system_tells_of(tmp_path: Path) -> None:
    most = twice_the_largest_cache(tmp_path)
    for k, size in enumerate(("32K\n", "1024K\n", "32768K\n", "unknown\n")):
        (tmp_path / f"index{k}").mkdir()
        (tmp_path / f"index{k}" / "size").write_text(size)
    assert twice_the_largest_cache(tmp_path) == 2 * 32 * 2**20 < most
    (tmp_path / "index2" / "size").write_text(f"{most}K\n")
    assert twice_the_largest_cache(tmp_path) == most


@pytest.mark.parametrize("layers", [2, 3, 6, 12])
@pytest.mark.parametrize("hidden", [64, 256])
def test_measuring_a_node_takes_no_more_memory_than_a_step_that_keeps_everything(layers: int, hidden: int) -> None:
    blocks = [[nn.Linear(64, hidden), nn.GELU(), nn.LayerNorm(hidden), nn.Linear(hidden, 64)] for _ in range(layers)]
    model, x = nn.Sequential(*(layer for block in blocks for layer in block)), randn(512, 64, seed=0)

    def step() -> None:
        model.zero_grad()
        square_loss(model(x)).backward()

    step()
    known = Known()
    graphs = make_all_graphs(model, x, costs="flops", known_of=lambda _: known)
    values = graphs.S.d.values
    read = max(sum(values[v].bytes for v in node.reads) for node in graphs.S.nodes)
    taken = max(cost.forward_peak + cost.incoming + cost.backward_peak for cost in known.costs.values())
    beside = beside_measured(graphs.S)
    assert read + taken + beside <= rockmate.measure_peak(step)
    assert beside or layers < 6


class Widened:
    """A piece whose result is much larger than what it reads, and whose backward makes something of that size, too."""

    device, layouts = torch.device("cpu"), None

    def __init__(self) -> None:
        self.x = torch.ones(100, requires_grad=True)

    def forward(self, collect: Any = None) -> list[torch.Tensor]:
        return [self.x.repeat(1000, 1).neg_()]

    def ends(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        return results

    def drop_gradients(self) -> None:
        self.x.grad = None


@pytest.mark.parametrize("time", [Clock(repeat=1).times, lambda p: modelled_times(p, 1, lambda *_: 1)])
def test_while_a_backward_is_timed_nobody_holds_the_results(time: Any) -> None:
    """As in a step: planning takes no more memory than that."""
    piece, size = Widened(), 400_000
    time(piece)
    _, peak, _ = measure_memory(lambda: time(piece), torch.device("cpu"))
    assert 2 * size <= peak < 3 * size


def test_what_empties_the_caches_is_no_memory_of_the_allocator() -> None:
    """A plan within a budget is made within it, too."""
    model = nn.Linear(4, 4)
    clock, peak, _ = measure_memory(lambda: Clock.of(model, 2**26), torch.device("cpu"))
    (again,) = clock.again
    assert again.sum() == again.numel() == 2**20, "pages that were never written are one page"
    assert peak < 2**10


class Seen(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **kwargs or {})


def test_no_meter_sees_that_moments_are_marked() -> None:
    cpu = Cpu()
    timeline = cpu.timeline(torch.device("cpu"))
    assert timeline is not None
    with Seen() as seen:
        timeline.mark()
        kept = torch.ones(1000)
        timeline.mark()
        del kept
        timeline.mark()
    moments = timeline.close()
    assert seen.names == ["aten.ones.default"]
    assert moments == [Moment(0, 4000, 0), Moment(4000, 4000, 4000), Moment(0, 0, 0)]


def test_what_is_allocated_in_a_pause_does_not_count() -> None:
    before = torch.ones(100)
    timeline = Cpu().timeline(torch.device("cpu"))
    assert timeline is not None
    given = torch.ones(300)
    timeline.mark()
    kept = torch.ones(1000)
    timeline.pause()
    others = torch.ones(5000)
    timeline.resume()
    del others, given, before
    more = torch.ones(500)
    timeline.mark()
    expected = [Moment(0, 4000, 0), Moment(4000, 4800, 4000), Moment(4800, 4800, 6000)]
    assert timeline.close() == expected, "what was there before the recording is not seen to go"
    assert timeline.marks == 3
    del kept, more


def test_only_long_runs_on_the_cpu_are_timed_with_their_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkgb.cost.clock.Clock.times", lambda *_: (1, 2))
    times_of = times_by("measured", nn.Linear(2, 2))
    on_cpu: Any = SimpleNamespace(device=torch.device("cpu"))
    on_gpu: Any = SimpleNamespace(device=GPU)
    long = 20_000_000, 30_000_000
    assert times_of(on_cpu, long) == (*long, None, (0, 0))
    assert times_of(on_cpu, (20_000_000, 29_999_999)) == times_of(on_gpu, long) == (1, 2)


def test_the_time_of_a_run_is_that_of_its_forward_and_backward() -> None:
    class Sleeps(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            time.sleep(0.02)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
            time.sleep(0.06)
            return g

    x = torch.ones(8, requires_grad=True)
    piece: Any = SimpleNamespace(
        device=torch.device("cpu"), layouts=None, drop_gradients=lambda: None, ends=lambda results: results,
        forward=lambda collect: [Sleeps.apply(x)],
    )  # fmt: skip
    forward, backward = backward_memory(piece).times
    assert forward >= 20_000_000
    assert backward >= 60_000_000


def test_the_cache_is_filled_with_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the driver only the size is asked; the memory is the CPU's."""
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(L2_cache_size=1_000))
    (read,) = Cuda().to_read(torch.device("cpu"))
    assert read.nbytes == 2_000


# ----------------------------------------------------------------------------------------------- memory


class Allocator:
    """Stands for the caching allocator's statistics of ``cuda:1``, in which a block is larger than what was asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backend: str = "native") -> None:
        self.figures = {"requested_bytes": 0, "allocated_bytes": 0, "reserved_bytes": 4_000_000}
        self.peaks = dict.fromkeys(self.figures, 10**9)  # what the caller did before
        for name in ("synchronize", "reset_peak_memory_stats", "memory_stats"):
            monkeypatch.setattr(f"torch.cuda.{name}", getattr(self, name))
        monkeypatch.setattr("torch.cuda.empty_cache", lambda: self.figures.update(reserved_bytes=2_000_000))
        monkeypatch.setattr("torch.cuda.get_allocator_backend", lambda: backend)

    def synchronize(self, device: torch.device) -> None:
        assert device == GPU

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        assert device == GPU
        self.peaks = dict(self.figures)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        assert device == GPU
        current = {f"{name}.all.current": size for name, size in self.figures.items()}
        return current | {f"{name}.all.peak": size for name, size in self.peaks.items()}

    def change(self, requested: int, allocated: int, reserved: int = 0) -> None:
        for name, size in zip(self.figures, (requested, allocated, reserved), strict=True):
            self.figures[name] += size
            self.peaks[name] = max(self.peaks[name], self.figures[name])


def test_memory_is_what_was_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    allocator.change(70, 512)

    def step() -> str:
        allocator.change(1_500_000, 2_097_152)
        allocator.change(-1_499_000, -2_096_128)
        return "result"

    assert measure_memory(step, GPU) == ("result", 1_500_000, 1_000)
    assert measure_peak(step, "cuda:1") == 1_500_000
    phases = [lambda _: allocator.change(50, 512), lambda _: step()]
    assert measure_phases(phases, GPU) == ("result", [(50, 50), (1_500_000, 1_000)])


def test_where_requests_are_not_counted_blocks_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's own asynchronous allocator reports no requests."""
    allocator = Allocator(monkeypatch, "cudaMallocAsync")
    assert measure_peak(lambda: allocator.change(0, 2_048), "cuda:1") == 2_048


def test_reserved_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the level at which the allocator holds nothing that is unused."""
    allocator = Allocator(monkeypatch)
    assert measure_peak(lambda: allocator.change(1_000, 1_024, 2_097_152), "cuda:1", reserved=True) == 2_097_152
    with pytest.raises(MeasureError, match="reserved memory was asked for on cpu, whose allocator keeps none"):
        measure_peak(lambda: None, "cpu", reserved=True)


def test_where_a_peak_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the device that holds memory, current or not. The driver's answers are given."""
    assert device_in_use() == torch.device("cpu")
    assert _where(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    held = {0: 0, 1: 512, 2: 0}
    for name, answer in (("is_available", True), ("is_initialized", True), ("device_count", 3), ("current_device", 0)):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda answer=answer: answer)
    monkeypatch.setattr("torch.cuda.memory_allocated", held.__getitem__)
    assert device_in_use() == GPU
    held[2] = 512
    with pytest.raises(MeasureError, match=r"memory on cuda:1, cuda:2: say which of them"):
        measure_peak(lambda: None)
    held.update(dict.fromkeys(held, 0))
    assert device_in_use() == torch.device("cuda:0")


def segment(total: int, allocated: int, requested: int, *, device: int = 1, expandable: bool = False) -> dict[str, Any]:
    """Of torch's allocator, as ``torch.cuda.memory_snapshot`` says."""
    sizes = {"total_size": total, "allocated_size": allocated, "requested_size": requested}
    return {"device": device, "is_expandable": expandable, **sizes}


def test_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the driver has, and what the allocator holds without use and can give back: whole segments, and those that
    are expandable.
    """
    segments = [
        segment(10, 0, 0),
        segment(20, 8, 7),
        segment(60, 12, 9, expandable=True),
        segment(1000, 500, 400, device=0),
    ]
    answers = {"mem_get_info": (100, 200), "memory_reserved": 90, "memory_allocated": 20}
    for name, answer in answers.items():
        monkeypatch.setattr(f"torch.cuda.{name}", lambda device, answer=answer: answer)
    monkeypatch.setattr("torch.cuda.memory_snapshot", lambda: segments)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    for device in (GPU, torch.device("cuda")):
        assert Cuda().free(device) == 100 + 10 + 48
        assert Cuda().slack(device) == 12 + 1 + 3
        assert Cuda().total(device) == 200


def test_free_memory_of_a_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What its limit leaves, if that is less than the machine has; files that were read and can go are free."""
    cpu = torch.device("cpu")
    monkeypatch.setattr("rkgb.device.cpu._GROUP", str(tmp_path))
    alone = Cpu().free(cpu)
    assert Cpu().total(cpu) >= alone > 0
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 200000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert abs(Cpu().free(cpu) - alone) < alone / 2
    (tmp_path / "memory.max").write_text("1000000\n")
    assert Cpu().free(cpu) == 500_000
    (tmp_path / "memory.max").write_text("100000\n")
    assert Cpu().free(cpu) == 0
    assert Cpu().total(cpu) == 100_000 and Cpu().slack(cpu) == 0


class RoomForNumbers(Cpu):
    """A device whose losses need more for their numbers: a GPU's reductions have a part of them for each block."""

    scalars = Cuda.scalars


def test_room_for_the_numbers_of_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = make_planner(nn.Linear(8, 8), randn(2, 8, seed=1), PlanOptions("flops")).reserved
    monkeypatch.setitem(KINDS, "cpu", RoomForNumbers())
    found = make_planner(nn.Linear(8, 8), randn(2, 8, seed=1), PlanOptions("flops")).reserved
    assert found - usual == Cuda.scalars - Cpu.scalars
    blocks = 132 * 2048 // 512 * 4  # of the largest reduction on an H100: fewer than this, of 8 bytes and a semaphore
    assert Cuda.scalars > 12 * blocks


# ------------------------------------------------------------------------------------- workspaces, threads


class Warmed(Cpu):
    """A device whose kernels allocate what stays; notes what is done in which order, and in whose backward."""

    keeps_workspaces = True

    def __init__(self) -> None:
        self.done: list[tuple[str, bool]] = []

    def note(self, what: str) -> None:
        self.done.append((what, torch._C._current_graph_task_id() >= 0))

    def warm_up(self, device: torch.device) -> None:
        self.note("warm")

    def first_use(self, function: Callable[[], Any], device: torch.device) -> None:
        def noted() -> None:
            self.note("use")
            function()

        Cuda().first_use(noted, device)

    def timeline(self, device: torch.device) -> Timeline:
        self.note("measure")
        return super().timeline(device)


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 2))


def test_workspaces_are_there_before_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = Warmed()
    monkeypatch.setitem(KINDS, "cpu", kind)
    make_all_graphs(net(), randn(16, 8, seed=1))
    assert kind.done[0] == ("warm", False)
    assert kind.done[1:4] == [("use", False), ("use", True), ("measure", False)]


def test_plans_that_are_loaded_are_warmed_up_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every distinct node runs once in the forward's thread and in the backward's, and nothing else is changed."""
    x, eager = randn(16, 8, seed=1), net()
    Rockmate(copy.deepcopy(eager), x, "1 MiB", costs="flops").plan.save(tmp_path / "plan.json")
    kind = Warmed()
    monkeypatch.setitem(KINDS, "cpu", kind)
    rk = Rockmate(copy.deepcopy(eager), x, plan=tmp_path / "plan.json")
    assert kind.done[0] == ("warm", False)
    nodes = len(rk.plan.problem.nodes)
    assert kind.done[1:] == [("use", False), ("use", True)] * nodes
    results = []
    for call in (eager, rk):
        torch.manual_seed(1)
        square_loss(call(x)).backward()
        results.append([*(p.grad for p in call.parameters()), *call.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_warm_up_multiplies_matrices_in_both_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU's memory: where each product runs is seen."""
    where: list[bool] = []
    multiply = torch.addmm

    def noted(*args: Any) -> torch.Tensor:
        where.append(torch._C._current_graph_task_id() >= 0)
        return multiply(*args)

    monkeypatch.setattr("torch.addmm", noted)
    monkeypatch.setattr("torch.cuda.device", lambda device: torch.no_grad())
    Cuda().warm_up(torch.device("cpu"))
    assert where == [False, True]


def test_a_timeline_records_nothing_but_memory_and_marks() -> None:
    """Operations would take most of the time that a step takes while it is observed."""
    timeline = ProfiledTimeline()
    timeline.mark()
    randn(64, 64, seed=0).requires_grad_().exp().sum().backward()
    timeline.mark()
    moments = timeline.close()
    left = list(timeline.session.kineto_results.experimental_event_tree())
    names = []
    while left:
        event = left.pop()
        names.append(event.name)
        left.extend(event.children)
    assert names.count("rockmate: mark") == 2
    assert set(names) == {"rockmate: mark", "[memory]"}
    assert moments is not None and moments[0].peak >= 64 * 64 * 4
