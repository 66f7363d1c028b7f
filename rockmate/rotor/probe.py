"""Measures one stage alone, through the code that will run it (``rockmate/rotor/stages.py``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.cost.clock import Clock, Mark
from rkgb.cost.counted import counted_tail, modelled_times
from rkgb.cost.memory import bytes_by_storage, measure_memory, storage_bytes
from rkgb.cost.piece import Gradients, Layouts, Tap, backward_memory, gradient, ignore
from rkgb.cost.saved import each_saved
from rkgb.program import same
from rkgb.randomness import set_random_state
from rkgb.trace.capture import preserved
from rkgb.trees import tensor_leaves
from rockmate.errors import InputError
from rockmate.rotor.parts import Function, Moment, detached, device_of
from rockmate.rotor.stages import Stage
from solvers.rotor import chain as rotor_chain

# With costs="flops" operations decide; bytes decide between plans with equally many operations.
_BYTES_PER_NS, _FLOPS_PER_NS = 10_000, 200


class Probe:
    """One stage on its real input ``x``: a ``Piece`` of ``rkgb/cost/piece.py``. Without a ``clock`` its times are
    computed from counted operations.

    As a piece it has other parameters, in the same memory, with a ``.grad`` of their own, so that the model's stay as
    they are. They are parameters, too, as a compiled layer is compiled again for other kinds of tensors.
    """

    layouts: Layouts | None = None

    def __init__(self, function: Function, x: Any, clock: Clock | None, preserve_rng_state: bool) -> None:
        self.function, self.clock, self.preserve_rng_state = function, clock, preserve_rng_state
        self.x, self.device, self.moment = detached(x), device_of(x), Moment(function)
        self.module = function if isinstance(function, torch.nn.Module) else torch.nn.Module()
        self.states = self.moment.generator_states(x)
        self.anchor = torch.zeros((), requires_grad=True)
        self.leaves: dict[str, torch.Tensor] = {
            n: torch.nn.Parameter(p.detach(), p.requires_grad) for n, p in self.moment.parameters.items()
        }
        self.saves = False
        self.touched = 0

    def figures(self, name: str) -> tuple[rotor_chain.Stage, Hashable, Any]:
        """The stage without its times, what is equal for stages that take equally long, and the output."""
        self._check_second_run(name)
        made, private, keeps_input, keeps_output = self._saved()
        stage = self._stage()
        output, pass_peak, state = self._memory(lambda: stage.first(self.x, _no_backward))
        output, state = detached(output), max(0, state - made)  # what stays, and no slot can hold
        kept_peak, stays = self._memory(lambda: self.function(self.x))[1:]
        lasting = max(0, stays - made - private)  # no saved tensors, so they may stay as long as the graph
        peaks = []
        for wanted in (False, True):
            peaks.append(self._memory(partial(stage.fill, self.x, wanted))[1])
            stage.clear()
        backward_peak, input_gradient, parameter_gradients = self._backward(output)
        self.touched = sum(t.nbytes for t in tensor_leaves((self.x, output))) + private + lasting
        found = rotor_chain.Stage(
            name,
            forward_time=0,
            tail=0,
            backward_time=0,
            held=private + lasting,
            forward_peak=max(kept_peak, *peaks),
            pass_peak=pass_peak - state,
            stop_peak=peaks[0],
            backward_peak=backward_peak,
            input_gradient=input_gradient,
            parameter_gradients=parameter_gradients + lasting,
            keeps_input=keeps_input,
            keeps_output=keeps_output,
            state=state,
        )
        return found, (replace(found, name=""), self._form()), output

    def times(self) -> tuple[int, ...]:
        """Those of the forward, its tail and the backward, in nanoseconds. The figures are known."""
        with self._untouched():
            if self.clock is not None:
                found = self.clock.times(self)
                tail = self.clock.medians(self._run_to_its_end, self.device)[0]
                forward, backward = found.forward, found.backward
            else:
                with _uncompiled():
                    forward, backward = modelled_times(
                        self, self.touched, lambda flops, size: 1 + size // _BYTES_PER_NS + flops // _FLOPS_PER_NS
                    )
                    tail = counted_tail(lambda: self.function(self.x)) // _FLOPS_PER_NS
        return forward, min(tail, forward) if self.saves else forward, backward

    # ------------------------------------------------------------------------------------- as a piece

    def forward(self, collect: Callable[[Gradients], None] = ignore) -> list[torch.Tensor]:
        """The tensors of the output, with history. ``collect`` gets the gradients of ``x`` from the backward."""
        self.drop_gradients()
        for source, state in self.states.items():
            set_random_state(source, state)  # all runs take one path
        x = self.x
        tapped = [t for t in tensor_leaves(x) if t.requires_grad]
        if tapped:
            taps = iter(Tap.apply(collect, self.anchor, *tapped))
            x = pytree.tree_map_only(torch.Tensor, lambda t: next(taps) if t.requires_grad else t, x)
        with self.moment.again(self.leaves):
            return tensor_leaves(self.function(x))

    def ends(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results that require grad."""
        return [t for t in results if t.requires_grad]

    def gradients(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """New gradients of ones for ``ends(results)``."""
        return [gradient(t.shape, None, t.dtype, t.device) for t in self.ends(results)]

    def drop_gradients(self) -> None:
        """Remove the ``.grad`` of all parameters of the piece."""
        for leaf in self.leaves.values():
            leaf.grad = None

    # ------------------------------------------------------------------------------------------ memory

    def _stage(self) -> Stage:
        return Stage(self.function, self.preserve_rng_state)

    @contextmanager
    def _untouched(self) -> Iterator[None]:
        """Afterwards buffers, attributes and generators are as before, so that all runs are alike."""
        with self.moment.kept(), preserved(self.module, []):
            yield

    def _check_second_run(self, name: str) -> None:
        """Raise ``InputError`` if a second run gives another output. Learns what buffers and attributes runs change."""
        with self._untouched():
            stage = self._stage()
            first = tensor_leaves(stage.first(self.x, _no_backward))
            assert stage.moment is not None
            stage.moment.learn_attributes()
            again = tensor_leaves(stage.fill(self.x, True))
        if self.preserve_rng_state and not all(map(_alike, first, again)):
            raise InputError(
                f"layer {name} ({type(self.function).__name__}) gives another output when it runs again: it reads what "
                "its own run changes, and that is neither a buffer, a number among its attributes, nor a random state "
                "of torch's that it holds (a tensor or a list as an attribute, a torch.Generator elsewhere). Make it "
                "one of these, or leave the layer out of the Checkpointable"
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
            output = tensor_leaves(self.function(self.x))
        saved, owned = bytes_by_storage(tensors), bytes_by_storage(self.moment.owned.values())
        inputs = bytes_by_storage(tensor_leaves(self.x))
        made = {key: size for key, size in bytes_by_storage(output).items() if key not in inputs.keys() | owned.keys()}
        private = sum(size for key, size in saved.items() if key not in inputs | made | owned)
        self.saves = bool(saved.keys() - owned.keys())
        return sum(made.values()), private, bool(inputs.keys() & saved.keys()), bool(made.keys() & saved.keys())

    def _backward(self, output: Any) -> tuple[int, ...]:
        """Bytes of the backward's peak beside the incoming gradient, and of the gradients of input and parameters."""
        own = tuple(None if t.is_contiguous() else t.stride() for t in self.ends(tensor_leaves(output)))
        found = [(0, 0, 0)]
        for self.layouts in (None, own) if any(own) else (None,) if own else ():  # the gradient may come in either
            with self._untouched():
                memory = backward_memory(self)
            passed = bytes_by_storage(g for g in memory.inputs if g is not None)
            gradients = sum(storage_bytes(leaf.grad) for leaf in self.leaves.values() if leaf.grad is not None)
            found.append((memory.peak - memory.incoming, sum(passed.values()), gradients))
            self.drop_gradients()
        return tuple(map(max, zip(*found, strict=True)))

    # ------------------------------------------------------------------------------------------- times

    def _form(self) -> Hashable:
        moment = self.moment
        classes = tuple(type(m) for _, m in moment.modules) or (id(self.function),)
        tensors = (*moment.owned.values(), *tensor_leaves(self.x))
        forms = tuple((t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors)
        return classes, moment.configuration(), forms

    def _run_to_its_end(self, mark: Mark) -> list[tuple[Any, Any]]:
        """The marks of a run when autograd saves the last tensor, and at its end."""
        marks = [mark()]
        with each_saved(lambda _: marks.append(mark())):
            results = self.forward()
        marks.append(mark())
        del results
        return [(marks[-2], marks[-1])]


def _uncompiled() -> AbstractContextManager[None]:
    """Operations are counted one by one, and what torch.compile sees meanwhile it would never compile again."""
    loaded = "torch._dynamo" in sys.modules  # it takes a second, and without it nothing is compiled
    return torch.compiler.set_stance("force_eager") if loaded else nullcontext()


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two outputs are equal, up to the rounding of kernels that add in any order."""
    return same(a, b) or torch.allclose(a, b, rtol=1e-5, atol=1e-8, equal_nan=True)


def _no_backward(_: int) -> None:
    raise AssertionError("a measured stage has no backward")
