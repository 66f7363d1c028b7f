"""What people use today: each method takes a copy of a model, and returns what is called in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

from gpu_run.peers import Budgeted, around, compiled_blocks, policy
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from peers_run.models import Entry, Task

Apply = Callable[[nn.Module], Callable[..., Any]]
BUDGETS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.95)
"""Values of ``activation_memory_budget``."""
EAGER_KERNELS = "aot_eager_decomp_partition"
"""torch's partitioner without code generation: its bytes and FLOPs can be counted."""


class NotApplicable(Exception):
    """The method does not exist for this model, or does not run here; the text says why."""


@dataclass(frozen=True)
class Method:
    """``counted``: the same choice of what runs again on eager kernels, where FLOPs cannot be counted otherwise.

    ``family``: of which one member stands for all where there is no time for more.
    """

    name: str
    family: str
    apply: Apply
    counted: Apply | None = None


def methods(entry: Entry, task: Task, backend: str, budgets: Sequence[float]) -> Iterator[Method]:
    """All for this model, those that compile last. ``budgets``: those that are compiled with ``backend``; if
    there are none, nothing is.
    """
    found = partial(blocks_of, names=entry.blocks)
    plain = partial(partial, checkpoint, use_reentrant=False)
    selective = partial(create_selective_checkpoint_contexts, policy)
    every = "checkpoint, every block"
    yield Method(every, every, lambda m: around(m, found(m), plain))
    every = "checkpoint, every second block"
    yield Method(every, every, lambda m: around(m, found(m)[::2], plain))
    every = "checkpoint, √n segments"
    yield Method(every, every, lambda m: in_segments(entry, m))
    every = "checkpoint, keeping matrix products"
    yield Method(every, every, lambda m: around(m, found(m), partial(plain, context_fn=selective)))
    yield Method("gradient_checkpointing_enable()", "gradient_checkpointing_enable()", of_transformers)
    if isinstance(task.model, nn.Sequential):
        for segments in range(2, len(task.model) + 1):
            name = f"checkpoint_sequential, {segments} segments"
            yield Method(name, "checkpoint_sequential", partial(sequential, segments))
    else:
        yield Method("checkpoint_sequential", "checkpoint_sequential", partial(sequential, 2))
    yield Method("auto-SAC (sac_ilp)", "auto-SAC (sac_ilp)", partial(auto_sac, task))
    if not budgets:
        every = "torch.compile"
        yield Method(every, every, not_compiled)
        return
    every = "compile, every block checkpointed"
    yield Method(
        every,
        every,
        lambda m: compiled_blocks(m, found(m), backend),
        lambda m: compiled_blocks(m, found(m), EAGER_KERNELS),
    )
    for budget in budgets:
        name = f"compile, activation_memory_budget {budget:g}"
        yield Method(
            name,
            "compile, activation_memory_budget",
            lambda m, budget=budget: Budgeted(m, budget, backend),
            lambda m, budget=budget: Budgeted(m, budget, EAGER_KERNELS),
        )


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
        group[0].forward = partial(checkpoint, chain([b.forward for b in group]), use_reentrant=False)  # type: ignore[method-assign]
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
