"""``Checkpointable``: an ``nn.Sequential`` under a memory limit, with the interface of rotor."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import zip_longest
from numbers import Integral
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.utils import parametrize

from rkgb.cost.memory import refuse_within_measurements
from rkgb.device import kind_of
from rkgb.trees import tensors_of
from rockmate.budget import parse_bytes, show_bytes
from rockmate.calls.surroundings import (
    IN_TRANSFORMS,
    is_transformed,
    leave_plan,
    without_cached_parametrizations,
    without_saved_hooks,
)
from rockmate.errors import InfeasibleBudgetError, InputError
from rockmate.planning.checks import gets_sizes, refuse_lazy
from rockmate.rotor.execution import Call
from rockmate.rotor.inspection import check_tensors, measure_chain
from rockmate.rotor.models.utils import AtomicSequential
from rockmate.rotor.parts import Moment, Situation
from solvers.errors import InfeasibleError
from solvers.interrupts import Heeded
from solvers.rotor.chain import Chain
from solvers.rotor.ops import Sequence
from solvers.rotor.plans import ALGORITHMS, simplest
from solvers.rotor.walk import Walked, walk_sequence

_IN_CACHED = "within torch.nn.utils.parametrize.cached(), which has other weights when a layer runs again,"
_SLOTS = (1, "use at least 1, 500 is usual")

_MOST_EARLIER = 8
"""Earlier situations whose chains and sequences are remembered."""


class Checkpointable(nn.Module):
    """``model`` computed within ``mem_limit`` bytes: same outputs, gradients and buffer updates.

    Three ways to use it: ``measure(sample)``, then ``compute_sequence(limit)``; all in the constructor; or neither,
    then the first call measures its input, and the limit is ``mem_limit``, or 90 % of the memory that is free. A call
    that may need more is measured and planned anew (docs/rotor.md), also after one in which a layer changed a buffer in
    place for the first time; a few such situations are remembered. That call itself may exceed the limit by copies of
    these buffers, and by tables that a layer makes for a longer input. In ``eval()`` mode, without gradients, and under
    ``torch.func``'s transforms or with cached parametrizations (with a ``BudgetWarning``) the model itself runs.

    ``chain`` is what was measured, ``sequence`` what will run. Source: rotor (Beaumont et al., Inria RR-9302, 2019;
    https://hiepacs.gitlabpages.inria.fr/rotor).

    Args:
        model: An ``nn.Sequential``; nested ones are flattened, each remaining layer is a stage that runs as a whole.
        custom_input: A sample of what ``model`` is called with (a tensor or a tuple of them): measured at once if
            given.
        mem_limit: Bytes that one forward and its backward may allocate above the level at the call, parameter gradients
            that do not exist yet included.
        mem_slots: How finely the dynamic program divides the limit.
        verbosity: 1 says on stderr what is planned, 2 also every operation as it runs.
        preserve_rng_state: Whether a layer that runs again draws the same random numbers; without it, gradients of
            random layers are wrong.
        loss_tmp_memory_usage: Bytes that the loss allocates beside the output's gradient, a copy in float32 of an
            output of lower precision, and three times the output (in float32 at least). These suffice for cross entropy
            and a mean square; ``((y - target) ** 2).mean()`` takes four.
        costs: "measured" times every layer, "flops" models the times.

    Raises:
        InputError: An argument cannot be used, or a layer changes its input in place or gives another output in a
            second run.
        InfeasibleBudgetError: Nothing fits; it has the smallest feasible limit.
    """

    def __init__(
        self,
        model: nn.Sequential,
        custom_input: Any = None,
        mem_limit: int | float | str | None = None,
        mem_slots: int = 500,
        verbosity: int = 0,
        preserve_rng_state: bool = True,
        loss_tmp_memory_usage: int = 0,
        *,
        costs: str = "measured",
    ) -> None:
        super().__init__()
        if costs not in ("measured", "flops"):
            raise InputError(f'costs is {costs!r}: use "measured" or "flops"')
        self.model = model
        flatten(model)  # refuses what is no sequence of layers
        self.mem_limit = None if mem_limit is None else parse_bytes(mem_limit)
        self.mem_slots = _int("mem_slots", mem_slots, *_SLOTS)
        self.verbosity = _int("verbosity", verbosity, 0, "0 says nothing, 1 what is planned, 2 every operation")
        self.preserve_rng_state = preserve_rng_state
        self.loss_tmp_memory_usage = _int("loss_tmp_memory_usage", loss_tmp_memory_usage, 0, "bytes cannot be negative")
        self.costs, self.algo = costs, "persistent"
        self.chain: Chain | None = None
        self.sequence: Sequence | None = None
        self._judged: Sequence | None = None  # runs as it is
        self._situation: Situation | None = None
        self._moments: list[Moment] = []  # of the last call
        self._earlier: list[tuple[Situation | None, Chain | None, Sequence | None]] = []
        self.training = model.training  # of the layers, some may be in another mode
        self._lazy = True  # whether layers may have no sizes yet
        if custom_input is not None:
            self.measure(custom_input)
            if mem_limit is not None:
                self.compute_sequence(self.mem_limit)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stages, in order."""
        return tuple(name for name, _ in flatten(self.model))

    @property
    def functions(self) -> tuple[nn.Module, ...]:
        """The stages, in order."""
        return tuple(function for _, function in flatten(self.model))

    def measure(self, custom_input: Any) -> None:
        """Measure time and memory of every stage on ``custom_input``. Model, generators and input stay as they are."""
        if not self.training:
            raise InputError("the model is in eval mode, where nothing is recomputed: call train() before measure()")
        if not tensors_of(custom_input):
            raise InputError(f"the sample is of type {type(custom_input).__name__}: use a tensor or a tuple of tensors")
        refuse_within_measurements()
        refuse_lazy(self.model)
        check_tensors(custom_input, "the sample is")
        check_tensors([*self.model.parameters()], "a parameter is")
        names, functions = zip(*flatten(self.model), strict=True)
        for name, function in zip(names, functions, strict=True):
            for kind, why in _REFUSED.items():
                if any(isinstance(m, kind) for m in function.modules()):
                    raise InputError(f"layer {name} is or has {why}")
        with Heeded(), without_saved_hooks(), without_cached_parametrizations():
            chain = measure_chain(functions, names, custom_input, self.costs, self.preserve_rng_state)
        self.chain, self.sequence = replace(chain, loss=chain.loss + self.loss_tmp_memory_usage), None
        self._moments = [*map(Moment, functions)]
        self._situation, self._earlier = Situation(self._moments, custom_input), []

    def build_chain(self, mem_limit: int | float | str) -> None:
        """Let ``chain``, which was measured, have slots of ``mem_limit / mem_slots`` bytes."""
        if self.chain is None:
            raise InputError("nothing has been measured: call measure(sample) before compute_sequence()")
        self.chain = replace(self.chain, unit=max(1, -(-parse_bytes(mem_limit) // self.mem_slots)))

    def compute_sequence(
        self,
        custom_mem_limit_bytes: int | float | str | None = None,
        mem_slots: int | None = None,
        algo: str = "persistent",
        *,
        mem_limit: int | float | str | None = None,
    ) -> None:
        """Make ``sequence``: the fastest that ``algo`` finds within the limit (bytes, or text such as "700 MB").

        ``mem_limit`` is the same argument by another name. Without either, the constructor's limit holds, or 90 % of
        the memory that is free on the device. ``algo``: "persistent" or "rotor" (optimal, as in the paper),
        "no_checkpoint", "sequential", "griewank". With measured costs "persistent" is what
        ``solvers.rotor.plans.simplest`` finds, within 1 % of the optimal time.
        """
        if algo not in ALGORITHMS:
            raise InputError(f"there is no algorithm {algo!r}: use one of {', '.join(ALGORITHMS)}")
        if custom_mem_limit_bytes is not None and mem_limit is not None:
            raise InputError("custom_mem_limit_bytes and mem_limit are the same argument: give one of them")
        self.mem_slots = self.mem_slots if mem_slots is None else _int("mem_slots", mem_slots, *_SLOTS)
        self._earlier = []
        given = (custom_mem_limit_bytes, mem_limit, self.mem_limit)
        self._compute(next((limit for limit in given if limit is not None), None), algo)

    def _compute(self, mem_limit: int | float | str | None, algo: str) -> None:
        limit = self.free_limit() if mem_limit is None else parse_bytes(mem_limit)
        self.build_chain(limit)
        assert self.chain is not None
        scalars = kind_of(self._device()).scalars
        try:
            with Heeded():
                find = simplest if algo == "persistent" and self.costs == "measured" else ALGORITHMS[algo]
                sequence = find(self.chain, limit - scalars, self.mem_slots)
        except InfeasibleError as error:
            least = error.min_budget + scalars
            raise InfeasibleBudgetError(
                f"no sequence of the algorithm {algo} fits {limit} bytes ({show_bytes(limit)}); the smallest limit "
                f"that one fits is {least} bytes ({show_bytes(least)}), set by {error.step}",
                least,
            ) from None
        self.mem_limit, self.algo, self.sequence = limit, algo, sequence
        if self.verbosity > 0:
            walked = self.walked()
            sys.stderr.write(
                f"rotor: {algo}, {len(self.functions)} stages, limit {show_bytes(limit)}, predicted peak "
                f"{show_bytes(walked.peak)}, predicted overhead {100 * walked.overhead:.1f} %\n{sequence}\n"
            )

    def free_limit(self) -> int:
        """90 % of the bytes that are free on the parameters' device (on the CPU: available in the machine)."""
        return kind_of(device := self._device()).free(device) * 9 // 10

    def _device(self) -> torch.device:
        return next((p.device for p in self.parameters()), torch.device("cpu"))

    def forward(self, input: Any) -> Any:
        """The model's output for ``input``, within the limit where gradients are recorded in training mode."""
        if not (self.training and torch.is_grad_enabled()):
            return self.model(input)
        cached = parametrize._cache_enabled and any(map(parametrize.is_parametrized, self.model.modules()))
        if cached or (not torch.compiler.is_compiling() and is_transformed()):
            leave_plan(_IN_CACHED if cached else IN_TRANSFORMS)
            return self.model(input)
        self._lazy = self._lazy and gets_sizes(self.model, type(self.model).__name__)
        if self._lazy:
            return self.model(input)
        functions = self.functions
        if self._situation is None:
            self.measure(input)
        else:
            self._moments = [Moment(f, known) for f, known in zip_longest(functions, self._moments[: len(functions)])]
            if not self._situation.covers(now := Situation(self._moments, input)):
                self._turn_to(now, input)
        if self.sequence is None:
            self._compute(self.mem_limit, self.algo)
        assert self.sequence is not None
        if self.sequence is not self._judged:  # it may be the user's
            self.walked()
            self._judged = self.sequence
        announced = self.names if self.verbosity > 1 else None
        return Call(self._moments, self.sequence, announced, self.preserve_rng_state).forward(input)

    def _turn_to(self, situation: Situation, x: Any) -> None:
        """Use the chain and sequence of an earlier situation that covers this one, or measure ``x``."""
        known = [(self._situation, self.chain, self.sequence), *self._earlier]
        fitting = next((k for k in known if k[0] is not None and k[0].covers(situation)), None)
        if fitting is None:
            self.measure(x)
        else:
            self._situation, self.chain, self.sequence = fitting
        self._earlier = [k for k in known if k is not fitting][:_MOST_EARLIER]

    def walked(self) -> Walked:
        """The predicted peak, time, and memory at every operation of ``sequence``.

        Raises ``InputError`` if there is no sequence yet.
        """
        if self.chain is None or self.sequence is None:
            raise InputError("there is no sequence yet: call measure(sample), then compute_sequence(limit)")
        return walk_sequence(self.chain, self.sequence)

    def get_expected_memory(self) -> int:
        """The predicted peak in bytes."""
        return self.walked().peak

    def get_expected_makespan(self) -> float:
        """The predicted time of a forward and its backward, in seconds."""
        return self.walked().time / 1e9


_REFUSED: dict[type[nn.Module], str] = {
    Checkpointable: "a Checkpointable, whose limit would not hold within another: use .model",
    torch.jit.ScriptModule: "a module of TorchScript, which cannot run again. Leave it out of the Checkpointable",
}


def flatten(model: nn.Sequential, prefix: str = "") -> list[tuple[str, nn.Module]]:
    """(name, layer) of all layers of ``model``; a nested ``nn.Sequential`` counts as its layers.

    One that is an ``AtomicSequential``, has hooks, or overrides ``forward`` counts as one layer. Raises ``InputError``
    if the model is no ``nn.Sequential``, has hooks, or has no layers.
    """
    if not _is_sequence(model):
        raise InputError(f"the model is of type {type(model).__name__}: rotor works on an nn.Sequential")
    if not prefix and _has_hooks(model):
        raise InputError("the model has hooks, which would not run: register them on a layer or on the Checkpointable")
    layers: list[tuple[str, nn.Module]] = []
    for name, child in model._modules.items():  # a layer that stands in two places is two stages
        if _is_sequence(child) and not isinstance(child, AtomicSequential) and not _has_hooks(child):
            layers += flatten(child, f"{prefix}{name}.") if len(child) else []
        elif child is not None:
            layers.append((prefix + name, child))
    if not layers and not prefix:
        raise InputError("the model has no layers: give it at least one")
    return layers


def _is_sequence(module: nn.Module | None) -> TypeGuard[nn.Sequential]:
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _has_hooks(module: nn.Module) -> bool:
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))


def _int(name: str, number: Any, least: int, why: str) -> int:
    whole = isinstance(number, Integral)
    if not whole or number < least:
        raise InputError(f"{name} is {number!r}: {why if whole else 'give a whole number'}")
    return int(number)
