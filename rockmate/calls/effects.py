"""What a capture by TorchDynamo would not do as Python does."""

from __future__ import annotations

import collections
import functools
import gc
import random
import re
from types import CodeType
from typing import Any

import torch

from rkgb.errors import UnsupportedError
from rkgb.trace.code import is_installed


def check_effects() -> None:
    """While TorchDynamo calls its backend: raise ``UnsupportedError`` for what it would not do as Python does.

    The numbers that a ``random.Random`` gives become constants; a deque that was there before loses its ``maxlen``; a
    function with a cache is run again at each call.
    """
    tx = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    effects, codes = tx.output.side_effects, list(torch._guards.TracingContext.get().traced_code)
    for x in effects.keepalive:
        if isinstance(x, random.Random):
            raise UnsupportedError("forward draws from a random.Random, whose numbers would be those of the capture")
        if isinstance(x, collections.deque) and x.maxlen is not None:
            modified = effects.is_modified(effects.id_to_variable[id(x)])
            if modified or any("maxlen" in code.co_names for code in codes):
                raise UnsupportedError(
                    f"forward changes a deque with maxlen={x.maxlen}, which TorchDynamo takes for one without: use a "
                    "list, and take from its front what is too old"
                )
    drawing = {c for c in codes if not is_installed(c.co_filename) and draws(c)}
    if drawing and any(_code_within(f) in drawing for f in gc.get_objects() if type(f) is functools._lru_cache_wrapper):
        raise UnsupportedError("a function with a cache (functools.lru_cache) draws random numbers")


def draws(code: CodeType | None) -> bool:
    """Whether a function may draw random numbers, by the names in it."""
    return code is not None and any(_DRAWS.search(name) for name in code.co_names)


_DRAWS = re.compile("rand|normal|uniform|bernoulli|multinomial|dropout|sample")


def _code_within(cached: Any) -> CodeType | None:
    return getattr(cached.__wrapped__, "__code__", None)
