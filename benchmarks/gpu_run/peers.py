"""How people save memory with torch alone: each takes a model and changes it, or returns one that stands for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from gpu_run.models import blocks_of

EXPENSIVE = ("mm", "bmm", "addmm", "baddbmm", "convolution", "_scaled_dot_product")
"""Names of operations, or how they begin, whose results selective checkpointing keeps."""


def every_block(model: nn.Module, dry: bool) -> nn.Module:
    """torch.utils.checkpoint around each block."""
    return around(model, blocks_of(model), lambda forward: partial(checkpoint, forward, use_reentrant=False))


def selective(model: nn.Module, dry: bool) -> nn.Module:
    """The same, keeping the results of matrix products, convolutions and attention."""
    contexts = partial(create_selective_checkpoint_contexts, policy)
    wrap = partial(partial, checkpoint, use_reentrant=False, context_fn=contexts)
    return around(model, blocks_of(model), wrap)


def compiled_every_block(model: nn.Module, dry: bool) -> nn.Module:
    """Each block compiled, and torch.utils.checkpoint around it."""
    return compiled_blocks(model, blocks_of(model), backend(dry))


def compiled_blocks(model: nn.Module, blocks: Sequence[nn.Module], backend: str) -> nn.Module:
    """These compiled, each in a checkpoint."""
    return around(
        model,
        blocks,
        lambda forward: partial(checkpoint, torch.compile(forward, backend=backend), use_reentrant=False),
    )


def compiled_in_budget(budget: float, model: nn.Module, dry: bool) -> nn.Module:
    """The whole model compiled, with ``activation_memory_budget``."""
    return budgeted(model, budget, backend(dry))


def budgeted(model: nn.Module, budget: float, backend: str, **options: Any) -> Any:
    """``model`` compiled with the setting, which is read when it is compiled.

    A backend of its own: TorchDynamo would take the code of another copy of the model, compiled with the same one.
    """
    compiler = torch._dynamo.lookup_backend(backend)

    def compiled(graph: Any, inputs: Any) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compiler(graph, inputs, **options)

    return torch.compile(model, backend=compiled)


def backend(dry: bool) -> str:
    """In a dry run, the same partitioner without code generation, which needs a compiler and takes a minute."""
    return "aot_eager_decomp_partition" if dry else "inductor"


def around(
    model: nn.Module, blocks: Sequence[nn.Module], wrap: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> nn.Module:
    """``model``, in which ``blocks`` compute by what ``wrap`` makes of their own forward."""
    for block in blocks:
        block.forward = wrap(block.forward)  # type: ignore[method-assign]
    return model


def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps what ``EXPENSIVE`` names."""
    name = op._schema.name.partition("::")[2] if hasattr(op, "_schema") else ""
    kept = name in EXPENSIVE or name.startswith("_scaled_dot_product")
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


PEERS: dict[str, Callable[[nn.Module, bool], nn.Module]] = {
    "checkpoint every block": every_block,
    "selective checkpoint": selective,
    "compile + checkpoint every block": compiled_every_block,
    "compile, activation_memory_budget 0.4": partial(compiled_in_budget, 0.4),
}
"""In the order in which they are measured: what may take long to compile comes last."""
