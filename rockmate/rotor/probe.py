"""Measures one stage alone, through the code that will run it (``rockmate/rotor/stages.py``)."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from rkgb.cost.clock import Clock, Mark, read
from rkgb.cost.counted import counted_tail, modelled_times
from rkgb.cost.memory import bytes_by_storage, measure_memory, measure_phases
from rkgb.cost.piece import backward_memory
from rkgb.cost.saved import each_saved
from rkgb.program import same
from rkgb.storages import storage_key
from rkgb.trace.capture import preserved
from rkgb.trees import tensor_leaves
from rockmate.errors import InputError
from rockmate.rotor.buffers import attributes_kept
from rockmate.rotor.selective import Choice, Survey, nested_choices, units
from rockmate.rotor.stage_run import StageRun
from rockmate.rotor.stages import Stage
from rockmate.rotor.values import Function, Parts, device_of, generator_states, mapped
from solvers.rotor import chain as rotor_chain
from solvers.rotor.chain import Runs, Way

# How many sets of kept results are measured for each stage. Each set takes eleven runs.
_WAYS = 6

# With costs="flops" operations decide; bytes decide between plans with equally many operations.
_BYTES_PER_NS, _FLOPS_PER_NS = 10_000, 200


@dataclass(frozen=True, slots=True)
class Times:
    """Nanoseconds of a stage: its runs, its backward, and, of each partial way, a run and the reruns behind it."""

    runs: Runs
    backward: int
    ways: tuple[tuple[int, int], ...]

    @classmethod
    def medians(cls, measured: Sequence[Times]) -> Times:
        """The median of each time of equal stages, so that no stage seems faster than another by chance."""
        each = [(*_runs(t.runs), t.backward, *(time for way in t.ways for time in way)) for t in measured]
        whole, passing, filling, stopping, backward, *ways = (int(median(times)) for times in zip(*each, strict=True))
        return cls(Runs(whole, passing, filling, stopping), backward, tuple(zip(ways[::2], ways[1::2], strict=True)))


def _runs(runs: Runs) -> tuple[int, ...]:
    return runs.whole, runs.passing, runs.filling, runs.stopping


@dataclass(frozen=True)
class Figures:
    """What is known of a stage beside its times.

    ``stage``: with one way and no times. ``several``: the other ways, with what each keeps. ``operations``: of each one
    that makes something, its place, bytes, counted floating-point operations, and whether its result can be kept.
    ``form``: classes, parameters and input.
    Stages whose figures are equal, names apart, take equally long.
    """

    stage: rotor_chain.Stage
    several: tuple[tuple[Choice, Way], ...]
    operations: tuple[tuple[int, int, int, bool], ...]
    form: Hashable

    @property
    def key(self) -> Hashable:
        """Equal for equal stages."""
        return replace(self.stage, name=""), self.several, self.operations, self.form

    def timed(self, times: Times) -> tuple[rotor_chain.Stage, tuple[Choice, ...]]:
        """The stage, and what each of its ways keeps."""
        ways, keeps = list(self.stage.ways), [Choice()]
        again = times.runs.passing + times.runs.stopping
        for (keep, way), (run_time, refill_time) in zip(self.several, times.ways, strict=True):
            if run_time + refill_time < again:  # else the input, from which all can run again, is as good
                ways.append(replace(way, run_time=run_time, refill_time=refill_time))
                keeps.append(keep)
        stage = replace(self.stage, runs=times.runs, backward_time=times.backward, ways=tuple(ways))
        return stage, tuple(keeps)


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


@dataclass(slots=True)
class _Surveyed:
    """What the operations of a run make, and its output.

    ``able``: what can be kept together of results up to the last saved tensor (``units``), with times in nanoseconds.
    """

    survey: Survey
    able: list[tuple[frozenset[int], int, int]]
    output: Any


Ranks = dict[Hashable, list[tuple[frozenset[int], int, int]]]
"""What can be kept of stages (``units``), by their forms and operations."""


class Probe:
    """One stage on its real input ``x``. Without a ``clock`` its times are computed from counted operations."""

    def __init__(self, function: Function, x: Any, clock: Clock | None, preserve_rng_state: bool) -> None:
        self.function, self.clock = function, clock
        self.preserve_rng_state = preserve_rng_state
        self.x = mapped(lambda t: t.detach().requires_grad_(t.requires_grad), x)
        self.device = device_of(self.x)
        self.measured: tuple[_Saved, _Surveyed]

    def figures(self, name: str, ranks: Ranks) -> tuple[Figures, Any]:
        """The figures of the stage, and its output for the next one.

        ``ranks``: what can be kept, by its times; equal stages choose alike.
        """
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
        surveyed = self._survey()
        operations = tuple((r.place, r.bytes, r.flops, r.keepable) for r in surveyed.survey.made)
        form = self._form()
        surveyed.able = ranks.setdefault((form, operations), surveyed.able)
        several = self._partial_ways(surveyed, saved, state)
        self.measured = saved, surveyed
        stage_figures = rotor_chain.Stage(
            name,
            runs=Runs.alike(0),
            backward_time=0,
            pass_peak=pass_peak - state,
            stop_peak=stop_peak,
            backward_peak=backward.added,
            input_gradient=backward.input_gradient,
            parameter_gradients=backward.parameter_gradients + saved.lasting,
            ways=(Way(saved.private, kept_peak, saved.private),),
            keeps_input=saved.keeps_input,
            keeps_output=saved.keeps_output,
            state=state,
        )
        next_x = mapped(lambda t: t.detach().requires_grad_(t.requires_grad), output)
        return Figures(stage_figures, tuple(several), operations, form), next_x

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

    def times(self, figures: Figures) -> Times:
        """The times of the stage, whose ``figures`` these are."""
        with self._untouched():
            return self._times(StageRun(self.function, self.x), *self.measured, [keep for keep, _ in figures.several])

    def _form(self) -> Hashable:
        parts = Parts(self.function)
        classes = tuple(type(m) for _, m in parts.modules) or (id(self.function),)
        tensors = (*parts.owned.values(), *tensor_leaves(self.x))
        return classes, tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)

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

    def _times(self, piece: StageRun, saved: _Saved, surveyed: _Surveyed, keeps: list[Choice]) -> Times:
        if self.clock is None:
            output = tensor_leaves(surveyed.output)
            touched = sum(t.nbytes for t in (*tensor_leaves(self.x), *output)) + saved.private
            whole, backward = modelled_times(
                piece, touched, lambda flops, size: 1 + size // _BYTES_PER_NS + flops // _FLOPS_PER_NS
            )
            tail = counted_tail(self._run) // _FLOPS_PER_NS if saved.any else whole
            flops = {r.place: r.flops for r in surveyed.survey.made}
            left = [sum(flops[place] // _FLOPS_PER_NS for place in keep.places) for keep in keeps]
            return Times(Runs.alike(whole, tail), backward, tuple((whole, max(0, whole - tail - k)) for k in left))
        backward = self.clock.times(piece).backward
        whole, passing, filling, stopping, *rest = self.clock.medians(partial(self._every_run, keeps), self.device)
        passing, filling = max(passing, whole), max(filling, whole)
        ways = tuple((max(run, whole), refill) for run, refill in zip(rest[::2], rest[1::2], strict=True))
        return Times(Runs(whole, passing, filling, min(stopping, filling)), backward, ways)

    def _every_run(self, keeps: list[Choice], mark: Mark) -> list[tuple[Any, Any]]:
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
        for keep in keeps:
            kept = self._stage()
            timed(partial(kept.first, self.x, _no_backward, keep))
            timed(kept.refill)
        return spans

    # ------------------------------------------------------------------------------------ partial ways

    def _partial_ways(self, surveyed: _Surveyed, saved: _Saved, state: int) -> list[tuple[Choice, Way]]:
        """Ways that keep results of operations, and what they keep; only ways that hold less than way 0."""
        size = {r.place: r.bytes for r in surveyed.survey.made}
        # The second run makes a saved output again, whether or not the first one is still there.
        again = sum(bytes_by_storage(tensor_leaves(surveyed.output)).values()) if saved.keeps_output else 0
        ways: list[tuple[Choice, Way]] = []
        for places in nested_choices(surveyed.able, saved.private - 1, _WAYS):
            keep = surveyed.survey.choice(places)
            held = sum(size[place] for place in places)
            first_peak, refill_peak = self._partial_peaks(keep, state)
            ways.append((keep, Way(held, first_peak, saved.private + again, refill_peak=refill_peak)))
        return ways

    def _survey(self) -> _Surveyed:
        sources = generator_states(Parts(self.function), self.x)
        surveys: list[tuple[Survey, int]] = []
        outputs: list[Any] = []

        def run(mark: Mark) -> list[tuple[Any, Any]]:
            survey, last = Survey(mark, sources), 0

            def note(_: torch.Tensor) -> None:
                nonlocal last
                last = len(survey.made)

            with self._untouched(), each_saved(note), survey:
                output = self._run()
            surveys.append((survey, last))
            outputs[:] = [output]
            return [span for r in survey.made for span in r.spans]

        if self.clock is None:
            run(lambda: None)
            times = [r.flops // _FLOPS_PER_NS for r in surveys[0][0].made]
        else:
            spans = iter(self.clock.medians(run, self.device))
            times = [sum(next(spans) for _ in r.spans) for r in surveys[-1][0].made]
        survey, last = surveys[-1]
        ends = {storage_key(t) for t in (*tensor_leaves(self.x), *tensor_leaves(outputs))}
        # The others come after the last saved tensor.
        able = [] if survey.opaque else units(survey.made[:last], times[:last], survey.draws, ends)
        survey.alive = []
        return _Surveyed(survey, able, outputs[0])

    def _partial_peaks(self, keep: Choice, state: int) -> tuple[int, int]:
        """The peak of a run that keeps the results of ``keep``, and that of the recomputation before its backward."""
        stage = self._stage()
        _, first_peak, _ = self._memory(lambda: stage.first(self.x, _no_backward, keep))
        stage.clear()
        _, again_peak, _ = self._memory(lambda: stage.skim(self.x, keep))
        stage.clear()

        def skim(_: None) -> None:
            stage.skim(self.x, keep)
            torch.clear_autocast_cache()

        _, (_, refilled) = measure_phases([skim, lambda _: stage.refill()], self.device)
        stage.clear()
        return max(first_peak - state, again_peak), refilled.peak


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two outputs are equal, up to the rounding of kernels that add in any order."""
    return same(a, b) or torch.allclose(a, b, rtol=1e-5, atol=1e-8, equal_nan=True)


def _no_backward(_: int) -> None:
    raise AssertionError("a measured stage has no backward")
