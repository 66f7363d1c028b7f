"""Why a call is not captured as one graph: what TorchDynamo says, the user's line, and what to write instead."""

from __future__ import annotations

import os
import re

import torch

from rkgb.errors import GraphError
from rkgb.trace.code import is_installed, is_the_users
from rkgb.trace.lines import named_line
from rockmate.errors import RockmateError

_BY_VALUES = "Python decides, or counts, by values in a tensor"

_TOO_OFTEN = "it was captured too often, as something that its Python reads changes from call to call"

LOOPS = "each length of the inputs is a sequence of operations of its own, as forward loops over it"
"""Why calls that were captured are followed."""

_MOVE = "move it out of forward, in front of the layers or behind them"

_DRAW = "draw from torch's generators (torch.rand(())), or outside of forward"

_STAY = "leave it there: such a step is planned, and one that takes the derivative outside of forward is not"

_READ_LATER = "compute with the tensor, or return it and read it behind the step"

_CAUSAL = (
    "say whether each mask is causal, which torch else reads from it (is_causal=True or False; of nn.Transformer "
    "src_is_causal, tgt_is_causal and memory_is_causal)"
)

_INSTEAD = (
    ("SymNodeVariable() is not a constant", "decide with a number that changes by an if, and give a constant there"),
    ("Data-dependent branching", "compute both ways and choose with torch.where, or decide outside of forward"),
    ("`torch.compiler.disable()`d", "remove torch.compiler.disable"),
    ("(functools.lru_cache) at", "draw outside of it, and give it the numbers"),
    ("draws from a random.Random", _DRAW),
    ("does not trace Random.", _DRAW),
    ("numbers that NumPy draws", _DRAW),
    ("(Generator)", "draw from torch's own generator, which torch.manual_seed seeds, or outside of forward"),
    ("(saved_tensors_hooks", "leave it there: such a step is planned, and one within such hooks is not"),
    ("retain_grad()", "leave it there, or return the tensor and call retain_grad() on it"),
    ("(fork_rng)", "leave it there, or draw and seed outside of forward"),
    ("(flags)", "leave it there, or set it around the whole step"),
    ("derivatives are computed inside", _STAY),
    ("torch.autograd.grad", _STAY),
    ("hooks of saved tensors are disabled", _MOVE),
    ("a tensor is given other memory", _MOVE),
    ("Tensor.tolist()", _READ_LATER),
    ("catches the error for a key or an attribute", "ask first (in, hasattr, getattr with a default)"),
    ("is a number that Python reads from a tensor", _READ_LATER),
    ("that an operation takes is read from a tensor", "give the number itself, or index by a tensor of indices"),
    ("is given a number that changes", "give it a tensor with that number"),
    ("depend on values", "keep all rows and mask them, so that sizes are the same"),
    ("in torch's nn/modules/activation.py", _CAUSAL),
    ("in torch's nn/modules/transformer.py", _CAUSAL),
    (_BY_VALUES, "compute with the tensor (torch.where, a mask in the place of chosen rows)"),
    (
        "calls its requires_grad_()",
        "make that tensor outside of forward, and give it as an argument; of a transformers model, leave out "
        "enable_input_require_grads(), which only its own checkpoints need",
    ),
    ("is another one in each call", "keep it in a tensor (a buffer), or outside of the model"),
    (
        LOOPS,
        "move the loop out of the module that is attached (attach the encoder, and let the loss loop behind it), or "
        "pad inputs to a few lengths",
    ),
    (_TOO_OFTEN, "keep that in a tensor (a buffer), or outside of the model"),
    ("opaque object was created", "make it once, in __init__"),
    ("a hook is registered on a tensor", "register it on the output of a submodule, or compute what it does"),
    ("would be computed by torch", "compute it with torch, or outside of forward"),
)
"""Parts of what is said, and what to write instead."""

_SETTING = "the line is a library's, so look for a setting of the model, or an argument, with which it does not run"
_CALLED = re.compile(
    r"(?:trace builtin operator|trace the builtin|Python builtin|not trace function|that the function|trace method)"
    r" `(?:<unknown module>\.)?([\w.]+?)\.?`"
)
_GIVEN = re.compile(
    r"(?:UserDefinedObjectVariable|GenericContextWrappingVariable|raised exception |<function)[( ]?([\w.]+)"
)
_SKIPPED = "Attempted to call function marked as skipped"
_CAUSE = re.compile(r"Caused by: .*# (\S+:\d+) in")
_VALUES = re.compile(r"data-dependent expression|PendingUnbackedSymbol|valid indices \(got SymInt\)")
_NUMPY = re.compile(r"\b(?:np|numpy)\.random\.")
_FRAME = re.compile(r'File "(.*?)", line (\d+)[^\n]*(?:\n +(?!File )(.+))?')
_TORCH = os.path.dirname(torch.__file__) + os.sep


def reason_of(error: Exception) -> str:
    """In one line: what ``error`` says, where in the user's code, and what to write instead."""
    error = getattr(error, "inner_exception", error)  # what the backend raised
    text = str(error)
    what = next((line.strip().rstrip(".") for line in text.splitlines() if line.strip()), type(error).__name__)
    if what == "Hard failure due to fullgraph=True":  # TorchDynamo's recompile_limit
        what = _TOO_OFTEN
    context = text.partition("Developer debug context:")[2].partition("\n")[0]
    called = _CALLED.search(text) or _GIVEN.search(context)
    if called is not None and called[1] not in what:
        what = f"TorchDynamo does not trace {called[1]}" if what == _SKIPPED else f"{what} ({called[1]})"
    at, library = _lines_in(text.partition("from user code:")[2])
    if _VALUES.search(text):  # which names no variable of the user's
        cause = _CAUSE.search(text)
        drawn = "Python decides, or counts, by numbers that NumPy draws" if _NUMPY.search(text) else _BY_VALUES
        what = drawn + (f", in torch's {cause[1]}" if cause and cause[1].startswith("nn/") else "")
    if " at " not in what:
        what += f" at {at}" * bool(at) + f"{',' * bool(at)} in {library}" * bool(library)
    instead = _SETTING if library else next((advice for part, advice in _INSTEAD if part in what), _MOVE if at else "")
    return f"{what}: {instead}" if instead else what


def internal_error(error: Exception) -> str:
    """In one line: what a capture failed with, where that is no refusal but a defect of torch's or of ours; else
    empty.
    """
    error = getattr(error, "inner_exception", error)
    if not isinstance(error, _DEFECTS) or isinstance(error, (GraphError, RockmateError)) or _VALUES.search(str(error)):
        return ""
    what = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {what}" if what else type(error).__name__


_DEFECTS = AssertionError, AttributeError, LookupError, NameError, TypeError
"""What code raises that has a defect. TorchDynamo's errors and torch's own (RuntimeError) say what it does not do."""


def _lines_in(trace: str) -> tuple[str, str]:
    """The innermost line of the user's in a printed traceback, as "file.py:12", and that of a library which it calls,
    with its code; torch is one where there is no other. Empty if there is none.
    """
    frames = [(file, named_line(file, int(line)), code) for file, line, code in _FRAME.findall(trace)]
    own = max((k for k, (file, _, _) in enumerate(frames) if is_the_users(file)), default=-1)
    within = [frame for frame in frames[own + 1 :] if is_installed(frame[0])]
    others = [frame for frame in within if not frame[0].startswith(_TORCH)] or within * (own < 0)
    if not others:
        return (frames[own][1] if own >= 0 else ""), ""
    file, place, code = others[-1]
    folder = re.split(r"(?:site|dist)-packages[/\\]", os.path.dirname(file))[-1]
    return (frames[own][1] if own >= 0 else ""), f"{folder}/{place} ({code.strip()})"
