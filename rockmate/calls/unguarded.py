"""What a captured call may read and TorchDynamo does not guard: it is guarded, noted, or not captured.

Nothing changes for others that compile.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType, UnionType
from typing import Any

import torch

from rkgb.trace.code import is_the_users
from rockmate.calls.captured import line_of
from solvers.interrupts import check

CAPTURING = threading.local()
"""``name``: of the model whose call this thread captures, or runs as it was captured. ``noted``: by that capture.
``tracked``: lists of the tensors without memory that it computes with, by their identity. ``given``: containers that
checkpoints get, and what each had then.
"""


class Noted:
    """What captured calls of a model have read, as it was when they were captured.

    ``shapes``: of the classes of the model's modules, and of those of the user's that other objects are of. ``codes``:
    of methods of the user's, with their defaults.
    ``names``: of dicts the keys that are to be the same, in the same order, with weak references to what has them.
    ``environment``: the variables of the process. ``builtins``: names of Python's own that the user's code reads, with
    the variables of its module, among which they are not.
    """

    def __init__(self) -> None:
        self.shapes: dict[type, tuple[bool, Any]] = {}  # with whether a class is the user's, which takes long to ask
        self.codes: list[tuple[FunctionType, CodeType, tuple[Any, ...] | None]] = []
        self.names: list[tuple[Callable[[], Any], Callable[[Any], list[Any]], list[Any]]] = []
        self.environment: dict[Any, Any] | None = None
        self.builtins: dict[tuple[str, int], dict[str, Any]] = {}

    @property
    def is_stale(self) -> bool:
        """Whether something is not as it was."""
        if self.environment not in (None, _environment()):
            return True
        if any(_shape(c, users) != then for c, (users, then) in self.shapes.items()):
            return True
        if any(f.__code__ is not code or f.__defaults__ is not given for f, code, given in self.codes):
            return True
        if any(name in variables for (name, _), variables in self.builtins.items()):
            return True
        held = ((keys, holder(), then) for holder, keys, then in self.names)
        return any(x is not None and keys(x) != then for keys, x, then in held)

    def note_model(self, model: torch.nn.Module) -> None:
        """A call of ``model`` was captured."""
        self._note_classes(c for m in model.modules() for c in type(m).__mro__ if c is not object)
        if self.environment is None:
            self.environment = dict(_environment())

    def note(self, value: Any) -> None:
        """A capture reads ``value``, or attributes of it."""
        kind = value if isinstance(value, type) else type(value)
        if isinstance(value, OrderedDict):
            self.names.append((weakref.ref(value), list, list(value)))
        elif kind not in self.shapes and is_the_users_class(kind):
            self._note_classes(c for c in kind.__mro__ if is_the_users_class(c))
        reads = getattr(type(value), "__getattr__", None)  # is called for what is not there, which nothing guards
        if isinstance(reads, FunctionType) and is_the_users(reads.__code__.co_filename):
            self.note_names(value)

    def note_names(self, value: Any) -> None:
        """A capture depends on which attributes ``value`` has of its own, or on their order."""
        with contextlib.suppress(TypeError):  # it has slots, and nothing can come beside them
            then = _attributes(value)
            holder = weakref.ref(value) if type(value).__weakrefoffset__ else lambda: value
            self.names.append((holder, _attributes, then))

    def _note_classes(self, classes: Iterable[type]) -> None:
        for c in classes:
            if c not in self.shapes:
                users = is_the_users_class(c)
                self.shapes[c] = users, _shape(c, users)
                own = (f for f in vars(c).values() if users and isinstance(f, FunctionType))
                self.codes += ((f, f.__code__, f.__defaults__) for f in own)


def _shape(kind: type, users: bool) -> Any:
    """What a class has: methods, names if it is the user's, what it inherits from."""
    methods = [v for v in vars(kind).values() if isinstance(v, _METHODS)]
    return kind.__mro__, [*vars(kind)] if users else None, methods


def _environment() -> dict[Any, Any]:
    found: dict[Any, Any] = getattr(os.environ, "_data", {})
    return found


def _attributes(value: Any) -> list[Any]:
    return [*vars(value)]


def is_the_users_class(kind: type) -> bool:
    """Whether a class is neither of an installed package nor of Python itself."""
    module = sys.modules.get(kind.__module__)
    path = getattr(module, "__file__", None)
    return kind.__module__ == "__main__" or (path is not None and is_the_users(path))


def is_overridden(t: torch.Tensor) -> bool:
    """Whether a class of the user's says what operations of ``t`` do."""
    kinds = () if type(t) in (torch.Tensor, torch.nn.Parameter) else type(t).__mro__
    return any("__torch_function__" in vars(c) and is_the_users_class(c) for c in kinds)


def is_captured() -> bool:
    """Whether this thread captures a call of an attached model."""
    return getattr(CAPTURING, "name", None) is not None


_METHODS = (FunctionType, property, staticmethod, classmethod)


def see_what_is_not_guarded() -> None:
    """From now on, where a call of ours is captured:

    - Code of the user's that catches the error for a key or an attribute that is not there is not captured, since
      nothing guards that it is not there. In installed packages it is.
    - Orders of ``OrderedDict``, what classes of the user's have, and the names in a ``__dict__`` that is read are noted
      (``Noted``).
    - Names of Python's own are noted where code of the user's reads them, as a variable of that name may come.
    - What methods of objects that the code itself makes have in closures and defaults is guarded.
    - Code that asks for instances of a class is not captured where a metaclass of the user's says which these are, or
      which attributes they have (a ``Protocol`` of the user's).
    - Code of the user's, or of a model of transformers, that asks whether it is compiled is told that it is not, as in
      eager mode.
    - Profilers that the code opens are not left out: it is not captured.
    - Where it makes leaves, the line is told.
    - Lists, dicts and sets that a checkpoint is given are noted: eager mode's second run reads them as they are then.
    - An ``autograd.Function`` that is to get no gradients of results that nobody reads is not captured: it would get
      zeros.
    - Texts of numbers that change are texts, and ``format`` takes its second argument for what it is. A whole number
      that changes is not rounded to tens, which TorchDynamo leaves out.
    """
    translation: Any = torch._dynamo.symbolic_convert
    variables: Any = torch._dynamo.variables
    wrap(translation.InstructionTranslatorBase, "exception_handler", _without_absences)
    wrap(translation.InstructionTranslatorBase, "load_builtin_from_argval", _noting_its_name)
    wrap(variables.builtin.BuiltinVariable, "call_isinstance", _by_its_class)
    wrap(variables.builtin.BuiltinVariable, "call_issubclass", _by_its_class)
    wrap(variables.builder.VariableBuilder, "__call__", _noting)
    for kind in (variables.UserDefinedObjectVariable, variables.UserFunctionVariable):
        wrap(kind, "var_getattr", _with_its_names)
    wrap(variables.UserFunctionVariable, "bind_args", _with_a_source)
    wrap(variables.torch.TorchInGraphFunctionVariable, "call_function", _as_eager)
    wrap(variables.ctx_manager.ProfilerContextVariable, "__init__", _not_left_out)
    wrap(torch._dynamo.output_graph.OutputGraph, "_check_requires_grad_intermediate_outputs", _with_its_line)
    wrap(translation.InstructionTranslatorBase, "_format_value", _as_text)
    wrap(variables.builtin.BuiltinVariable, "call_format", _by_its_spec)
    wrap(variables.builtin.BuiltinVariable, "call_round", _to_ones)
    orders = variables.higher_order_ops
    wrap(orders.CheckpointHigherOrderVariable, "_call_function", _noting_containers)
    wrap(orders.AutogradFunctionApplyVariable, "trace_forward_graph", _with_all_gradients)


def wrap(holder: Any, name: str, around: Callable[..., Any]) -> bool:
    """Have ``around`` called in the place of a function, with that function as its first argument. Whether this is new:
    not where it is done already, or there is no such function.
    """
    known = original = getattr(holder, name, None)
    while known is not None and getattr(known, "by_rockmate", None) is not around:
        known = getattr(known, "__wrapped__", None)
    if original is None or known is not None:
        return False

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    wrapper.by_rockmate = around  # type: ignore[attr-defined]
    setattr(holder, name, wrapper)
    return True


def _without_absences(handle: Callable[..., Any], translator: Any, raised: Any) -> Any:
    found = handle(translator, raised)  # raises, where this function catches nothing
    if is_captured() and type(raised).__name__ in _ABSENCES and is_the_users(translator.f_code.co_filename):
        raise torch._dynamo.exc.Unsupported(
            f"{translator.f_code.co_name} catches the error for a key or an attribute that is not there, and may come"
        )
    return found


_ABSENCES = ("ObservedKeyError", "ObservedAttributeError")


def _noting(build: Callable[..., Any], builder: Any, value: Any) -> Any:
    if is_captured():
        check()
        if isinstance(value, dict) and not value and is_the_users_class(type(value)):
            raise torch._dynamo.exc.Unsupported(f"of an empty {type(value).__name__} only the size is guarded")
        CAPTURING.noted.note(value)
        tracked = builder.tx.output.tracked_fakes
        CAPTURING.tracked[id(tracked)] = tracked
    return build(builder, value)


def _noting_its_name(load: Callable[..., Any], translator: Any, name: str) -> Any:
    if is_captured() and is_the_users(translator.f_code.co_filename):
        CAPTURING.noted.builtins[name, id(translator.f_globals)] = translator.f_globals
    return load(translator, name)


def _by_its_class(ask: Callable[..., Any], function: Any, translator: Any, value: Any, kinds: Any) -> Any:
    given = kinds.as_python_constant() if is_captured() and kinds.is_python_constant() else ()
    given = given.__args__ if isinstance(given, UnionType) else given
    for kind in given if isinstance(given, tuple) else (given,):
        if is_the_users_class(type(kind)) or (getattr(kind, "_is_protocol", False) and is_the_users_class(kind)):
            raise torch._dynamo.exc.Unsupported(f"whether something is a {kind.__name__} may change")
    return ask(function, translator, value, kinds)


def _with_its_names(read: Callable[..., Any], variable: Any, translator: Any, name: str) -> Any:
    if name == "__dict__" and is_captured():
        CAPTURING.noted.note_names(getattr(variable, "value", getattr(variable, "fn", None)))
    return read(variable, translator, name)


def _with_a_source(bind: Callable[..., Any], variable: Any, translator: Any, *args: Any) -> Any:
    function = variable.fn
    has_any = function.__closure__ or function.__defaults__ or function.__kwdefaults__
    is_placed = variable.get_source() is not None or not is_the_users(function.__code__.co_filename)
    if not is_captured() or not has_any or is_placed:
        return bind(variable, translator, *args)
    place = torch._dynamo.source.GlobalSource(translator.output.install_global_by_id("function", function))
    before = {name: value for name, value in vars(variable).items() if name in ("source", "source_fn")}
    vars(variable).update(dict.fromkeys(before, place))
    try:
        return bind(variable, translator, *args)
    finally:
        vars(variable).update(before)


def _as_eager(call: Callable[..., Any], function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    asked = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling, torch._dynamo.external_utils.is_compiling
    if is_captured() and any(function.value is question for question in asked):
        asks = translator.parent if translator.f_code.co_name == _ASKED_FOR_MODELS else translator
        if is_the_users(asks.f_code.co_filename) or _MODELS in asks.f_code.co_filename:
            return torch._dynamo.variables.ConstantVariable.create(False)
    return call(function, translator, *args, **kwargs)


_MODELS = os.path.join("transformers", "models", "")
"""In the paths of models that compute otherwise, with other bits, where they are compiled."""

_ASKED_FOR_MODELS = "is_torchdynamo_compiling"
"""The function of transformers by which they ask."""


def _with_its_line(check: Callable[..., None], output: Any, *args: Any) -> None:
    try:
        check(output, *args)
    except torch._dynamo.exc.Unsupported:
        if not is_captured():
            raise
        line = next((line_of(n) for n in output.graph.nodes if n.target == "requires_grad_"), "")
        raise torch._dynamo.exc.Unsupported(f"forward makes a tensor, and calls its requires_grad_(){line}") from None


def _not_left_out(make: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if is_captured():
        raise torch._dynamo.exc.Unsupported("forward opens a profiler, which TorchDynamo would leave out")
    make(*args, **kwargs)


def _as_text(format_value: Callable[..., None], translator: Any, spec: Any, *flags: Any) -> None:
    variables: Any = torch._dynamo.variables
    if not (is_captured() and isinstance(translator.stack[-1], variables.SymNodeVariable)):
        return format_value(translator, spec, *flags)
    if any(flags):  # !r, !s
        raise torch._dynamo.exc.Unsupported("a number that changes becomes a text")
    text = variables.ConstantVariable.create(f"{{:{spec.as_python_constant()}}}")
    return translator.call_function(variables.BuiltinVariable(str.format), [text, translator.pop()], {})  # type: ignore[no-any-return]


def _by_its_spec(format_: Callable[..., Any], function: Any, translator: Any, *args: Any, **kwargs: Any) -> Any:
    if is_captured() and function.fn is format:
        spec = args[1].as_python_constant() if len(args) > 1 else ""
        args = torch._dynamo.variables.ConstantVariable.create(f"{{:{spec}}}"), args[0]
    return format_(function, translator, *args, **kwargs)


def _to_ones(
    round_: Callable[..., Any], function: Any, translator: Any, number: Any, *digits: Any, **kwargs: Any
) -> Any:
    if is_captured() and (digits or kwargs) and isinstance(getattr(number, "sym_num", None), torch.SymInt):
        raise torch._dynamo.exc.Unsupported("a whole number that changes is rounded to tens")
    return round_(function, translator, number, *digits, **kwargs)


def _noting_containers(call: Callable[..., Any], checkpoint: Any, translator: Any, args: Any, kwargs: Any) -> Any:
    if is_captured():
        variables: Any = torch._dynamo.variables
        kinds = variables.ListVariable, variables.ConstDictVariable, variables.SetVariable
        given = [x.realize() for x in (*args[1:], *kwargs.values())]
        CAPTURING.given += [(x, contents(x)) for x in given if isinstance(x, kinds)]
    return call(checkpoint, translator, args, kwargs)


def contents(container: Any) -> list[Any]:
    """What a list, dict or set has, as TorchDynamo knows it."""
    items = container.items
    return [*items, *items.values()] if isinstance(items, dict) else [*items]


def _with_all_gradients(trace: Callable[..., Any], function: Any, translator: Any, ctx: Any, *args: Any) -> Any:
    found = trace(function, translator, ctx, *args)
    set_on_ctx = translator.output.side_effects.store_attr_mutations.get(ctx, ())
    if is_captured() and "materialize_grads" in set_on_ctx and len(getattr(found[1], "items", ())) > 1:
        raise torch._dynamo.exc.Unsupported("an autograd.Function calls set_materialize_grads")
    return found
