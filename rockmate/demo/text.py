"""A small real text as training data for the demo and the tests: no download, no randomness.

The text is the first 55 of Shakespeare's sonnets (``data/shakespeare.txt``, 33 KB, public domain). It is
encoded by byte-pair encoding (Gage 1994; Sennrich, Haddow and Birch 2016) learned on the text itself:
good enough to train on, not a tokenizer for other text.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files

import numpy as np
import torch
from numpy.typing import NDArray


def load_tokens(vocabulary: int = 1024) -> torch.Tensor:
    """Return the text as a vector of int64 token ids in ``range(vocabulary)``.

    Ids are first the distinct bytes of the text, then one symbol per merge of the most frequent
    adjacent pair, ties going to the pair of smallest ids: the result is the same on every machine.
    Merging stops early when no pair occurs twice, so a huge ``vocabulary`` is an upper bound.

    Raises:
        ValueError: ``vocabulary`` is smaller than the number of distinct bytes.
    """
    raw = (files("rockmate.demo") / "data" / "shakespeare.txt").read_bytes()
    alphabet, inverse = np.unique(np.frombuffer(raw, dtype=np.uint8), return_inverse=True)
    if vocabulary < len(alphabet):
        raise ValueError(f"vocabulary is {vocabulary}, but the text alone has {len(alphabet)} distinct bytes")
    ids = inverse.astype(np.int64)
    for symbol in range(len(alphabet), vocabulary):
        pairs = ids[:-1] * vocabulary + ids[1:]
        codes, counts = np.unique(pairs, return_counts=True)
        best = int(counts.argmax())
        if counts[best] < 2:
            break
        ids = _merge(ids, np.flatnonzero(pairs == codes[best]), symbol)
    return torch.from_numpy(ids)


def _merge(ids: NDArray[np.int64], starts: NDArray[np.int64], symbol: int) -> NDArray[np.int64]:
    """Return ``ids`` with the pairs that begin at ``starts`` replaced by ``symbol``."""
    # In a run such as "aaa" the pairs overlap. Within such a stretch every second one is merged.
    fresh = np.diff(starts, prepend=-2) > 1
    rank = np.arange(len(starts))
    starts = starts[(rank - np.maximum.accumulate(np.where(fresh, rank, 0))) % 2 == 0]
    merged = ids.copy()
    merged[starts] = symbol
    return np.delete(merged, starts + 1)


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
