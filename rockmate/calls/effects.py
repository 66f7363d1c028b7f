"""What a capture by TorchDynamo would not do as Python does."""

from __future__ import annotations

import collections
import dis
import functools
import gc
import itertools
import random
import re
from collections.abc import Container, Iterable
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import fx

from rkgb.errors import UnsupportedError
from rkgb.trace.code import is_installed, is_the_users
from rkgb.trace.lines import named_line
from rockmate.calls.captured import line_of, name_of
from rockmate.calls.structure import graphs_within, memory_of, writes
from rockmate.calls.unguarded import CAPTURING, contents


def check_effects() -> None:
    """While TorchDynamo calls its backend: raise ``UnsupportedError`` for what it would not do as Python does.

    The numbers that a ``random.Random`` gives become constants; a deque that was there before loses its ``maxlen``; a
    function with a cache is run again at each call; settings (``torch.backends.mkldnn.enabled = False``) are made
    behind the graph, and not where forward makes them.
    """
    tx = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    effects: Any = tx.output.side_effects
    codes = list(torch._guards.TracingContext.get().traced_code)
    for x in effects.keepalive:
        changed = effects.store_attr_mutations.get(effects.id_to_variable.get(id(x)))
        if changed and isinstance(x, ModuleType) and type(x) is not ModuleType:
            lines = "".join(f" at {line}" for line in _lines_with(codes, changed, "STORE_ATTR")[:1])
            raise UnsupportedError(f"forward changes a setting of {x.__name__}{lines}")
        if isinstance(x, random.Random):
            line = _line_of_calls(codes, x)
            raise UnsupportedError(f"forward draws from a random.Random{line}, whose numbers would be the capture's")
        if isinstance(x, collections.deque) and x.maxlen is not None:
            modified = effects.is_modified(effects.id_to_variable[id(x)])
            if modified or any("maxlen" in code.co_names for code in codes):
                line = _line_of_calls(codes, x)
                raise UnsupportedError(
                    f"forward changes a deque with maxlen={x.maxlen}{line}, which TorchDynamo takes for one without: "
                    "use a list, and take from its front what is too old"
                )
    drawing = {c for c in codes if not is_installed(c.co_filename) and any(map(_DRAWS.search, c.co_names))}
    objects = _objects() if drawing else []
    cached = (getattr(f.__wrapped__, "__code__", None) for f in objects if type(f) is functools._lru_cache_wrapper)
    if (code := next((code for code in cached if code in drawing), None)) is not None:
        line = named_line(code.co_filename, code.co_firstlineno)
        raise UnsupportedError(f"a function with a cache (functools.lru_cache) at {line} draws random numbers")


def _objects() -> list[Any]:
    """All that Python's collector knows of, those objects included that a script has frozen (``gc.freeze``)."""
    if not gc.get_freeze_count():
        return gc.get_objects()
    gc.unfreeze()
    try:
        return gc.get_objects()
    finally:
        gc.freeze()


def _line_of_calls(codes: Iterable[CodeType], x: object) -> str:
    """Where these functions of the user's read names of methods of ``x``, if that is one line: " at file.py:12"."""
    lines = _lines_with(codes, {name for name in dir(x) if not name.startswith("_")}, "LOAD_")
    return f" at {lines[0]}" if len(lines) == 1 else ""


def _lines_with(codes: Iterable[CodeType], names: Container[str], how: str) -> list[str]:
    """The lines of these functions of the user's where instructions that begin with ``how`` have one of ``names``."""
    lines = {
        named_line(code.co_filename, step.positions.lineno): None
        for code in codes
        if is_the_users(code.co_filename)
        for step in dis.get_instructions(code)
        if step.opname.startswith(how) and step.argval in names and step.positions and step.positions.lineno
    }
    return list(lines)


_DRAWS = re.compile("rand|normal|uniform|bernoulli|multinomial|dropout|sample")
"""In the names of functions that draw random numbers."""


def check_checkpoints(program: fx.GraphModule) -> bool:
    """Whether the program has parts that ``torch.utils.checkpoint`` would run again. A plan runs them as if it did not.

    Raises ``UnsupportedError`` where that would not be the same: eager mode draws other numbers in the second run
    (``preserve_rng_state=False``), writes once more (statistics of a batch norm), gives no gradients (a reentrant one
    of which no input requires grad), adds gradients in another order (a reentrant one, of what others use, too), or
    reads a variable, or a list, dict or set that it is given, that has another value by then.
    """
    found = [n for n in program.graph.nodes if str(getattr(n.target, "_name", "")) == "tag_activation_checkpoint"]
    if not found:
        return False
    codes = [*(torch._guards.TracingContext.get().traced_code or ())]
    if late := next(filter(None, (_set_later(codes), *map(_late, codes))), ""):
        raise UnsupportedError(f"the function of a checkpoint reads {late} when it runs again: give it as an argument")
    if any([*map(id, contents(x))] != [*map(id, then)] for x, then in CAPTURING.given):
        raise UnsupportedError("a list, dict or set that a checkpoint is given changes afterwards: give it a copy")
    effects: Any = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().output.side_effects
    read = {x for n in found for t in (n, *n.users, *n.all_input_nodes) for x in memory_of(t)}
    for node in program.graph.nodes:
        if writes(node) and any(memory_of(t) & read for t in node.all_input_nodes[:1]):
            raise UnsupportedError(f"what a checkpointed part reads or makes is written afterwards{line_of(node)}")
    for node in found:
        body = getattr(program, str(node.args[0].target))
        calls = [n for g in graphs_within(body) for n in g.graph.nodes if n.op in ("call_function", "call_method")]
        names = [*map(name_of, calls)]
        own = [(t, a) for a in node.all_input_nodes if isinstance(t := a.meta.get("example_value"), torch.Tensor)]
        inputs = [t for t, _ in own if not isinstance(t, torch.nn.Parameter)]
        if node.kwargs.get("preserve_rng_state", True) is not True and any(map(_DRAWS.search, names)):
            what = "with preserve_rng_state=False, so that its second run draws other numbers"
        elif effects.tensor_hooks:
            what = "where a hook is registered, as it may be once more in its second run"
        elif any("batch_norm" in name or (name.endswith("_") and not name.endswith("__")) for name in names):
            what = "that writes, as it does once more in its second run"
        elif node.kwargs.get("use_reentrant") and not any(t.requires_grad for t in inputs):
            what = "with use_reentrant=True and no input that requires grad, so that its parameters get no gradients"
        elif node.kwargs.get("use_reentrant") and any(t.requires_grad and len(a.users) > 1 for t, a in own):
            what = "with use_reentrant=True that shares tensors, whose gradients it adds in an order of its own"
        else:
            continue
        raise UnsupportedError(f"a part is checkpointed {what}{line_of(node)}: remove the checkpoint")
    return True


def _set_later(codes: Iterable[CodeType]) -> str:
    """An attribute that forward sets on its module, and another function reads, as a part may; or ""."""
    steps = {code: list(dis.get_instructions(code)) for code in codes}
    changed: dict[str, set[CodeType]] = {}
    for code, found in steps.items():
        own = code.co_varnames[:1] if not code.co_name.endswith("init__") else ()
        for before, step in itertools.pairwise(found):
            if step.opname == "STORE_ATTR" and before.argval in own:
                changed.setdefault(str(step.argval), set()).add(code)
    for code, found in steps.items() if changed else ():
        for step in found:
            if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and code not in changed.get(step.argval, {code}):
                return f"the attribute {step.argval}, which forward sets,"
    return ""


def _late(code: CodeType) -> str:
    """A variable of a function that calls checkpoints, which gets other values, and functions within read; or ""."""
    if not any("checkpoint" in name for name in (*code.co_names, *code.co_freevars)):
        return ""
    steps = list(dis.get_instructions(code))
    loops = [range(step.argval, step.offset) for step in steps if step.opname.startswith("JUMP_BACKWARD")]
    within = (x for x in code.co_consts if isinstance(x, CodeType))
    for name in {*code.co_cellvars, *(name for x in within for name in x.co_names if name in code.co_names)}:
        stored = [step for step in steps if step.opname == "STORE_DEREF" and step.argval == name]
        line = stored[0].positions.lineno if stored and stored[0].positions else 0
        if len(stored) > 1 or any(step.offset in loop for step in stored for loop in loops) or _filled(steps, name):
            return f"{name}, which gets other values at {named_line(code.co_filename, line or code.co_firstlineno)},"
    return ""


def _filled(steps: list[dis.Instruction], name: str) -> bool:
    """Whether a function puts something into the list or dictionary that its variable ``name`` is."""
    at = [k for k, step in enumerate(steps) if step.opname == "STORE_SUBSCR"]
    loads = ("LOAD_DEREF", "LOAD_GLOBAL")
    return any(x.opname in loads and x.argval == name for k in at for x in steps[max(0, k - 3) : k])
