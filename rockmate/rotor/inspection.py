"""Measures a chain on the sample's values, stage by stage, each through the code that will run it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from rkgb.cost.clock import Clock, Mark, counted_tail, modelled_times
from rkgb.cost.layouts import unless_contiguous
from rkgb.cost.memory import bytes_by_storage, measure_memory, storage_bytes
from rkgb.cost.piece import Gradients, Layouts, backward_memory, held_on, ignore, tapped
from rkgb.device import kind_of, one_device
from rkgb.errors import UnsupportedError
from rkgb.probe.contexts import leaves_of
from rkgb.program import same
from rkgb.randomness import RandomSource, refuse_unseen_draws, set_random_state, state_bytes
from rkgb.storages import storage_key, versions_of
from rkgb.trace.other_draws import other_draws
from rkgb.trace.preserved import each_saved, preserved, without_gradients
from rkgb.trees import tensors_of
from rockmate.errors import InputError
from rockmate.rotor.parts import HIDING, Function, Moment, detached
from rockmate.rotor.stages import Stage
from solvers.rotor.chain import Chain
from solvers.rotor.chain import Stage as Measured

Figures = tuple[Any, ...]  # the fields of a ``Stage`` of a chain behind its times

TIMED = 5
"""Equal stages that are timed, at most; all have the medians of their times."""

_LOSS_OUTPUTS = 3
"""Room for the loss beside outputs, their gradients and copies, in multiples of the outputs in single precision."""

DRAWS_OTHERS = "draws from {}, and would draw other numbers when it runs again: use torch (torch.rand(()) < p)"

# With costs="flops" operations decide; bytes decide between plans with equally many operations.
_BYTES_PER_NS, _FLOPS_PER_NS = 10_000, 200


def measure_chain(
    functions: Sequence[Function],
    names: Sequence[str],
    sample: Any,
    costs: str = "measured",
    preserve_rng_state: bool = True,
    lies: Sequence[set[Layouts]] = (),
) -> Chain:
    """The chain of ``functions``, measured on ``sample`` (a tensor, or what the first function takes).

    Times are in nanoseconds, memory is in bytes of the allocator. ``costs``: "measured" takes medians of timed
    runs, and of equal stages; "flops" computes times from counted operations and bytes, the same on every machine.
    ``preserve_rng_state``: whether a stage that runs again must draw the same numbers. ``lies``: how the
    gradient of each value may lie, as far as that was seen. All stays as it is.
    Raises ``InputError`` for a stage that changes its input in place, draws from Python's or NumPy's generators,
    returns tensors whose memory cannot be measured, or cannot run again (TorchScript, a transform of torch.func in it).
    """
    times: dict[Hashable, list[tuple[int, ...]]] = {}
    measured: list[tuple[Figures, list[tuple[int, ...]], dict[int, int]]] = []
    storages: dict[int, tuple[int, int]] = {storage_key(t): (k, 0) for k, t in enumerate(tensors_of(sample))}
    values = [tuple(storages.values())]
    x, lies, again = sample, lies or [set() for _ in range(len(functions) + 1)], False
    modules = torch.nn.ModuleList([f for f in functions if isinstance(f, torch.nn.Module)])
    inputs = ((f"tensor {k} of the sample", t.device) for k, t in enumerate(tensors_of(sample)))
    device = one_device(((f"parameter {name}", t.device) for name, t in modules.named_parameters()), inputs)
    kind_of(device).warm_up(device)
    clock = None if costs == "flops" else Clock(repeat=3)
    with Moment(modules).again({}), preserved(modules, tensors_of(sample)), torch.enable_grad():
        for i, (function, name) in enumerate(zip(functions, names, strict=True)):
            probe = Probe(function, x, f"layer {i} ({name})", clock, preserve_rng_state)
            try:
                figures, x = probe.figures(name, lies[i + 1], is_last=i == len(functions) - 1)
                known = times.setdefault((figures, probe.form()), [])
                if len(known) < TIMED:
                    known.append(probe.times())
            except (InputError, MemoryError):
                raise
            except Exception as error:
                raise InputError(
                    f"layer {i} ({name}) runs, but not as rotor has to run it, again and with other tensors for "
                    f"parameters and what autograd saves: {error}. Leave it out of the Checkpointable"
                ) from error
            measured.append((figures, known, probe.made))
            again |= i > 0 and not probe.handed <= lies[i]  # the stage before gets other gradients than were tried
            lies[i].update(probe.handed)
            del probe
            # Those of parameters and buffers have no bytes, those of the input are known.
            before = {storage_key(t): (-1, 0) for t in Moment(function).owned.values()} | storages
            tensors = enumerate(tensors_of(x), len(functions) + 1000 * i)
            new = ((storage_key(t), (k, storage_bytes(t))) for k, t in tensors)
            storages = {storage: before.get(storage, found) for storage, found in new}
            values.append(tuple(storages.values()))
    if again:
        return measure_chain(functions, names, sample, costs, preserve_rng_state, lies)
    of_output = sum(map(storage_bytes, outputs := [t for t in tensors_of(x) if t.requires_grad]))
    copies = sum(4 * t.numel() for t in outputs if t.itemsize < 4)
    floats = copies + sum(t.nbytes for t in outputs if t.itemsize >= 4)
    stages, there = list[Measured](), set[int]()  # the latter: of which parameters a later stage makes gradients
    for name, (figures, known, made) in zip(reversed(names), reversed(measured), strict=True):
        # With the medians of equal ones, so that none seems faster than another by chance.
        stage = Measured(name, *Figures(int(median(each)) for each in zip(*known, strict=True)), *figures)
        added = sum(size for key, size in made.items() if key in there)  # autograd adds them up in other memory
        left = stage.parameter_gradients - added
        stages.append(replace(stage, backward_peak=stage.backward_peak + added, parameter_gradients=left))
        there |= made.keys()
    loss = _LOSS_OUTPUTS * floats + copies + max(0, floats - of_output)
    return Chain(tuple(reversed(stages)), tuple(values), of_output, loss)


class Probe:
    """One stage on its real input ``x``: a ``Piece`` of ``rkgb/cost/piece.py``. Without a ``clock`` its times are
    computed from counted operations.

    As a piece it has other parameters, in the same memory, with a ``.grad`` of their own, so that the model's stay as
    they are. They are parameters, too, as a compiled layer is compiled again for other kinds of tensors. ``others``:
    leaves with gradients that are not its own, as the weight of another layer, which it reads all the same. ``made``:
    the bytes of the gradients that its backward makes for parameters and these, by ``id``; ``handed``: how others lie.
    """

    layouts: Layouts | None = None
    others: Sequence[torch.Tensor] = ()

    def __init__(self, function: Function, x: Any, layer: str, clock: Clock | None, preserve_rng_state: bool) -> None:
        self.function, self.clock, self.preserve_rng_state = function, clock, preserve_rng_state
        self.given, self.device = detached(x), next((t.device for t in tensors_of(x)), torch.device("cpu"))
        self._first_use(layer)
        self.moment = Moment(function)
        self.saves, self.touched, self.made = False, 0, dict[int, int]()
        self.module = function if isinstance(function, torch.nn.Module) else torch.nn.Module()
        self.states = self.moment.generator_states(x)
        self.anchor = torch.zeros((), requires_grad=True)
        of = self.moment.parameters.items()
        self.leaves: dict[str, torch.Tensor] = {n: torch.nn.Parameter(p.detach(), p.requires_grad) for n, p in of}

    def _first_use(self, layer: str) -> None:
        """Run the stage for the first time. Raise ``InputError`` if it changes its input in place, draws from
        generators that are not torch's, or returns what ``check_tensors`` refuses.
        """
        kind, before, versions = kind_of(self.device), Moment(self.function), versions_of(tensors_of(self.given))
        run = torch.no_grad()(lambda: self.function(self.x))
        with other_draws() as drawn:
            output = run()
        if kind.keeps_workspaces and not drawn:
            kind.first_use(run, self.device)
        if versions != versions_of(tensors_of(self.given)):
            raise InputError(in_place_message(layer))
        if name := next((k for k in before.written() if k in before.parameters), ""):
            raise InputError(
                f"{layer} changes its parameter {name} in place, as an Embedding with max_norm= does, so it cannot run "
                "again from it. Leave it out of the Checkpointable"
            )
        if drawn and self.preserve_rng_state:
            raise InputError(f"{layer} {DRAWS_OTHERS.format(drawn[0])}")
        if self.preserve_rng_state and isinstance(self.function, torch.nn.Module):
            refuse_unseen_draws(self.function, self.device, layer)
        check_tensors(output, f"{layer} returns")

    @property
    def x(self) -> Any:
        """The input, for one run, which may give it hooks, and change its containers."""
        return detached(self.given)

    def figures(self, name: str, lies: set[Layouts], is_last: bool) -> tuple[Figures, Any]:
        """The fields behind its times, and its output: its gradient ``lies`` so, the caller holds it if ``is_last``."""
        self._check_second_run(name)
        with self._untouched():
            holds = held_on(partial(Stage(self.moment, self.preserve_rng_state).first, prepare=ignore), self.x)
        made, private, keeps_input, keeps_output = self._saved()
        stage = Stage(self.moment, self.preserve_rng_state)
        output, pass_peak, state = self._memory(lambda: stage.first(self.x, ignore))
        draws = tuple((hash(source), state_bytes([source])) for source in stage.generators or ())
        drawn, copies = sum(size for _, size in draws), sum(t.nbytes for t in stage.buffers.values())
        output, state = detached(output), max(0, state - made - drawn)  # what stays, and no slot can hold
        kept_peak, stays = self._memory(lambda: self.function(self.x))[1:]
        lasting = max(0, stays - made - private)  # no saved tensors, so they may stay as long as the graph
        peaks = []
        for wanted in (False, True):
            peaks.append(self._memory(partial(stage.fill, self.x, wanted, dict(self.states)))[1])
            stage.clear()
        backward_peak, input_gradient, parameter_gradients = self._backward(output, lies, is_last)
        self.touched = sum(t.nbytes for t in tensors_of((self.x, output))) + private + lasting
        forward_peaks = max(kept_peak, *peaks), pass_peak - state - drawn, peaks[0]
        parameter_gradients += max(lasting, state - copies)
        kept = input_gradient, parameter_gradients, keeps_input, keeps_output, state, draws
        return (private + lasting, *forward_peaks, backward_peak, *kept, *holds), output

    def times(self) -> tuple[int, ...]:
        """Those of the forward, its tail and the backward, in nanoseconds. The figures are known."""
        with self._untouched():
            if self.clock is not None:
                forward, backward, *_ = self.clock.times(self)
                tail = self.clock.medians(self._run_to_its_end, self.device)[0]
            else:
                # Operations are counted one by one. What torch.compile sees meanwhile it would never compile again.
                loaded = "torch._dynamo" in sys.modules
                with torch.compiler.set_stance("force_eager") if loaded else nullcontext():
                    forward, backward = modelled_times(
                        self, self.touched, lambda flops, size: 1 + size // _BYTES_PER_NS + flops // _FLOPS_PER_NS
                    )
                    tail = counted_tail(lambda: self.function(self.x)) // _FLOPS_PER_NS
        return forward, min(tail, forward) if self.saves else forward, backward

    def forward(self, collect: Callable[[Gradients], None] = ignore) -> list[torch.Tensor]:
        """The tensors of the output, with history. ``collect`` gets the gradients of ``x`` from the backward."""
        self.drop_gradients()
        for source, state in self.states.items():
            set_random_state(source, state)  # all runs take one path
        x = tapped(self.x, self.anchor, collect)
        with self.moment.again(self.leaves):
            return tensors_of(self.function(x))

    def ends(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results that require grad."""
        return [t for t in results if t.requires_grad]

    def drop_gradients(self) -> None:
        """Remove the ``.grad`` of all parameters of the piece."""
        for leaf in (*self.leaves.values(), *self.others):
            leaf.grad = None

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Afterwards buffers, attributes and generators are as before, so that all runs are alike; and gradients."""
        with self.moment.again({}), preserved(self.module, []), without_gradients(self.others):
            yield

    def _check_second_run(self, name: str) -> None:
        """Raise ``InputError`` if a second run gives another output. Learns what buffers and attributes runs change."""
        with self._untouched():
            stage = Stage(self.moment, self.preserve_rng_state)
            own = {*map(id, (*self.moment.owned.values(), *tensors_of(x := self.x)))}
            first = tensors_of(stage.first(x, ignore))
            self.others = [t for t in leaves_of(first) if id(t) not in own]
            assert stage.moment is not None
            stage.moment.learn_attributes()
            for d in list[Any](self.states):  # the caller may draw before the backward
                set_random_state(d, torch.Generator(getattr(d, "device", d)).manual_seed(726).get_state())
            states, aside = self.moment.generator_states(self.x), dict[RandomSource, torch.Tensor]()
            again = tensors_of(stage.fill(self.x, True, aside))
            sets = self.moment.drawn(states).keys() - aside.keys()
        # Up to the rounding of kernels that add in any order.
        alike = all(same(a, b) or torch.allclose(a, b, equal_nan=True) for a, b in zip(first, again, strict=False))
        if self.preserve_rng_state and (sets or not alike) and self.function not in HIDING:
            HIDING.add(self.function)
            self._check_second_run(name)
        elif self.preserve_rng_state and not alike:
            raise InputError(
                f"layer {name} ({type(self.function).__name__}) gives another output when it runs again: it reads what "
                "its own run changes, and that is no buffer, number among its attributes or random state of torch's "
                "that it holds (but a tensor or list, a torch.Generator elsewhere). Make it one, or leave the layer out"
            )

    def _memory(self, function: Callable[[], Any]) -> tuple[Any, int, int]:
        """(result, peak, net) of ``function`` in bytes.

        The net includes the low-precision copies of weights that autocast caches, and tensors that a custom
        ``autograd.Function`` keeps in its ``ctx``: both stay, and neither is a saved tensor that can be dropped.
        """
        with self._untouched():
            torch.clear_autocast_cache()
            return measure_memory(function, self.device)

    def _saved(self) -> tuple[int, int, bool, bool]:
        """Bytes of the output that a run allocates, and of what autograd saves besides; whether it saves the input, and
        such an output.
        """
        tensors: list[torch.Tensor] = []
        with self._untouched(), each_saved(tensors.append):
            output = tensors_of(self.function(self.x))
        saved, owned = bytes_by_storage(tensors), bytes_by_storage(self.moment.owned.values())
        inputs = bytes_by_storage(tensors_of(self.x))
        made = {key: size for key, size in bytes_by_storage(output).items() if key not in inputs.keys() | owned.keys()}
        private = sum(size for key, size in saved.items() if key not in inputs | made | owned)
        self.saves = bool(saved.keys() - owned.keys())
        return sum(made.values()), private, bool(inputs.keys() & saved.keys()), bool(made.keys() & saved.keys())

    def _backward(self, output: Any, lies: set[Layouts], is_held: bool) -> tuple[int, ...]:
        """Bytes of the backward's peak beside the incoming gradient, and of the gradients of input and parameters."""
        own = tuple(map(unless_contiguous, self.ends(results := tensors_of(output))))
        found, held, self.handed = [(0, 0, 0)], tuple(range(is_held * len(results))), set[Layouts]()
        lies.update((own, (None,) * len(own)))
        for self.layouts in (*(lies - {own}), own) if own else ():
            with self._untouched():
                memory = backward_memory(self, held=held)
                of = (*self.moment.parameters.values(), *self.others)
                leaves = zip(of, (*self.leaves.values(), *self.others), strict=True)
                self.made = {id(p): storage_bytes(t.grad) for p, t in leaves if t.grad is not None}
                self.drop_gradients()
            passed = bytes_by_storage(g for g in memory.inputs if g is not None)
            self.handed.add(tuple(None if g is None else unless_contiguous(g) for g in memory.inputs))
            found.append((memory.peak - memory.incoming, sum(passed.values()), sum(self.made.values())))
        return tuple(map(max, zip(*found, strict=True)))

    def form(self) -> Hashable:
        """What is equal, beside the figures, for stages that take equally long."""
        classes = tuple(type(m) for _, m in self.moment.modules) or (id(self.function),)
        tensors = (*self.moment.owned.values(), *tensors_of(self.x))
        forms = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
        return classes, self.moment.configuration, forms

    def _run_to_its_end(self, mark: Mark) -> list[tuple[Any, Any]]:
        """The marks of a run when autograd saves the last tensor, and at its end."""
        marks = [mark()]
        with each_saved(lambda _: marks.append(mark())):
            results = self.forward()
        marks.append(mark())
        del results
        return [(marks[-2], marks[-1])]


def in_place_message(layer: str) -> str:
    """The error of a layer that changes its input in place, and what to do."""
    return (
        f"{layer} changes its input in place, so it cannot run again from it. Make it out of place, or "
        "join it with the layer before: rotor.models.utils.ReLUAtEnd(layer) is layer and an in-place ReLU in one"
    )


def check_tensors(value: Any, where: str) -> None:
    """Raise ``InputError`` for tensors in ``value`` whose bytes cannot be counted; ``where`` begins the sentence."""
    try:
        tensors = tensors_of(value)
    except UnsupportedError as error:
        raise InputError(f"{where} what cannot be given to a second run: {error}") from None
    for t in tensors:
        if t.is_meta or t.layout != torch.strided:
            kind = "a tensor on the meta device" if t.is_meta else f"a tensor of the layout {t.layout}"
            raise InputError(f"{where} {kind}, whose memory cannot be measured: use dense tensors with values")
