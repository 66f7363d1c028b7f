"""What Inductor does for pieces: their code, by compilers that work at the same time."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

Code = Callable[[list[Any]], Any]

_here = threading.local()
_one_by_one = threading.Lock()  # what is patched here is put back in the order in which it was


@contextlib.contextmanager
def at_once() -> Iterator[None]:
    """Within, this thread makes code, and Inductor's compilers work meanwhile; at the end they have done so.

    Code must not run before the end.
    """
    unfinished: list[tuple[Any, dict[str, Any]]] = []
    _here.unfinished = unfinished
    try:
        yield
    finally:
        del _here.unfinished
        for compilers, names in unfinished:  # after an error, too: Inductor may give the same module again
            compilers.wait(names)


def inner_compiled(program: torch.fx.GraphModule, inputs: Any, **options: Any) -> Code:
    """What Inductor makes of a ``program`` of operators, without what finds out how long its first call takes."""
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.compile_fx import compile_fx_inner

    unfinished, me = getattr(_here, "unfinished", None), threading.get_ident()

    def later(compilers: Any, names: dict[str, Any]) -> None:
        """Wait for the compilers of a module with these ``names``; not yet if there are several modules to make."""
        if unfinished is not None and on_cpu and threading.get_ident() == me:
            unfinished.append((compilers, names))
        else:
            wait(compilers, names)

    on_cpu = all(t.device.type == "cpu" for t in inputs)
    with _one_by_one:
        wait = AsyncCompile.wait
        with patch.object(AsyncCompile, "wait", later), _vector_unit():
            made: Any = compile_fx_inner(program, inputs, **options)
    found: Code = getattr(made, "current_callable", None) or made
    return found


@contextlib.contextmanager
def _vector_unit() -> Iterator[None]:
    """Inductor takes the first vector unit for which a compiler makes code that loads. It tries all that there are, of
    which each takes it up to four compilations: here, as many as are needed.
    """
    from torch._inductor import config, cpu_vec_isa

    settled = config.cpp.simdlen is not None or "ATEN_CPU_CAPABILITY" in os.environ
    tried = cpu_vec_isa.valid_vec_isa_list
    if settled or not cpu_vec_isa.x86_isa_checker() or tried.cache_info().currsize:
        yield
        return
    with patch.object(cpu_vec_isa, "valid_vec_isa_list", _first_vector_unit):
        yield


@cache
def _first_vector_unit() -> list[Any]:
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

    there = x86_isa_checker()
    units = (u for u in supported_vec_isa_list if all(name in there for name in str(u).split()) and u)
    return list(itertools.islice(units, 1))
