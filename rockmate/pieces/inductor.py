"""What Inductor does for pieces: their code, by compilers that work at the same time; and what it needs for that."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from rockmate.errors import PieceError
from rockmate.planning.wrappers import compiled_parts
from rockmate.tell import LOG

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
def no_warnings() -> Iterator[None]:
    """What Inductor's own code is warned of is no user's concern, nor a reason to fail where warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


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


def prepare_for_pieces(model: torch.nn.Module) -> None:
    """Raise ``PieceError`` where nothing can be compiled for the device of ``model``; say which of its parts the user
    has compiled, as these are planned as they were before.
    """
    check_compiler(next((p.device for p in model.parameters()), torch.device("cpu")))
    if compiled := compiled_parts(model):
        names = ", ".join(name or "the model itself" for name in compiled)
        LOG.info(
            "%s: what torch.compile made of %s is not used: the original is planned, and compiled in pieces",
            *(type(model).__name__, names),
        )


def check_compiler(device: torch.device) -> None:
    """Raise ``PieceError`` where Inductor has no compiler for ``device``."""
    if device.type == "cpu":
        with no_warnings():
            from torch._inductor.cpp_builder import get_cpp_compiler
            from torch._inductor.exc import InvalidCxxCompiler

        try:
            get_cpp_compiler()
        except InvalidCxxCompiler as error:
            raise PieceError(
                "compile=True needs a C++ compiler, and there is none: install g++ (apt-get install g++) or clang, or "
                "name one in the environment variable CXX"
            ) from error
        return
    from torch.utils._triton import has_triton

    if not has_triton():
        raise PieceError(
            f"compile=True needs Triton for {device.type}, which is not there: pip install triton (it comes with torch "
            "on Linux), on a GPU that it supports"
        )
