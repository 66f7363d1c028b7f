"""Measures a chain on the sample's values, stage by stage; ``rockmate/rotor/probe.py`` measures one stage."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch.utils import _pytree as pytree

from rkgb.cost.clock import Clock
from rkgb.cost.memory import storage_bytes
from rkgb.device import kind_of, one_device
from rkgb.randomness import refuse_unseen_draws
from rkgb.storages import storage_key
from rkgb.trace.capture import preserved
from rkgb.trace.other_draws import other_draws
from rkgb.trees import tensor_leaves
from rockmate.errors import InputError
from rockmate.rotor.parts import Function, Moment, device_of, versions_of
from rockmate.rotor.probe import Probe
from solvers.rotor.chain import Chain, Stage

__all__ = ["Chain", "measure_chain"]

TIMED = 5
"""Equal stages that are timed, at most; all have the medians of their times."""

_LOSS_OUTPUTS = 3
"""Room for the loss, beside the outputs and their gradients, in multiples of the outputs in single precision, in which
losses compute. Cross entropy takes one, a mean square three; beside copies of outputs of lower precision.
"""


def measure_chain(
    functions: Sequence[Function],
    names: Sequence[str],
    sample: Any,
    costs: str = "measured",
    repeat: int = 3,
    preserve_rng_state: bool = True,
) -> Chain:
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
    storages: dict[int, tuple[int, int]] = {storage_key(t): (k, 0) for k, t in enumerate(tensor_leaves(sample))}
    values = [tuple(storages.values())]
    x = sample
    modules = torch.nn.ModuleList([f for f in functions if isinstance(f, torch.nn.Module)])
    inputs = ((f"tensor {k} of the sample", t.device) for k, t in enumerate(tensor_leaves(sample)))
    device = one_device(((f"parameter {name}", t.device) for name, t in modules.named_parameters()), inputs)
    kind_of(device).warm_up(device)
    clock = None if costs == "flops" else Clock(repeat=repeat)
    with Moment(modules).kept(), preserved(modules, tensor_leaves(sample)), torch.enable_grad():
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
            # Those of parameters and buffers have no bytes, those of the input are known.
            before = {storage_key(t): (-1, 0) for t in Moment(function).owned.values()} | storages
            new = (
                (storage_key(t), (len(functions) + 1000 * i + k, storage_bytes(t)))
                for k, t in enumerate(tensor_leaves(x))
            )
            storages = {storage: before.get(storage, found) for storage, found in new}
            values.append(tuple(storages.values()))
    outputs = [t for t in tensor_leaves(x) if t.requires_grad]
    gradient = sum(map(storage_bytes, outputs))
    copies = sum(4 * t.numel() for t in outputs if t.itemsize < 4)
    floats = copies + sum(t.nbytes for t in outputs if t.itemsize >= 4)
    # The median of each time of equal stages, so that no stage seems faster than another by chance.
    medians = {key: [int(median(each)) for each in zip(*known, strict=True)] for key, known in times.items()}
    timed = [(stage, medians[key]) for stage, key in measured]
    stages = tuple(replace(stage, forward_time=f, tail=tail, backward_time=b) for stage, (f, tail, b) in timed)
    return Chain(stages, tuple(values), gradient, _LOSS_OUTPUTS * floats + copies + max(0, floats - gradient))


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


def warm_up(function: Function, x: Any, where: tuple[int, str], preserve_rng_state: bool) -> None:
    """Run a stage for the first time, on ``x``, and check that it can run again with the same result.

    ``where``: the layer's number and name. ``preserve_rng_state``: whether it must draw the same numbers again. Raises
    ``InputError`` if it changes its input in place, draws from generators that are not torch's, or returns what
    ``check_tensors`` refuses.
    """
    device = device_of(x)
    kind = kind_of(device)
    x = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, x)
    versions = versions_of(x)
    layer, outputs = f"layer {where[0]} ({where[1]})", list[Any]()

    def run() -> None:
        with torch.no_grad():
            outputs.append(function(x))

    with other_draws() as drawn:
        run()
    if kind.keeps_workspaces and not drawn:
        kind.first_use(run, device)
    if versions != versions_of(x):
        raise InputError(in_place_message(*where))
    if drawn and preserve_rng_state:
        raise InputError(
            f"{layer} draws from {drawn[0]}, where it would draw other numbers when it runs again: draw with "
            "torch instead (torch.rand(()) < p)"
        )
    if preserve_rng_state and isinstance(function, torch.nn.Module):
        refuse_unseen_draws(function, device, layer)
    check_tensors(outputs[0], f"{layer} returns")


def in_place_message(i: int, name: str) -> str:
    """The error of layer ``i``, called ``name``, that changes its input in place, and what to do."""
    return (
        f"layer {i} ({name}) changes its input in place, so it cannot run again from it. Make it out of place, or "
        "join it with the layer before: rotor.models.utils.ReLUAtEnd(layer) is layer and an in-place ReLU in one"
    )


def check_tensors(value: Any, where: str) -> None:
    """Raise ``InputError`` for tensors in ``value`` whose bytes cannot be counted; ``where`` begins the sentence."""
    for t in tensor_leaves(value):
        if t.is_meta or t.layout != torch.strided:
            kind = "a tensor on the meta device" if t.is_meta else f"a tensor of the layout {t.layout}"
            raise InputError(f"{where} {kind}, whose memory cannot be measured: use dense tensors with values")
