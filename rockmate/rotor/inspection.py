"""Measures a chain: every stage alone, on the sample's real values, through the code that will run it.

Memory is what the allocator reports (``rkgb.cost.memory``). Parameters are replaced by leaves with gradients of their
own, and buffers and generators are put back, so that measuring leaves no trace in the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from rkgb.cost.alone import _Feed, _Tap
from rkgb.cost.memory import measure_after, measure_memory, storage_bytes
from rkgb.device import kind_of, one_device
from rkgb.randomness import refuse_unseen_draws
from rkgb.storages import storage_key
from rkgb.trace.capture import preserved
from rkgb.trace.code import watched
from rkgb.trace.other_draws import other_draws
from rkgb.trees import tensor_leaves
from rockmate.errors import InputError
from rockmate.rotor.execution import in_place_message
from rockmate.rotor.selective import Survey, nested_choices
from rockmate.rotor.stages import Function, Stage, owned_by, versions_of
from solvers.rotor import chain as rotor_chain
from solvers.rotor.chain import Chain, Way

__all__ = ["Chain", "Measured", "measure_chain"]

# Sets of kept results that are measured for each stage; each takes three runs of it.
_WAYS = 5

# With costs="flops" operations are what counts; bytes decide between plans of as many operations.
_BYTES_PER_NS, _FLOPS_PER_NS = 10_000, 200


@dataclass(frozen=True)
class Measured:
    """A chain, and for each stage and way the numbers of the expensive operations whose results the way keeps.

    ``output_floats``: bytes of the outputs in single precision at least, as losses compute with them.
    """

    chain: Chain
    keeps: tuple[tuple[frozenset[int], ...], ...]
    output_floats: int


def measure_chain(
    functions: Sequence[Function],
    names: Sequence[str],
    sample: Any,
    costs: str = "measured",
    repeat: int = 3,
    preserve_rng_state: bool = True,
) -> Measured:
    """The measured chain of ``functions`` on ``sample`` (a tensor, or what the first function takes).

    ``costs="flops"`` models times by counted operations and bytes, the same on every run and machine.
    Raises ``InputError`` for a stage that changes its input in place, draws from Python's or NumPy's generators, or
    returns what has no memory to count.
    """
    stages: list[rotor_chain.Stage] = []
    keeps: list[tuple[frozenset[int], ...]] = []
    identities: dict[int, tuple[int, int]] = {storage_key(t): (k, 0) for k, t in enumerate(tensor_leaves(sample))}
    values = [tuple(identities.values())]
    x = sample
    modules = torch.nn.ModuleList([f for f in functions if isinstance(f, torch.nn.Module)])
    inputs = ((f"tensor {k} of the sample", t.device) for k, t in enumerate(tensor_leaves(sample)))
    device = one_device(((f"parameter {name}", t.device) for name, t in modules.named_parameters()), inputs)
    kind_of(device).warm_up(device)
    with preserved(modules, tensor_leaves(sample)), torch.enable_grad():
        for i, (function, name) in enumerate(zip(functions, names, strict=True)):
            probe = _Probe(function, x, costs, repeat, preserve_rng_state)
            probe.warm_up(i, name)
            stage, output, kept = probe.measure(name)
            stages.append(stage)
            keeps.append(kept)
            identities = _identities(function, output, identities, len(functions) + i * 1000)
            values.append(tuple({storage_key(t): identities[storage_key(t)] for t in tensor_leaves(output)}.values()))
            x = output
    gradient = sum(storage_bytes(t) for t in tensor_leaves(x) if t.requires_grad)
    floats = sum(t.nbytes * max(1, 4 // t.itemsize) for t in tensor_leaves(x) if t.requires_grad)
    return Measured(Chain(tuple(stages), tuple(values), gradient), tuple(keeps), floats)


def check_tensors(value: Any, where: str) -> None:
    """Raise ``InputError`` for tensors of which no bytes can be counted; ``where`` begins the sentence."""
    for t in tensor_leaves(value):
        if t.is_meta or t.layout != torch.strided:
            kind = "a tensor on the meta device" if t.is_meta else f"a tensor of the layout {t.layout}"
            raise InputError(f"{where} {kind}, whose memory cannot be measured: use dense tensors with values")


def _identities(
    function: Function, output: Any, before: dict[int, tuple[int, int]], fresh: int
) -> dict[int, tuple[int, int]]:
    """(identity, bytes) of the storages of ``output``: those of the input and of parameters are known."""
    found = dict(before)
    owned = _owned(function)
    here: dict[int, tuple[int, int]] = {}
    for k, t in enumerate(tensor_leaves(output)):
        key = storage_key(t)
        size = 0 if key in owned else storage_bytes(t)
        here[key] = found.get(key, (fresh + k, size))
    return here


def _owned(function: Function) -> set[int]:
    """The storages of the parameters and buffers of ``function``."""
    return {storage_key(t) for t in owned_by(function).values()}


@dataclass
class _Saved:
    """What stays of a run: bytes beside input, output and parameters, and whether autograd saves those two."""

    private: int
    keeps_input: bool
    keeps_output: bool
    lasting: int = 0  # of ``private`` what is no saved tensor, and may stay as long as the graph


class _Probe:
    """One stage on its real input."""

    def __init__(self, function: Function, x: Any, costs: str, repeat: int, preserve_rng_state: bool) -> None:
        self.function, self.costs, self.repeat = function, costs, repeat
        self.preserve_rng_state = preserve_rng_state
        self.x = _mapped(lambda t: t.detach().requires_grad_(t.requires_grad), x)
        tensors = tensor_leaves(self.x)
        self.device = next((t.device for t in tensors), torch.device("cpu"))
        self.kind = kind_of(self.device)
        self.anchor = torch.zeros((), requires_grad=True)

    def warm_up(self, i: int, name: str) -> None:
        """First use of the kernels; whether the stage leaves its input alone, and can draw the same numbers again."""
        x = _mapped(lambda t: t.detach(), self.x)
        versions = versions_of(x)
        outputs: list[Any] = []

        def run() -> None:
            with torch.no_grad():
                outputs.append(self.function(x))

        with watched() as watch, other_draws(watch) as drawn:
            run()
        if self.kind.keeps_workspaces and not drawn:
            self.kind.first_use(run, self.device)
        if versions != versions_of(x):
            raise InputError(in_place_message(i, name))
        if drawn and self.preserve_rng_state:
            raise InputError(
                f"layer {i} ({name}) draws from {drawn[0]}, where it would draw other numbers when it runs again: draw "
                "with torch instead (torch.rand(()) < p)"
            )
        if self.preserve_rng_state and isinstance(self.function, torch.nn.Module):
            refuse_unseen_draws(self.function, self.device, f"layer {i} ({name})")
        check_tensors(outputs[0], f"layer {i} ({name}) returns")

    def measure(self, name: str) -> tuple[rotor_chain.Stage, Any, tuple[frozenset[int], ...]]:
        """The stage's figures, its output for the next one, and what its ways keep."""
        again = Stage(self.function, self.preserve_rng_state)
        again.first(self.x, _unwanted)  # learns which buffers change
        again = Stage(self.function, self.preserve_rng_state)
        output, pass_peak, state = self._memory(lambda: again.first(self.x, _unwanted))
        state = max(0, state - self._fresh(output))  # generators, buffers, and what no slot can hold
        run, kept_peak, kept = self._memory(self._run)
        saved = self._saved(kept - self._fresh(run))
        del run
        stop_peak = self._fill_peak(again, False)
        kept_peak = max(kept_peak, self._fill_peak(again, True))
        incoming, backward_peak, input_gradient, parameter_gradients = self._backward(output)
        forward, tail, backward = self._counted() if self.costs == "flops" else self._times()
        ways, keeps = [Way(saved.private, kept_peak, saved.private)], [frozenset[int]()]
        for keep, way in self._partial_ways(forward - tail, saved, state):
            ways.append(way)
            keeps.append(keep)
        stage = rotor_chain.Stage(
            name,
            forward,
            tail if again.slots else forward,
            backward,
            pass_peak - state,
            stop_peak,
            backward_peak - incoming,
            input_gradient,
            parameter_gradients + saved.lasting,
            tuple(ways),
            saved.keeps_input,
            saved.keeps_output,
            state,
        )
        return stage, _mapped(lambda t: t.detach().requires_grad_(t.requires_grad), output), tuple(keeps)

    def _partial_ways(self, rerun_time: int, saved: _Saved, state: int) -> list[tuple[frozenset[int], Way]]:
        """Ways that keep results of expensive operations; only those that hold less than keeping everything."""
        survey = Survey(lambda: self.kind.mark(self.device))
        last = [0]

        def pack(t: torch.Tensor) -> torch.Tensor:
            last[0] = len(survey.found)
            return t

        self.kind.hold(self.device)
        with saved_tensors_hooks(pack, lambda t: t), survey:
            output = self._run()
        ends = {storage_key(t) for t in (*tensor_leaves(self.x), *tensor_leaves(output))}
        rerun = survey.found[: last[0]]  # the others come behind the last saved tensor
        counted = self.costs == "flops"
        cost = {k: o.flops // _FLOPS_PER_NS if counted else self.kind.between(*o.span) for k, o in enumerate(rerun)}
        size = {k: sum(o.results.values()) for k, o in enumerate(rerun)}
        able = [k for k, o in enumerate(rerun) if o.keepable and not o.results.keys() & ends]
        # The second run makes a saved output again, whether or not the first one is still there.
        again = sum({storage_key(t): storage_bytes(t) for t in tensor_leaves(output)}.values())
        refilled = saved.private + (again if saved.keeps_output else 0)
        found: list[tuple[frozenset[int], Way]] = []
        for keep in nested_choices([(k, size[k], cost[k]) for k in able], _WAYS):
            held = sum(size[k] for k in keep)
            if held < saved.private:
                left = max(0, rerun_time - sum(cost[k] for k in keep))
                found.append((keep, self._partial_way(keep, held, refilled, left, state)))
        return found

    def _partial_way(self, keep: frozenset[int], held: int, refilled: int, left: int, state: int) -> Way:
        stage = Stage(self.function, self.preserve_rng_state)
        _, first_peak, _ = self._memory(lambda: stage.first(self.x, _unwanted, keep))
        stage.clear()
        _, again_peak, _ = self._memory(lambda: stage.skim(self.x, keep))
        stage.clear()

        def skim() -> None:
            stage.skim(self.x, keep)
            torch.clear_autocast_cache()

        _, refill_peak = measure_after(skim, lambda _: stage.refill(), self.device)
        stage.clear()
        return Way(held, max(first_peak - state, again_peak), refilled, left, refill_peak)

    def _memory(self, function: Callable[[], Any]) -> tuple[Any, int, int]:
        """(result, peak, net) of ``function`` in bytes.

        What stays includes the low-precision copies of weights that autocast caches, and tensors that a custom
        ``autograd.Function`` keeps in its ``ctx``: neither is a saved tensor that can be dropped.
        """
        torch.clear_autocast_cache()
        return measure_memory(function, self.device)

    def _fresh(self, output: Any) -> int:
        """Bytes of an output that the run allocated."""
        old = _owned(self.function) | {storage_key(t) for t in tensor_leaves(self.x)}
        sizes = {storage_key(t): storage_bytes(t) for t in tensor_leaves(output)}
        return sum(size for key, size in sizes.items() if key not in old)

    def _run(self) -> Any:
        return self.function(self.x)

    def _fill_peak(self, stage: Stage, wanted: bool) -> int:
        peak = self._memory(lambda: stage.fill(self.x, wanted))[1]
        stage.clear()
        return peak

    def _saved(self, stays: int = 0) -> _Saved:
        """Of a run of which ``stays`` bytes stay beside the output, as far as they are new."""
        found: dict[int, torch.Tensor] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            found[storage_key(t)] = t
            return t

        with saved_tensors_hooks(pack, lambda t: t):
            output = self._run()
        owned = _owned(self.function)
        inputs = {storage_key(t) for t in tensor_leaves(self.x)}
        outputs = {storage_key(t) for t in tensor_leaves(output)}
        private = {k: storage_bytes(t) for k, t in found.items() if k not in owned | inputs | outputs}
        size = sum(private.values())
        lasting = max(0, stays - size)
        keeps_input, keeps_output = bool(inputs & found.keys()), bool((outputs - inputs) & found.keys())
        return _Saved(size + lasting, keeps_input, keeps_output, lasting)

    def _backward(self, output: Any) -> tuple[int, int, int, int]:
        """Bytes of the incoming gradient, the peak with it, of the input's and of the parameters' gradients."""
        if not any(t.requires_grad for t in tensor_leaves(output)):
            return 0, 0, 0, 0
        came: list[Any] = []
        sizes: list[int] = []
        leaves: dict[str, torch.Tensor] = {}
        if isinstance(self.function, torch.nn.Module):
            leaves = {n: p.detach().requires_grad_(p.requires_grad) for n, p in self.function.named_parameters()}

        def forward() -> torch.Tensor:
            x = self.x
            tapped = [t for t in tensor_leaves(x) if t.requires_grad]
            if tapped:
                taps = iter(_Tap.apply(came.append, self.anchor, *tapped))
                x = _mapped(lambda t: next(taps) if t.requires_grad else t, x)
            if isinstance(self.function, torch.nn.Module):
                results = tensor_leaves(functional_call(self.function, leaves, (x,)))
            else:
                results = tensor_leaves(self.function(x))
            ends = [t for t in results if t.requires_grad]
            end: torch.Tensor = _Feed.apply(
                lambda grads: sizes.extend(storage_bytes(g) for g in grads), [None] * len(ends), False, *ends
            )
            return end

        _, peak = measure_after(forward, torch.Tensor.backward, self.device)
        passed = {storage_key(g): storage_bytes(g) for gs in came for g in gs if g is not None}
        made = sum(storage_bytes(p.grad) for p in leaves.values() if p.grad is not None)
        return sum(sizes), peak, sum(passed.values()), made

    def _times(self) -> tuple[int, int, int]:
        """Medians in ns: forward, the part of it behind the last saved tensor, backward."""
        forward, tail, backward = [], [], []
        for _ in range(self.repeat):
            self.kind.hold(self.device)
            start = self._mark()
            output = self._run()
            forward.append(self.kind.between(start, self._mark()))
            ends = [t for t in tensor_leaves(output) if t.requires_grad]
            if ends:
                wrt = [t for t in (*tensor_leaves(self.x), *self._parameters()) if t.requires_grad]
                grads = [torch.randn_like(t) for t in ends]  # ones make matrix products look fast on a GPU
                self.kind.hold(self.device)
                start = self._mark()
                torch.autograd.grad(ends, wrt, grads, allow_unused=True)
                backward.append(self.kind.between(start, self._mark()))
            del output, ends
            tail.append(self._tail())
        return int(median(forward)), int(min(median(tail), median(forward))), int(median(backward or [0]))

    def _tail(self) -> int:
        self.kind.hold(self.device)
        last = [self._mark()]

        def pack(t: torch.Tensor) -> torch.Tensor:
            last[0] = self._mark()
            return t

        with saved_tensors_hooks(pack, lambda t: t):
            self._run()
        return self.kind.between(last[0], self._mark())

    def _mark(self) -> Any:
        return self.kind.mark(self.device)

    def _counted(self) -> tuple[int, int, int]:
        """The same from counted operations and bytes."""
        at_last = [0]
        with FlopCounterMode(display=False) as counter:

            def pack(t: torch.Tensor) -> torch.Tensor:
                at_last[0] = counter.get_total_flops()
                return t

            with saved_tensors_hooks(pack, lambda t: t):
                output = self._run()
        total = counter.get_total_flops()
        ends = [t for t in tensor_leaves(output) if t.requires_grad]
        touched = sum(t.nbytes for t in (*tensor_leaves(self.x), *tensor_leaves(output))) + self._saved().private
        forward = 1 + touched // _BYTES_PER_NS + total // _FLOPS_PER_NS
        backward = 0
        if ends:
            wrt = [t for t in (*tensor_leaves(self.x), *self._parameters()) if t.requires_grad]
            with FlopCounterMode(display=False) as counter:
                torch.autograd.grad(ends, wrt, [torch.ones_like(t) for t in ends], allow_unused=True)
            backward = 1 + 2 * touched // _BYTES_PER_NS + counter.get_total_flops() // _FLOPS_PER_NS
        return forward, (total - at_last[0]) // _FLOPS_PER_NS, backward

    def _parameters(self) -> list[torch.nn.Parameter]:
        return list(self.function.parameters()) if isinstance(self.function, torch.nn.Module) else []


def _unwanted(_: int) -> None:
    raise AssertionError("a measured stage has no backward")


def _mapped(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    return pytree.tree_map(lambda t: change(t) if isinstance(t, torch.Tensor) else t, value)
