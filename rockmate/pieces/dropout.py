"""Dropout from a seed: its mask is a function of two numbers that are drawn once a step, so that no state of a
generator is kept for a second run, and any kernel may compute it anywhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx

from rockmate.pieces.functional import arguments_of

_MOST = (1 << 31) - 1
_FACTORS = 0x9E3779B1 - (1 << 32), 0x21F0AAAD, 0xD35A2D97 - (1 << 32)


def with_seeds(program: fx.GraphModule, device: torch.device) -> bool:
    """Let dropout in ``program`` take seeds, which its first node draws on ``device``; whether there is any."""
    found = [n for n in program.graph.find_nodes(op="call_function", target=F.dropout) if _rate(n) is not None]
    if not found:
        return False
    *_, last = program.graph.find_nodes(op="placeholder")
    with program.graph.inserting_after(last):
        seeds = program.graph.call_function(drawn_seeds, (len(found), device))
    for k, node in enumerate(found):
        with program.graph.inserting_before(node):
            seed = program.graph.call_function(torch.select, (seeds, 0, k))
            new = program.graph.call_function(seeded_dropout, (arguments_of(node)["input"], seed, _rate(node)))
        new.meta = dict(node.meta)
        node.replace_all_uses_with(new)
        program.graph.erase_node(node)
    return True


def drawn_seeds(count: int, device: torch.device) -> torch.Tensor:
    """Two numbers of 31 bits for each of ``count`` draws, from the default generator of ``device``: (count, 2)."""
    return torch.randint(0, 1 << 31, (count, 2), dtype=torch.int32, device=device)


def seeded_dropout(x: torch.Tensor, seed: torch.Tensor, p: float) -> torch.Tensor:
    """``x`` with each number zero at the rate ``p``, and divided by 1 - p. ``seed``: two whole numbers.

    The number at place k (counted as ``x`` is indexed, whatever its strides) stays if a hash of k and the seed, a whole
    number of 32 bits with a sign, is at least p * 2**32 - 2**31. The hash is Ettinger's ("hash prospector"), which the
    first number enters before it and the second within it, of k times a number (Knuth's multiplicative hash): without,
    places that are 4096 apart depend on each other. Products wrap around, as those of all kernels do; a piece whose
    kernels did not would differ from eager ones, and be refused.
    """
    bits = _places(x) * _FACTORS[0] + seed[0]
    bits = (bits ^ _shifted(bits, 16)) * _FACTORS[1] + seed[1]
    bits = (bits ^ _shifted(bits, 15)) * _FACTORS[2]
    bits = bits ^ _shifted(bits, 15)
    least = min(round(p * (1 << 32)) - (1 << 31), _MOST)
    return torch.where(bits >= least, x * (1 / (1 - p)), 0.0)


def _places(x: torch.Tensor) -> torch.Tensor:
    """Of the numbers of ``x``, in 32 bits; those of more than 2**31 numbers are mixed."""
    if x.numel() <= _MOST:
        return torch.arange(x.numel(), dtype=torch.int32, device=x.device).view(x.shape)
    place = torch.arange(x.numel(), device=x.device).view(x.shape)
    return ((place & _MOST) ^ ((place >> 31) * _FACTORS[1] & _MOST)).to(torch.int32)


def _shifted(bits: torch.Tensor, by: int) -> torch.Tensor:
    """``bits`` moved right, with zeros on the left."""
    return (bits >> by) & ((1 << (32 - by)) - 1)


def _rate(node: fx.Node) -> float | None:
    """At which rate ``F.dropout`` drops; None if it drops nothing, everything, or changes what it is given."""
    given = arguments_of(node)
    p = given["p"]
    if given["training"] is not True or given["inplace"] or not isinstance(p, float) or not 0 < p < 1:
        return None
    return p
