"""Measures a chain on the sample's values, stage by stage; ``rockmate/rotor/probe.py`` measures one stage."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from rkgb.cost.clock import Clock
from rkgb.cost.memory import storage_bytes
from rkgb.device import kind_of, one_device
from rkgb.storages import storage_key
from rkgb.trace.capture import preserved
from rkgb.trees import tensor_leaves
from rockmate.errors import InputError
from rockmate.rotor.checks import warm_up
from rockmate.rotor.parts import Parts, kept
from rockmate.rotor.probe import Probe
from rockmate.rotor.values import Function
from solvers.rotor.chain import Chain, Runs, Stage

__all__ = ["Chain", "Measured", "measure_chain"]

TIMED = 5
"""Equal stages that are timed, at most; all have the medians of their times."""


@dataclass(frozen=True)
class Measured:
    """A measured chain.

    ``output_floats``: bytes of the outputs if each number takes at least four, as losses compute in single precision.
    """

    chain: Chain
    output_floats: int


def measure_chain(
    functions: Sequence[Function],
    names: Sequence[str],
    sample: Any,
    costs: str = "measured",
    repeat: int = 3,
    preserve_rng_state: bool = True,
) -> Measured:
    """The chain of ``functions``, measured on ``sample`` (a tensor, or what the first function takes).

    Times are in nanoseconds, memory is in bytes of the allocator. ``costs``: "measured" takes medians of ``repeat``
    timed runs, and of equal stages; "flops" computes times from counted operations and bytes, the same on every run and
    machine. ``preserve_rng_state``: whether a stage that runs again must draw the same numbers. Buffers, generators and
    gradients stay as they are.
    Raises ``InputError`` for a stage that changes its input in place, draws from Python's or NumPy's generators,
    returns tensors whose memory cannot be measured, or cannot run again (TorchScript, a transform of torch.func in it).
    """
    measured: list[tuple[Stage, Hashable]] = []
    times: dict[Hashable, list[tuple[int, ...]]] = {}
    identities: dict[int, tuple[int, int]] = {storage_key(t): (k, 0) for k, t in enumerate(tensor_leaves(sample))}
    values = [tuple(identities.values())]
    x = sample
    modules = torch.nn.ModuleList([f for f in functions if isinstance(f, torch.nn.Module)])
    inputs = ((f"tensor {k} of the sample", t.device) for k, t in enumerate(tensor_leaves(sample)))
    device = one_device(((f"parameter {name}", t.device) for name, t in modules.named_parameters()), inputs)
    kind_of(device).warm_up(device)
    clock = None if costs == "flops" else Clock(repeat=repeat)
    with kept(Parts(modules)), preserved(modules, tensor_leaves(sample)), torch.enable_grad():
        for i, (function, name) in enumerate(zip(functions, names, strict=True)):
            warm_up(function, x, (i, name), preserve_rng_state)
            probe = Probe(function, x, clock, preserve_rng_state)
            with _named(i, name):
                stage, key, x = probe.figures(name)
                known = times.setdefault(key, [])
                if len(known) < TIMED:
                    known.append(probe.times())
            del probe
            measured.append((stage, key))
            identities = _identities(function, x, identities, len(functions) + i * 1000)
            values.append(tuple({storage_key(t): identities[storage_key(t)] for t in tensor_leaves(x)}.values()))
    gradient = sum(storage_bytes(t) for t in tensor_leaves(x) if t.requires_grad)
    floats = sum(t.nbytes * max(1, 4 // t.itemsize) for t in tensor_leaves(x) if t.requires_grad)
    stages = tuple(_timed(stage, times[key]) for stage, key in measured)
    return Measured(Chain(stages, tuple(values), gradient), floats)


def _timed(stage: Stage, times: list[tuple[int, ...]]) -> Stage:
    """With the median of each time of equal stages, so that no stage seems faster than another by chance."""
    *runs, backward = (int(median(each)) for each in zip(*times, strict=True))
    return replace(stage, runs=Runs(*runs), backward_time=backward)


@contextmanager
def _named(i: int, name: str) -> Iterator[None]:
    """Errors say which layer cannot be measured."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:
        raise InputError(
            f"layer {i} ({name}) runs, but not as rotor has to run it, several times, with other tensors in the place "
            f"of parameters and of what autograd saves: {error}. Leave it out of the Checkpointable"
        ) from error


def _identities(
    function: Function, output: Any, before: dict[int, tuple[int, int]], fresh: int
) -> dict[int, tuple[int, int]]:
    """(identity, bytes) of the storages of ``output`` and of those ``before``.

    A new storage gets an identity from ``fresh`` on; one of a parameter or buffer has 0 bytes.
    """
    owned = {storage_key(t) for t in Parts(function).owned.values()}
    known = dict(before)
    here: dict[int, tuple[int, int]] = {}
    for k, t in enumerate(tensor_leaves(output)):
        key = storage_key(t)
        here[key] = known.get(key, (fresh + k, 0 if key in owned else storage_bytes(t)))
    return here
