"""A small real text as training data for the demo and the tests: no download, no randomness.

The text is the first 55 of Shakespeare's sonnets (``data/shakespeare.txt``, 33 KB, public domain). Each of its
characters is a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import torch


def load_tokens(vocabulary: int = 1024) -> torch.Tensor:
    """Return the text as a vector of int64 token ids in ``range(vocabulary)``: the numbers of its distinct bytes.

    Raises:
        ValueError: ``vocabulary`` is smaller than the number of distinct bytes.
    """
    raw = (files("rockmate.demo") / "data" / "shakespeare.txt").read_bytes()
    ids: torch.Tensor
    alphabet, ids = torch.unique(torch.frombuffer(bytearray(raw), dtype=torch.uint8), return_inverse=True)
    if vocabulary < len(alphabet):
        raise ValueError(f"vocabulary is {vocabulary}, but the text alone has {len(alphabet)} distinct bytes")
    return ids


def batches(
    tokens: torch.Tensor, batch: int, length: int, steps: int, generator: torch.Generator
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield ``steps`` pairs (inputs, targets), each of shape ``(batch, length)``.

    Every row is a window of ``tokens`` at a place drawn from ``generator``; its target is the window one
    token later. ``tokens`` and ``generator`` must be on the same device.

    Raises:
        ValueError: ``tokens`` is too short for one window and its target.
    """
    if len(tokens) <= length:
        raise ValueError(f"windows of {length} tokens need at least {length + 1} tokens, and there are {len(tokens)}")
    offsets = torch.arange(length, device=tokens.device)
    for _ in range(steps):
        starts = torch.randint(len(tokens) - length, (batch, 1), generator=generator, device=tokens.device)
        yield tokens[starts + offsets], tokens[starts + offsets + 1]
