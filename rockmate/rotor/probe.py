"""Measures one stage alone, through the code that will run it (``rockmate/rotor/stages.py``)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from statistics import median
from typing import Any

import torch

from rkgb.cost.clock import Clock, Mark, read
from rkgb.cost.counted import counted_tail, modelled_times
from rkgb.cost.memory import bytes_by_storage, measure_memory
from rkgb.cost.piece import backward_memory
from rkgb.cost.saved import each_saved
from rkgb.program import same
from rkgb.storages import storage_key
from rkgb.trace.capture import preserved
from rkgb.trees import tensor_leaves
from rockmate.errors import InputError
from rockmate.rotor.buffers import attributes_kept, configuration
from rockmate.rotor.stage_run import StageRun
from rockmate.rotor.stages import Stage
from rockmate.rotor.values import Function, Parts, device_of, mapped
from solvers.rotor import chain as rotor_chain
from solvers.rotor.chain import Runs

# With costs="flops" operations decide; bytes decide between plans with equally many operations.
_BYTES_PER_NS, _FLOPS_PER_NS = 10_000, 200


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of a stage: its runs and its backward."""

    runs: Runs
    backward: int

    @classmethod
    def medians(cls, measured: Sequence[Times]) -> Times:
        """The median of each time of equal stages, so that no stage seems faster than another by chance."""
        each = [(*astuple(t.runs), t.backward) for t in measured]
        *runs, backward = (int(median(times)) for times in zip(*each, strict=True))
        return cls(Runs(*runs), backward)


@dataclass(frozen=True)
class Figures:
    """What is known of a stage beside its times.

    ``stage``: with no times. ``form``: classes, plain attributes, parameters and input.
    Stages whose figures are equal, names apart, take equally long.
    """

    stage: rotor_chain.Stage
    form: Hashable

    @property
    def key(self) -> Hashable:
        """Equal for equal stages."""
        return replace(self.stage, name=""), self.form

    def timed(self, times: Times) -> rotor_chain.Stage:
        """The stage with its times."""
        return replace(self.stage, runs=times.runs, backward_time=times.backward)


@dataclass(frozen=True, slots=True)
class _Saved:
    """What a run leaves until its backward.

    ``private``: bytes beside input, output and parameters. ``lasting``: the part of them that is no saved tensor and
    may stay as long as the graph. ``keeps_input``, ``keeps_output``: whether autograd saves these. ``any``: whether it
    saves any tensor beside parameters and buffers.
    """

    private: int
    keeps_input: bool
    keeps_output: bool
    lasting: int
    any: bool


@dataclass(frozen=True, slots=True)
class _Backward:
    """Memory of a backward in bytes: ``added`` at its peak beside the incoming gradient, and the gradients it makes."""

    added: int = 0
    input_gradient: int = 0
    parameter_gradients: int = 0


class Probe:
    """One stage on its real input ``x``. Without a ``clock`` its times are computed from counted operations."""

    def __init__(self, function: Function, x: Any, clock: Clock | None, preserve_rng_state: bool) -> None:
        self.function, self.clock = function, clock
        self.preserve_rng_state = preserve_rng_state
        self.x = mapped(lambda t: t.detach().requires_grad_(t.requires_grad), x)
        self.device = device_of(self.x)
        self.output: Any = None
        self.saved = _Saved(0, False, False, 0, any=False)

    def figures(self, name: str) -> tuple[Figures, Any]:
        """The figures of the stage, and its output for the next one."""
        with self._untouched():
            self._check_second_run(name)
        stage = self._stage()
        output, pass_peak, state = self._memory(lambda: stage.first(self.x, _no_backward))
        state = max(0, state - self._allocated(output))  # generators, buffers, and what no slot can hold
        run, kept_peak, kept = self._memory(self._run)
        saved = self._saved(kept - self._allocated(run))
        del run
        stop_peak = self._fill_peak(stage, wanted=False)
        kept_peak = max(kept_peak, self._fill_peak(stage, wanted=True))
        backward = self._backward(StageRun(self.function, self.x), output)
        self.saved, self.output = saved, mapped(torch.Tensor.detach, output)
        stage_figures = rotor_chain.Stage(
            name,
            runs=Runs.alike(0),
            backward_time=0,
            held=saved.private,
            forward_peak=kept_peak,
            pass_peak=pass_peak - state,
            stop_peak=stop_peak,
            backward_peak=backward.added,
            input_gradient=backward.input_gradient,
            parameter_gradients=backward.parameter_gradients + saved.lasting,
            keeps_input=saved.keeps_input,
            keeps_output=saved.keeps_output,
            state=state,
        )
        next_x = mapped(lambda t: t.detach().requires_grad_(t.requires_grad), output)
        return Figures(stage_figures, self._form()), next_x

    def _check_second_run(self, name: str) -> None:
        """Raise ``InputError`` if a second run gives another output. Learns what buffers and attributes runs change."""
        stage = self._stage()
        first = tensor_leaves(stage.first(self.x, _no_backward))
        assert stage.attributes is not None
        stage.attributes.learn()
        again = tensor_leaves(stage.fill(self.x, True))
        if self.preserve_rng_state and not all(map(_alike, first, again)):
            raise InputError(
                f"layer {name} ({type(self.function).__name__}) gives another output when it runs again: it reads what "
                "its own run changes, and that is neither a buffer, a number among its attributes, nor a random state "
                "of torch's that it holds (a tensor or a list as an attribute, a torch.Generator elsewhere). Make it "
                "one of these, or leave the layer out of the Checkpointable"
            )

    def times(self) -> Times:
        """The times of the stage, whose figures are known."""
        with self._untouched():
            return self._times(StageRun(self.function, self.x))

    def _form(self) -> Hashable:
        parts = Parts(self.function)
        classes = tuple(type(m) for _, m in parts.modules) or (id(self.function),)
        tensors = (*parts.owned.values(), *tensor_leaves(self.x))
        return classes, configuration(parts), tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)

    # ------------------------------------------------------------------------------------------ memory

    def _stage(self) -> Stage:
        return Stage(self.function, self.preserve_rng_state)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Afterwards buffers, attributes and generators are as before, so that all runs are alike."""
        module = self.function if isinstance(self.function, torch.nn.Module) else torch.nn.Module()
        with attributes_kept(module), preserved(module, []):
            yield

    def _run(self) -> Any:
        return self.function(self.x)

    def _memory(self, function: Callable[[], Any]) -> tuple[Any, int, int]:
        """(result, peak, net) of ``function`` in bytes.

        The net includes the low-precision copies of weights that autocast caches, and tensors that a custom
        ``autograd.Function`` keeps in its ``ctx``: both stay, and neither is a saved tensor that can be dropped.
        """
        with self._untouched():
            torch.clear_autocast_cache()
            return measure_memory(function, self.device)

    def _allocated(self, output: Any) -> int:
        """Bytes of ``output`` that the run allocated: not those of input, parameters or buffers."""
        old = self._owned() | bytes_by_storage(tensor_leaves(self.x)).keys()
        return sum(size for key, size in bytes_by_storage(tensor_leaves(output)).items() if key not in old)

    def _owned(self) -> set[int]:
        return {storage_key(t) for t in Parts(self.function).owned.values()}

    def _fill_peak(self, stage: Stage, *, wanted: bool) -> int:
        peak = self._memory(lambda: stage.fill(self.x, wanted))[1]
        stage.clear()
        return peak

    def _saved(self, stays: int) -> _Saved:
        """What a run leaves, of which ``stays`` bytes beside its output were measured."""
        tensors: list[torch.Tensor] = []
        with self._untouched(), each_saved(tensors.append):
            output = self._run()
        sizes = bytes_by_storage(tensors)
        inputs = {storage_key(t) for t in tensor_leaves(self.x)}
        outputs = {storage_key(t) for t in tensor_leaves(output)}
        elsewhere = self._owned() | inputs | outputs
        private = sum(size for key, size in sizes.items() if key not in elsewhere)
        lasting = max(0, stays - private)
        kept = bool(inputs & sizes.keys()), bool((outputs - inputs) & sizes.keys())
        return _Saved(private + lasting, *kept, lasting, any=bool(sizes.keys() - self._owned()))

    def _backward(self, piece: StageRun, output: Any) -> _Backward:
        if not piece.ends(tensor_leaves(output)):
            return _Backward()
        found = _Backward()
        own = tuple(None if t.is_contiguous() else t.stride() for t in piece.ends(tensor_leaves(output)))
        for piece.layouts in (None, own) if any(own) else (None,):  # the gradient may come in either layout
            with self._untouched():
                memory = backward_memory(piece)
            passed = bytes_by_storage(g for g in memory.inputs if g is not None)
            this = _Backward(memory.peak - memory.incoming, sum(passed.values()), piece.parameter_gradients())
            piece.drop_gradients()
            found = _Backward(*map(max, astuple(found), astuple(this)))
        return found

    # ------------------------------------------------------------------------------------------- times

    def _times(self, piece: StageRun) -> Times:
        if self.clock is None:
            touched = sum(t.nbytes for t in tensor_leaves((self.x, self.output))) + self.saved.private
            whole, backward = modelled_times(
                piece, touched, lambda flops, size: 1 + size // _BYTES_PER_NS + flops // _FLOPS_PER_NS
            )
            tail = counted_tail(self._run) // _FLOPS_PER_NS if self.saved.any else whole
            return Times(Runs.alike(whole, tail), backward)
        backward = self.clock.times(piece).backward
        whole, passing, filling, stopping = self.clock.medians(self._every_run, self.device)
        passing, filling = max(passing, whole), max(filling, whole)
        return Times(Runs(whole, passing, filling, min(stopping, filling)), backward)

    def _every_run(self, mark: Mark) -> list[tuple[Any, Any]]:
        """Run the stage in each way in which a step may run it: the marks of each run's begin and end."""
        spans = []

        def timed(function: Callable[[], Any]) -> None:
            read(tensor_leaves(self.x))  # which the stage before has just made
            start = mark()
            result = function()
            spans.append((start, mark()))
            del result
            stage.clear()

        stage = self._stage()
        timed(lambda: self._stage().keep_all(self.x))
        timed(lambda: stage.first(self.x, _no_backward))
        timed(lambda: stage.fill(self.x, True))
        timed(lambda: stage.fill(self.x, False))
        return spans


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two outputs are equal, up to the rounding of kernels that add in any order."""
    return same(a, b) or torch.allclose(a, b, rtol=1e-5, atol=1e-8, equal_nan=True)


def _no_backward(_: int) -> None:
    raise AssertionError("a measured stage has no backward")
