"""What people use today: each method takes a copy of a model, and returns what is called in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from gpu_run.peers import around, budgeted, policy
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from peers_run.models import Entry, Task

Apply = Callable[[nn.Module], Callable[..., Any]]
Count = Callable[[nn.Module, Callable[[Callable[..., Any]], Any]], int]
BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.95)
"""Values of ``activation_memory_budget``."""
PARTITIONER = "aot_eager_decomp_partition_with_mode"
"""torch's partitioner without code generation: its FLOPs can be counted."""


class NotApplicable(Exception):
    """The method does not exist for this model, or does not run here; the text says why."""


@dataclass(frozen=True)
class Method:
    """``family``: the settings of one method have its name.

    ``count``: of a model, and a function that runs a step of it, the FLOPs, where they cannot be counted from outside.
    """

    name: str
    family: str
    apply: Apply
    count: Count | None = None


def methods(entry: Entry, task: Task, backend: str, budgets: Sequence[float]) -> list[Method]:
    """All for this model, those that compile last. ``budgets``: those that are compiled with ``backend``; if there are
    none, nothing is.
    """
    found = partial(blocks_of, names=entry.blocks)
    selective = partial(checkpointed, context_fn=partial(create_selective_checkpoint_contexts, policy))
    return [
        one("checkpoint, every block", lambda m: around(m, found(m), checkpointed)),
        one("checkpoint, every second block", lambda m: around(m, found(m)[::2], checkpointed)),
        one("checkpoint, √n segments", lambda m: in_segments(entry, m)),
        one("checkpoint, keeping matrix products", lambda m: around(m, found(m), selective)),
        one("gradient_checkpointing_enable()", of_transformers),
        *sequentials(task.model),
        one("auto-SAC (sac_ilp)", partial(auto_sac, task)),
        *compiled(found, backend, budgets),
    ]


def one(name: str, apply: Apply, count: Count | None = None) -> Method:
    """A family of its own."""
    return Method(name, name, apply, count)


def sequentials(model: nn.Module) -> Iterator[Method]:
    """``checkpoint_sequential`` with every number of segments."""
    family = "checkpoint_sequential"
    if not isinstance(model, nn.Sequential):
        yield one(family, partial(sequential, 2))
        return
    for segments in range(2, len(model) + 1):
        yield Method(f"{family}, {segments} segments", family, partial(sequential, segments))


def compiled(found: Callable[[nn.Module], list[nn.Module]], backend: str, budgets: Sequence[float]) -> Iterator[Method]:
    """Whole models compiled, alone and with checkpoints around blocks, blocks on their own, and under ``budgets``."""
    if not budgets:
        yield one("compile", not_compiled)
        return
    yield one(
        "compile, whole model",
        lambda m: budgeted(m, 1.0, backend),
        lambda m, step: flops(partial(step, m)),
    )
    yield one(
        "compile, each block on its own",
        lambda m: around(m, found(m), partial(torch.compile, backend=backend, dynamic=False)),
        lambda m, step: flops(partial(step, m)),
    )
    yield one(
        "compile, every block checkpointed",
        lambda m: budgeted(around(m, found(m), checkpointed), 1.0, backend),
        lambda m, step: flops(partial(step, around(m, found(m), checkpointed))),
    )
    family = "compile, activation_memory_budget"
    for budget in budgets:
        compile_ = partial(budgeted, budget=budget, backend=backend)
        yield Method(f"{family} {budget:g}", family, compile_, partial(flops_of_partitioner, budget))


def flops(step: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        step()
    return counter.get_total_flops()


class OneModule(nullcontext[None]):
    """All operations are of the whole model."""

    parents = frozenset({"Global"})


class Inside:
    """Counts FLOPs within compiled graphs: from outside, TorchDynamo would not run them."""

    def __init__(self) -> None:
        self.total = 0

    def __enter__(self) -> None:
        self.counter = FlopCounterMode(display=False)
        self.counter.mod_tracker = OneModule()  # torch's asks what a graph returns for gradient functions
        self.counter.__enter__()

    def __exit__(self, *error: Any) -> None:
        self.counter.__exit__(*error)
        self.total += self.counter.get_total_flops()


def flops_of_partitioner(budget: float, model: nn.Module, step: Callable[[Callable[..., Any]], Any]) -> int:
    """What torch's partitioner chooses to run again within ``budget``, on eager mode's kernels."""
    inside = Inside()
    call = budgeted(model, budget, PARTITIONER, mode=inside)
    step(call)
    inside.total = 0
    step(call)
    return inside.total


def checkpointed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """``forward`` in a checkpoint. Lists among its arguments are copied: DenseNet's grow before it runs again."""

    def run(*args: Any, **kwargs: Any) -> Any:
        args = tuple(list(a) if isinstance(a, list) else a for a in args)
        return checkpoint(forward, *args, use_reentrant=False, **options, **kwargs)

    return run


def blocks_of(model: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The blocks in the order of the model."""
    return [m for m in model.modules() if type(m).__name__ in names]


def in_segments(entry: Entry, model: nn.Module) -> nn.Module:
    """√n segments of consecutive blocks, of which the last one is kept, as ``checkpoint_sequential`` does."""
    if not entry.chained:
        raise NotApplicable("blocks do not follow one another directly")
    blocks = blocks_of(model, entry.blocks)
    length = math.ceil(len(blocks) / max(2, round(math.sqrt(len(blocks)))))
    parents = {id(child): id(parent) for parent in model.modules() for child in parent.children()}
    placed = enumerate(blocks)
    groups = [[b for _, b in found] for _, found in groupby(placed, lambda p: (parents[id(p[1])], p[0] // length))]
    for group in groups[:-1]:
        group[0].forward = checkpointed(chain([b.forward for b in group]))  # type: ignore[method-assign]
        for block in group[1:]:
            block.forward = lambda x, *args, **kwargs: x  # type: ignore[method-assign]
    return model


def chain(forwards: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """One after the other, with the same further arguments."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        for forward in forwards:
            x = forward(x, *args, **kwargs)
        return x

    return run


def of_transformers(model: nn.Module) -> nn.Module:
    """transformers' own switch."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise NotApplicable("not a model of transformers")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def not_compiled(model: nn.Module) -> nn.Module:
    raise NotApplicable("not compiled in this run: on a CPU that takes minutes for each setting")


def sequential(segments: int, model: nn.Module) -> Callable[..., Any]:
    """``checkpoint_sequential`` over the layers."""
    if not isinstance(model, nn.Sequential):
        raise NotApplicable("not an nn.Sequential")
    return lambda x: checkpoint_sequential(list(model), segments, x, use_reentrant=False)


def auto_sac(task: Task, model: nn.Module) -> nn.Module:
    """PyTorch's integer program for selective checkpointing, at half of what it estimates; it says what to discard."""
    try:
        decisions = sac_decisions(task, model)
    except Exception as error:
        raise NotApplicable(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
    raise NotApplicable(f"solved ({len(decisions)} modules), but torch has no function that applies the solution")


def sac_decisions(task: Task, model: nn.Module) -> Mapping[str, float]:
    """The share of each module's activations that is to be discarded."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.ilp_utils import aggregate_stats, parse_module_info
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator
    from torch.distributed._tools.sac_ilp import sac_milp

    device = next(model.parameters()).device
    with FakeTensorMode(allow_non_fake_inputs=True):
        tracker, runtime, estimator = MemTracker(), RuntimeEstimator(), SACEstimator()
        tracker.track_external(model)
        with tracker:
            task.step(model)
        peak = max(s["Total"] for s in tracker.get_tracker_snapshot("peak").values())
        with runtime(estimate_mode_type="operator-level-cost-model"):
            task.step(model)
        with estimator(estimate_mode_type="operator-level-cost-model"):
            task.step(model)
        graph = parse_module_info(aggregate_stats(model, tracker, runtime, estimator, device))
        found: Mapping[str, float] = sac_milp(graph, memory_budget=peak / 2**31)[0]
    return found
