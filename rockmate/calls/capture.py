"""How TorchDynamo captures the calls of one model: each captured graph runs under plans of its own."""

from __future__ import annotations

import contextlib
import importlib
import re
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch
from torch._ops import HigherOrderOperator

from rkgb.errors import UnsupportedError
from rkgb.sample import Call
from rkgb.trace.casts import NAMES_OF_RECURRENT
from rkgb.warn import warn
from rockmate.calls.captured import WRAPPED, check_operators, kind_of_source, line_of, name_of, numpy_function
from rockmate.calls.captured_calls import CapturedCalls
from rockmate.calls.dynamo import hide_own_warnings, new_entry, prepare
from rockmate.calls.effects import check_checkpoints, check_effects
from rockmate.calls.front import Front
from rockmate.calls.masks import are_known, is_full, left_out_as_eager
from rockmate.calls.numbers import is_number
from rockmate.calls.reasons import LOOPS
from rockmate.calls.structure import graphs_within, is_function, keeps_what_is_written
from rockmate.calls.surroundings import keep_draws_of_other_threads, modes_again, put_back_if_it_fails
from rockmate.calls.unguarded import CAPTURING, Noted
from rockmate.errors import PlanningWarning

if TYPE_CHECKING:
    from torch import fx


MANY_CAPTURES = 8
"""Captures of what was captured before, after which a user hears of it."""

MANY_NUMBERS = 4
"""Captures that differ in numbers alone, after which calls are followed: each step would have a capture of its own."""


MANY_LENGTHS = 6
"""Captures that differ in how often operations are called, after which calls are followed."""


class Capture:
    """The captures of one model's calls, each as one graph. ``graphs``: these, in the order in which they came.
    ``never``: why calls can be neither captured nor followed, once that was seen.
    """

    def __init__(self, front: Front) -> None:
        self.front = front
        self.graphs: list[CapturedCalls] = []
        self.never = ""
        self._entry = new_entry()
        self._compiled: Callable[..., Any] | None = None
        self._unsaid = ""  # a warning
        self._masks_known = True  # whether it can be known before a capture what masks it leaves out
        self._noted = Noted()  # what TorchDynamo does not guard

    def run(self, model: torch.nn.Module, call: Call) -> Any:
        """Call the model as TorchDynamo captures it, as one graph."""
        if self._compiled is not None and self._noted.is_stale:
            self._forget()  # captures of inner functions are known by the backend
        if self._compiled is None:
            importlib.import_module("torch._dynamo")
            prepare()
            own: Any = weakref.ref(self)  # backends are kept for ever, and must not keep models
            self._compiled = torch.compile(self._entry, backend=lambda p, _: own().captured(p), fullgraph=True)
        hide_own_warnings()
        masks_left_out = self._masks_known
        full = is_full(call) if masks_left_out else None
        try:
            with self._capturing(), left_out_as_eager(full, masks_left_out), put_back_if_it_fails():
                result = self._compiled(model, call.args, call.kwargs, full)
        except Exception:
            if not masks_left_out or self._masks_known:
                raise
            self._forget()
            return self.run(model, call)
        if self._unsaid:  # said here, since an error within a capture would be taken for TorchDynamo's
            unsaid, self._unsaid = self._unsaid, ""
            warn(unsaid, PlanningWarning)
        return result

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        before = dict(vars(CAPTURING))
        vars(CAPTURING).update(name=self.front.name, noted=self._noted, tracked={}, given=[])
        try:
            yield
        finally:
            for tracked in CAPTURING.tracked.values():
                tracked.clear()  # of a parameter its gradient is one, too, which the collector does not see
            vars(CAPTURING).clear()
            vars(CAPTURING).update(before)

    def clear(self) -> None:
        self._forget()
        self.graphs.clear()

    def _forget(self) -> None:
        """Capture again; what then comes as before runs under its plans."""
        if self._compiled is not None:
            torch._dynamo.eval_frame.reset_code(self._entry.__code__)  # type: ignore[attr-defined]
        self._compiled = None
        self._noted = Noted()

    def captured(self, program: fx.GraphModule) -> Callable[..., Any]:
        """What runs in the place of ``program``, which TorchDynamo has captured."""
        self.front.inside.captured = True
        assert self.front.known_model is not None
        self._noted.note_model(self.front.known_model)
        if not are_known(program):
            self._masks_known = False  # so it is captured once more
            raise UnsupportedError("whether a mask is left out depends on values")
        try:
            check_operators(program)
        except UnsupportedError as error:
            self.never = str(error)
            raise
        check_capture(program)
        checkpoints = check_checkpoints(program)
        check_values(program)
        if checkpoints:
            self.front.say_checkpoints()
        calls = CapturedCalls(program, self.front)
        known = next((known for known in self.graphs if calls.identity and known.identity == calls.identity), None)
        if known is None:
            check_numbers(program, [known.program for known in self.graphs])
            check_loops(program, [known.program for known in self.graphs])
            self.graphs.append(calls)
        else:
            calls = known
            calls.repeated += 1
            if calls.repeated == MANY_CAPTURES:
                self._unsaid = _many_times(self.front.name, _latest_reason(self._entry.__code__))
        found = weakref.ref(calls)  # what it makes of this, TorchDynamo keeps for ever

        def call(*arguments: Any) -> Any:
            calls = found()
            assert calls is not None
            calls.front.inside.ran = True
            new = calls.front.inside.captured
            with calls.front.telling_capture() if new else contextlib.nullcontext(), modes_again(calls.front.modes):
                return calls.call(*arguments)

        return torch._dynamo.disable(call)  # type: ignore[no-any-return]


def _many_times(name: str, changed: str) -> str:
    """What is said where the same was captured for the many-th time, since the condition ``changed`` does not hold."""
    changed = f" ({changed} does not hold)" if changed else ""
    return (
        f"{name} was captured for the {1 + MANY_CAPTURES}th time, and computes with tensors as before: something that "
        f"its Python reads changes from call to call{changed}. Each capture takes longer than a small step. Keep it in "
        'a tensor (a buffer), or outside of the model; TORCH_LOGS="recompiles" says more.'
    )


def _latest_reason(code: CodeType) -> str:
    """The condition under which the last capture of ``code`` would have served; empty where TorchDynamo kept none."""
    found = (_REASON.match(str(reason)) for reason in torch._dynamo.utils.guard_failures.get(code, ()))
    latest = max(reversed([m for m in found if m]), key=lambda m: int(m[1]), default=None)
    return latest[2].strip() if latest else ""


_REASON = re.compile(r"\d+/(\d+): ([^#\n]*)")
"""The numbers of a function and of a capture of it, and the condition, before the line of code that it is of."""


_REFUSED = (
    (re.compile("_(grad|jvp)_increment_nesting"), "derivatives are computed inside forward"),
    (re.compile(".*register_hook.*"), "a hook is registered on a tensor"),
    (re.compile("set_"), "a tensor is given other memory (.data = …)"),
    (
        re.compile("_saved_tensors_hooks_disable"),
        "hooks of saved tensors are disabled inside forward (disable_saved_tensors_hooks)",
    ),
)
"""Functions that no graph is to call, and what calls them."""


def check_capture(program: fx.GraphModule) -> None:
    """Raise ``UnsupportedError`` where a capture would not do as Python does, while TorchDynamo calls its backend."""
    if found := numpy_function(program):
        raise UnsupportedError(f"NumPy's {found} would be computed by torch, whose numbers are others")
    called = [node for node in program.graph.nodes if node.op in ("call_function", "call_method")]
    for function, what in _REFUSED:
        if node := next((n for n in called if function.fullmatch(name_of(n))), None):
            raise UnsupportedError(f"{what}{line_of(node)}")
    inputs = program.graph.find_nodes(op="placeholder")
    if node := next(
        (n for n in called if isinstance(n.target, HigherOrderOperator) and name_of(n) not in WRAPPED), None
    ):
        raise UnsupportedError(f"torch's operator {name_of(node)} is no operation{line_of(node)}")
    if spread := next((n for n in inputs if _is_spread(n)), None):
        raise UnsupportedError(f"{spread.name} is a tensor that is spread over processes (DTensor)")
    if recurrent := next(_recurrent_in_autocast(program), None):
        raise UnsupportedError(f"a recurrent layer runs within forward's own autocast{line_of(recurrent)}")
    if keeping := keeps_what_is_written(program):
        raise UnsupportedError(f"an autograd.Function keeps a tensor that is changed later{line_of(keeping)}")
    check_effects()
    if not any("RandomValueSource" in kind_of_source(n) for n in inputs):
        keep_draws_of_other_threads()


def _is_spread(node: fx.Node) -> bool:
    return any(c.__name__ == "DTensor" for c in type(node.meta.get("example_value")).__mro__)


def _recurrent_in_autocast(program: fx.GraphModule) -> Iterator[fx.Node]:
    """The recurrent operations within an autocast that forward enters. In eager mode their weights are cast once, for
    all steps and until the autocast ends, and the gradients of all steps are added before they are cast. The operation
    alone casts them in each step.
    """
    entered: list[bool] = []
    for graph in graphs_within(program):  # that of forward comes first
        casts = [] if graph is program else entered[:1]  # where in it another one runs is not looked up
        for node in graph.graph.nodes:
            name = name_of(node) if node.op == "call_function" else ""
            if name == "_enter_autocast":
                casts.append(node.args[2])
                entered += [True] if node.args[2] else []
            elif name == "_exit_autocast":
                casts.pop()
            elif name in NAMES_OF_RECURRENT and casts and casts[-1]:
                yield node


def check_values(program: fx.GraphModule) -> None:
    """Raise ``UnsupportedError`` where numbers that Python reads from tensors are used, sizes depend on values, or an
    ``autograd.Function`` is given a number that changes: as one graph, each call with others would be new.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    numbers = torch.SymInt, torch.SymFloat, torch.SymBool
    for node in program.graph.nodes:
        example = node.meta.get("example_value")
        if isinstance(example, torch.Tensor) and free_unbacked_symbols(example):
            raise UnsupportedError(f"the sizes of {node.name}{line_of(node)} depend on values")
        if isinstance(example, numbers) and node.users and free_unbacked_symbols(example):
            raise UnsupportedError(f"{node.name} is a number that Python reads from a tensor{line_of(node)}")
        if is_function(node) and not all(map(_is_size, node.all_input_nodes)):
            raise UnsupportedError(f"an autograd.Function is given a number that changes{line_of(node)}")


def check_numbers(program: fx.GraphModule, known: list[fx.GraphModule]) -> None:
    """Raise ``UnsupportedError`` where the ``known`` programs have shown that a fraction is another one in each call:
    Python computes it from something that changes, and TorchDynamo has its value in the program.
    """
    shape = _FRACTION.sub("", program.code)
    alike = [other for other in known if other.code != program.code and _FRACTION.sub("", other.code) == shape]
    if len(alike) >= MANY_NUMBERS:
        pairs = zip(program.graph.nodes, alike[-1].graph.nodes, strict=True)
        changed = next(a for a, b in pairs if str((a.args, a.kwargs)) != str((b.args, b.kwargs)))
        raise UnsupportedError(f"a number that forward computes is another one in each call{line_of(changed)}")


def check_loops(program: fx.GraphModule, known: list[fx.GraphModule]) -> None:
    """Raise ``UnsupportedError`` where ``known`` programs call the operations of ``program``, each another number of
    times: forward loops over what changes from call to call, and to capture and plan each length takes seconds.
    """
    kinds, count = _operations(program)
    counts = {other for names, other in map(_operations, known) if names == kinds}
    if len(counts - {count}) >= MANY_LENGTHS:
        raise UnsupportedError(LOOPS)


def _operations(program: fx.GraphModule) -> tuple[frozenset[str], int]:
    """The operations that ``program`` calls, and how often it calls any."""
    names = [name_of(node) for node in program.graph.nodes if node.op.startswith("call")]
    return frozenset(names), len(names)


_FRACTION = re.compile(r"\b\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)")


def _is_size(node: fx.Node) -> bool:
    """Whether a number follows from sizes of tensors alone; all else is none."""
    if node.target == "item":
        return False
    if not is_number(node):
        return True
    if node.op == "placeholder":
        return "TensorProperty" in kind_of_source(node)
    return all(map(_is_size, node.all_input_nodes))
