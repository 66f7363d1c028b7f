"""How TorchDynamo captures the calls of one model: each captured graph runs under plans of its own."""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from rkgb.collector import COLLECTING_RARELY
from rkgb.errors import UnsupportedError
from rkgb.sample import Call
from rkgb.warn import warn
from rockmate.calls.captured import kinds_of_sources, line_of, numpy_function, of_derivatives
from rockmate.calls.captured_calls import CapturedCalls, identity_of
from rockmate.calls.dynamo import (
    RECURRENT,
    hide_own_warnings,
    new_entry,
    prepare,
    settings,
)
from rockmate.calls.effects import check_checkpoints, check_effects, graphs_within
from rockmate.calls.front import Front
from rockmate.calls.masks import are_known, is_full, left_out_as_eager
from rockmate.calls.numbers import is_number
from rockmate.calls.surroundings import (
    keep_draws_of_other_threads,
    modes_again,
    put_back_if_it_fails,
)
from rockmate.calls.unguarded import CAPTURING, Noted
from rockmate.errors import PlanningWarning

if TYPE_CHECKING:
    from torch import fx


MANY_CAPTURES = 8
"""Captures of what was captured before, after which a user hears of it."""

MANY_NUMBERS = 4
"""Captures that differ in numbers alone, after which calls are followed: each step would have a capture of its own."""


class Capture:
    """The captures of one model's calls, each as one graph. ``graphs``: these, in the order in which they came."""

    def __init__(self, front: Front, model: Callable[[], torch.nn.Module]) -> None:
        """``model``: returns the model."""
        self.front, self._model = front, model
        self.graphs: list[CapturedCalls] = []
        self._entry = new_entry()
        self._compiled: Callable[..., Any] | None = None
        self._settings: dict[str, Any] = {}
        self._repeated: Counter[int] = Counter()  # by the captured graph: how often it was captured again
        self._changed: str | None = None  # why, where that is to be said
        self._masks_known = True  # whether it can be known before a capture what masks it leaves out
        self._sizes: set[tuple[torch.Size, ...]] = set()  # of the calls that came
        self._noted = Noted()  # what TorchDynamo does not guard

    def run(self, model: torch.nn.Module, call: Call) -> Any:
        """Call the model as TorchDynamo captures it, as one graph."""
        sizes = tuple(t.shape for t in call.tensors)
        if sizes in self._sizes:
            return self._run(model, call)
        self._sizes.add(sizes)
        with COLLECTING_RARELY:  # it may be captured, and is planned for
            return self._run(model, call)

    def _run(self, model: torch.nn.Module, call: Call) -> Any:
        if "torch._dynamo" not in sys.modules:
            importlib.import_module("torch._dynamo")
        if self._compiled is not None and self._noted.is_stale:
            self._forget()  # captures of inner functions are known by the backend
        if self._compiled is None:
            prepare()
            self._settings = settings()
            self._compiled = torch.compile(self._entry, backend=_backend_of(weakref.ref(self)), fullgraph=True)
        hide_own_warnings()
        masks_left_out = self._masks_known
        full = is_full(call) if masks_left_out else None
        try:
            with (
                self._capturing(),
                left_out_as_eager(full, masks_left_out),
                put_back_if_it_fails(),
            ):
                result = self._compiled(model, call.args, call.kwargs, full)
        except Exception:
            if not masks_left_out or self._masks_known:
                raise
            self._forget()
            return self._run(model, call)
        if self._changed is not None:  # said here, since an error within a capture would be taken for TorchDynamo's
            changed, self._changed = self._changed, None
            self._warn_of_captures(changed)
        return result

    @contextlib.contextmanager
    def _capturing(self) -> Iterator[None]:
        before = [getattr(CAPTURING, what, None) for what in ("name", "noted", "settings", "tracked")]
        CAPTURING.name, CAPTURING.noted, CAPTURING.settings = self.front.name, self._noted, self._settings
        CAPTURING.tracked = {}
        try:
            yield
        finally:
            for tracked in CAPTURING.tracked.values():
                tracked.clear()  # of a parameter its gradient is one, too, which the collector does not see
            CAPTURING.name, CAPTURING.noted, CAPTURING.settings, CAPTURING.tracked = before

    def clear(self) -> None:
        """Forget all that was captured."""
        self._forget()
        self.graphs.clear()
        self._repeated.clear()
        self._sizes.clear()

    def _forget(self) -> None:
        """Capture again; what then comes as before runs under its plans."""
        if self._compiled is not None:
            torch._dynamo.eval_frame.reset_code(self._entry.__code__)  # type: ignore[attr-defined]
        self._compiled = None
        self._noted = Noted()

    def captured(self, program: fx.GraphModule) -> Callable[..., Any]:
        """What runs in the place of ``program``, which TorchDynamo has captured."""
        self.front.inside.captured = True
        self._noted.note_model(self._model())
        if not are_known(program):
            self._masks_known = False  # so it is captured once more
            raise UnsupportedError("whether a mask is left out depends on values")
        self._check(program)
        identity = identity_of(program)
        calls = next((calls for calls in self.graphs if identity and calls.identity == identity), None)
        if calls is None:
            check_numbers(program, [known.program for known in self.graphs])
            calls = CapturedCalls(program, identity, self.front)
            self.graphs.append(calls)
        else:
            self._repeated[id(calls)] += 1
            if self._repeated[id(calls)] == MANY_CAPTURES:
                self._changed = _latest_reason(self._entry.__code__)
        found = weakref.ref(calls)  # what it makes of this, TorchDynamo keeps for ever

        def call(*arguments: Any) -> Any:
            calls = found()
            assert calls is not None
            calls.front.inside.ran = True
            if not calls.front.modes:
                return calls.call(*arguments)
            with modes_again(calls.front.modes):
                return calls.call(*arguments)

        return torch._dynamo.disable(call)  # type: ignore[no-any-return]

    def _check(self, program: fx.GraphModule) -> None:
        """Raise ``UnsupportedError`` for what is to be no graph."""
        check_capture(program)
        checkpoints = check_checkpoints(program)
        check_values(program)
        if checkpoints:
            self.front.say_checkpoints()

    def _warn_of_captures(self, changed: str) -> None:
        """Say that the same was captured for the many-th time, since the condition ``changed`` does not hold."""
        changed = f" ({changed} does not hold)" if changed else ""
        warn(
            f"{self.front.name} was captured for the {1 + MANY_CAPTURES}th time, and computes with tensors as before: "
            f"something that its Python reads changes from call to call{changed}. Each capture takes longer than a "
            'small step. Keep it in a tensor (a buffer), or outside of the model; TORCH_LOGS="recompiles" says more.',
            PlanningWarning,
        )


def _latest_reason(code: CodeType) -> str:
    """The condition under which the last capture of ``code`` would have served; empty where TorchDynamo kept none."""
    found = ""
    newest = 0
    for reason in torch._dynamo.utils.guard_failures.get(code, ()):
        if (match := _REASON.match(str(reason))) and int(match[1]) >= newest:
            newest, found = int(match[1]), match[2].strip()
    return found


_REASON = re.compile(r"\d+/(\d+): ([^#\n]*)")
"""The numbers of a function and of a capture of it, and the condition, before the line of code that it is of."""


def check_capture(program: fx.GraphModule) -> None:
    """Raise ``UnsupportedError`` where a capture would not do as Python does, while TorchDynamo calls its backend."""
    if derivative := next(filter(of_derivatives, program.graph.nodes), None):
        raise UnsupportedError(f"derivatives are computed inside forward{line_of(derivative)}")
    if found := numpy_function(program):
        raise UnsupportedError(f"NumPy's {found} would be computed by torch, whose numbers are others")
    if hooked := next((n for n in program.graph.nodes if "register_hook" in getattr(n.target, "__name__", "")), None):
        raise UnsupportedError(f"a hook is registered on a tensor{line_of(hooked)}")
    if given := next((n for n in program.graph.nodes if n.target in (torch.Tensor.set_, "set_")), None):
        raise UnsupportedError(f"a tensor is given other memory (.data = …){line_of(given)}")
    if spread := next((n for n in program.graph.find_nodes(op="placeholder") if _is_spread(n)), None):
        raise UnsupportedError(f"{spread.name} is a tensor that is spread over processes (DTensor)")
    if recurrent := next(_recurrent_in_autocast(program), None):
        raise UnsupportedError(f"a recurrent layer runs within forward's own autocast{line_of(recurrent)}")
    for node in program.graph.find_nodes(op="call_function", target=torch._C._autograd._saved_tensors_hooks_disable):
        raise UnsupportedError(
            f"hooks of saved tensors are disabled inside forward (disable_saved_tensors_hooks){line_of(node)}"
        )
    check_effects()
    if not any("RandomValueSource" in kind for kind in kinds_of_sources(program)):
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
            name = getattr(node.target, "__name__", "")
            if name == "_enter_autocast":
                casts.append(node.args[2])
                entered += [True] if node.args[2] else []
            elif name == "_exit_autocast":
                casts.pop()
            elif name in RECURRENT and casts and casts[-1]:
                yield node


def check_values(program: fx.GraphModule) -> None:
    """Raise ``UnsupportedError`` where numbers that Python reads from tensors are used, sizes depend on values, or an
    ``autograd.Function`` is given a number that changes: as one graph, each call with others would be new.
    """
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    for node in program.graph.nodes:
        example = node.meta.get("example_value")
        if isinstance(example, torch.Tensor) and free_unbacked_symbols(example):
            raise UnsupportedError(f"the sizes of {node.name}{line_of(node)} depend on values")
        if isinstance(example, _NUMBERS) and node.users and free_unbacked_symbols(example):
            raise UnsupportedError(f"{node.name} is a number that Python reads from a tensor{line_of(node)}")
        applied = str(getattr(node.target, "_name", "")) == "autograd_function_apply"
        if applied and not all(map(_is_size, node.all_input_nodes)):
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


_FRACTION = re.compile(r"\b\d+(?:\.\d+(?:e[+-]?\d+)?|e[+-]?\d+)")


def _is_size(node: fx.Node) -> bool:
    """Whether a number follows from sizes of tensors alone; all else is none."""
    if node.target == "item":
        return False
    if not is_number(node):
        return True
    if node.op == "placeholder":
        return "TensorProperty" in type(getattr(node, "_dynamo_source", None)).__name__
    return all(map(_is_size, node.all_input_nodes))


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def _backend_of(capture: weakref.ref[Capture]) -> Callable[..., Any]:
    """TorchDynamo keeps backends for ever, and must not keep models."""

    def backend(program: fx.GraphModule, _: list[Any]) -> Callable[..., Any]:
        found = capture()
        assert found is not None
        return found.captured(program)

    return backend
