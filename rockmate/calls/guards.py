"""Guards of our captures beside TorchDynamo's own: for what it takes for equal though forward may see a difference.

Each is a function that TorchDynamo calls with the guard when a capture is done; it shows their names. Nothing changes
for others that compile.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from rkgb.device import KINDS
from rockmate.calls.unguarded import is_captured, is_the_users_class, wrap


def guard_what_equals_and_differs() -> None:
    """From now on, where a call of ours is captured, these are guarded:

    - whether two objects are the same;
    - the order of what dicts and sets hold, and which keys a dict has from which a constant is computed;
    - what makes equal values differ: 1, 1.0 and True in a tuple, 0.0 and -0.0;
    - whether a function or a module of Python has an attribute that forward asks for;
    - functions, classes and objects that forward looks up as keys;
    - of which operation a tensor comes that forward gets, and whether it is a leaf or a view, where forward asks;
    - the dtype of autocast, where forward asks for it.

    Forwards that ask whether such a tensor retains its gradient, or has hooks, are not captured.
    """
    translation: Any = torch._dynamo.symbolic_convert
    variables: Any = torch._dynamo.variables
    wrap(variables.builder.VariableBuilder, "__call__", _built)
    wrap(variables.builder.VariableBuilder, "wrap_symfloat", _with_its_sign)
    wrap(variables.dicts.ConstDictVariable, "install_dict_keys_match_guard", _in_order)
    wrap(variables.dicts.ConstDictVariable, "as_python_constant", _with_its_keys)
    wrap(variables.lists.ListVariable, "call_method", _with_all_keys)
    wrap(variables.dicts.ConstDictVariable, "install_dict_contains_guard", _with_all_its_keys)
    wrap(getattr(getattr(variables, "hashable", None), "HashableTracker", None), "__init__", _looked_up)
    for kind in (variables.PythonModuleVariable, variables.UserFunctionVariable, variables.SkipFunctionVariable):
        wrap(kind, "call_obj_hasattr", _with_presence)
    wrap(variables.tensor.TensorVariable, "var_getattr", _with_its_history)
    wrap(variables.torch.TorchInGraphFunctionVariable, "call_function", _with_autocast)
    for name, same in (("is", True), ("is not", False)):
        compare = translation.compare_op_handlers[name]
        if not isinstance(compare, functools.partial):
            translation.compare_op_handlers[name] = functools.partial(_compared, compare, same)
    # What == and "in" of objects come to, in newer versions.
    wrap(getattr(variables, "object_protocol", None), "vt_identity_compare", _identified)


def _guard(source: Any, holds: Callable[[Any, Any], None]) -> None:
    """Capture again where what ``holds`` says of what comes from ``source`` is otherwise."""
    torch._dynamo.guards.install_guard(source.make_guard(holds))


def _stays(builder: Any, guard: Any, what: Callable[..., Any]) -> None:
    """Guard that ``what`` of the value is as it is now."""
    try:
        value = builder.get(guard)
    except TypeError:  # older versions take its name
        value = builder.get(guard.name)
    code = [f"what({builder.arg_ref(guard)}) == {what(value)!r}"]
    builder.add_python_lambda_leaf_guard_to_root(code, code, {"what": what})


# --------------------------------------------------------------------------------------------- values


def _built(build: Callable[..., Any], builder: Any, value: Any) -> Any:
    if is_captured() and _has_another(value) and not _is_torchs(builder.source):
        _guard(builder.source, ALIKE)
    return build(builder, value)


def _with_its_sign(wrap_: Callable[..., Any], builder: Any, value: float) -> Any:
    """-0.0 is no number that changes: computed with symbols, it would be 0.0."""
    is_negative = value == 0 and math.copysign(1, value) < 0
    with torch._dynamo.config.patch(specialize_float=True) if is_captured() and is_negative else nullcontext():
        return wrap_(builder, value)


def _is_torchs(source: Any) -> bool:
    """Whether it is of a module of torch's own, which takes such values alike."""
    return bool(source.guard_source.is_unspecialized_builtin_nn_module())


def _has_another(value: Any) -> bool:
    """Whether there is a value that equals this one, and with which operations may do something else."""
    if type(value) in (tuple, set, frozenset, _KEYS):
        return all(map(torch._dynamo.variables.ConstantVariable.is_literal, value))
    return type(value) is complex or (type(value) is float and value == 0)


def _alike(value: Any) -> str:
    """A text that is another one for values that are equal and not alike: 1, 1.0 and True, 0.0 and -0.0, and sets that
    hold the same in another order.
    """
    if type(value) is tuple:
        return f"({', '.join(map(_alike, value))})"
    if type(value) in (set, frozenset, _KEYS):
        return repr(list(value))
    return repr(value) if type(value) is complex or (type(value) is float and value == 0) else type(value).__name__


_KEYS: type = type({}.keys())


def ALIKE(builder: Any, guard: Any) -> None:
    _stays(builder, guard, _alike)


# ---------------------------------------------------------------------------------------------- dicts


def _in_order(install: Callable[..., None], variable: Any) -> None:
    if variable.source and is_captured():
        translator = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
        translator.output.guard_on_key_order.add(variable.source)
    install(variable)


def _with_its_keys(fold: Callable[..., Any], variable: Any) -> Any:
    found = fold(variable)  # raises, where it is no constant
    if is_captured():
        variable.install_dict_keys_match_guard()
    return found


def _with_all_keys(call: Callable[..., Any], variable: Any, translator: Any, name: str, args: Any, kwargs: Any) -> Any:
    if name == "extend" and args and is_captured():  # list(d), too
        install = getattr(_realized(args[0]), "install_dict_keys_match_guard", None)
        if install is not None:
            install()
    return call(variable, translator, name, args, kwargs)


def _with_presence(ask: Callable[..., Any], variable: Any, translator: Any, name: str) -> Any:
    if variable.source and is_captured():  # as TorchDynamo does for all other objects
        _guard(variable.source, functools.partial(torch._dynamo.guards.GuardBuilder.HASATTR, attr=name))
    return ask(variable, translator, name)


def _looked_up(hash_: Callable[..., None], tracker: Any, variable: Any) -> None:
    """``tracker``: a key of a dict, or what is looked up among the keys."""
    if is_captured() and not isinstance(variable.source, torch._dynamo.source.ConstDictKeySource):
        variable = _realized(variable)  # TorchDynamo guards what was looked up in vain only if it is realized
    hash_(tracker, variable)
    if is_captured() and getattr(variable, "is_realized", lambda: True)():
        _guard_key(_realized(variable))


def _guard_key(variable: Any) -> None:
    """Of a key that is an object of a class, TorchDynamo guards the class, and supposes that it equals itself alone."""
    variables: Any = torch._dynamo.variables
    if isinstance(variable, variables.UserMethodVariable):
        raise torch._dynamo.exc.Unsupported("a method of an object is looked up")
    if not variable.source or not isinstance(variable, variables.UserDefinedObjectVariable):
        return
    hashes = next(c for c in type(variable.value).__mro__ if "__hash__" in vars(c))
    if hashes is object:
        _guard(variable.source, torch._dynamo.guards.GuardBuilder.ID_MATCH)
    elif is_the_users_class(hashes) and not isinstance(variable, variables.FrozenDataClassVariable):
        raise torch._dynamo.exc.Unsupported(f"a {hashes.__name__}, which has a __hash__ of its own, is looked up")


def _with_all_its_keys(install: Callable[..., None], variable: Any, translator: Any, args: Any) -> None:
    install(variable, translator, args)
    if is_captured() and args[0].source is None and not args[0].is_python_constant():
        variable.install_dict_keys_match_guard()


# -------------------------------------------------------------------------------- tensors and autocast


def _with_its_history(read: Callable[..., Any], variable: Any, translator: Any, name: str) -> Any:
    if variable.source and is_captured():
        if name in _NOT_KNOWN:
            raise torch._dynamo.exc.Unsupported(f"forward asks for {name} of a tensor")
        if name in _OF_HISTORY:
            _guard(variable.source, HISTORY)
    return read(variable, translator, name)


def HISTORY(builder: Any, guard: Any) -> None:
    _stays(builder, guard, _history)


_OF_HISTORY = ("is_leaf", "grad_fn", "_base")

_NOT_KNOWN = ("retains_grad", "output_nr", "_backward_hooks")
"""What tensors without memory, with which TorchDynamo computes, do not have of those that they stand for."""


def _history(t: torch.Tensor) -> tuple[bool, str, bool]:
    return t.is_leaf, type(t.grad_fn).__name__, t._base is None


def _with_autocast(call: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    if is_captured() and function.value in _OF_AUTOCAST:
        _guard(torch._dynamo.source.GlobalStateSource(), AUTOCAST_DTYPES)
    return call(function, *args, **kwargs)


_OF_AUTOCAST = torch.get_autocast_dtype, torch.get_autocast_cpu_dtype, torch.get_autocast_gpu_dtype


def AUTOCAST_DTYPES(builder: Any, guard: Any) -> None:
    code = [f"dtypes() == {_autocast_dtypes()!r}"]
    builder.add_python_lambda_leaf_guard_to_root(code, code, {"dtypes": _autocast_dtypes})


def _autocast_dtypes() -> list[str]:
    return [str(torch.get_autocast_dtype(kind)) for kind in KINDS]


# ------------------------------------------------------------------------------------------- identity


def _compared(compare: Callable[..., Any], same: bool, translator: Any, pair: list[Any], more: Any) -> Any:
    """``pair[0] is pair[1]``, or "is not" where ``same`` is False."""
    found = compare(translator, pair, more)
    if is_captured() and found.is_python_constant():
        _guard_identity(pair[0], pair[1], bool(found.as_python_constant()) == same)
    return found


def _identified(compare: Callable[..., Any], left: Any, right: Any) -> Any:
    found = compare(left, right)
    kind = torch._dynamo.variables.UserDefinedObjectVariable
    if found is not None and is_captured() and isinstance(left, kind) and isinstance(right, kind):
        _guard_identity(left, right, bool(found.as_python_constant()))
    return found


def _realized(variable: Any) -> Any:
    return variable.realize() if hasattr(variable, "realize") else variable


def _guard_identity(left: Any, right: Any, same: bool) -> None:
    """Capture again where that ``left`` and ``right`` are one object, or two, is otherwise. What has no source is made
    by the captured code; constants have guards of their own.
    """
    pair = _realized(left), _realized(right)
    sources = [x.source for x in pair]
    variables: Any = torch._dynamo.variables
    constants = variables.ConstantVariable, variables.SymNodeVariable
    if None in sources or any(isinstance(x, constants) for x in pair):
        return
    one, other = sources
    name = other.name() if callable(other.name) else other.name  # a method, in older versions

    def IDENTITY(builder: Any, guard: Any) -> None:  # TorchDynamo shows this name
        code = [f"({builder.arg_ref(guard)} is {builder.arg_ref(name)}) == {same}"]
        builder.add_python_lambda_leaf_guard_to_root(code, code)

    _guard(one, IDENTITY)
