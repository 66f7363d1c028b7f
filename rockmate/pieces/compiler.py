"""What must be there before pieces can be compiled."""

from __future__ import annotations

import torch

from rockmate.errors import PieceError
from rockmate.pieces.kernels import no_warnings
from rockmate.planning.wrappers import compiled_parts
from rockmate.tell import LOG


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
