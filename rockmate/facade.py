"""A module that stands for another one: state, attributes, methods and signature are the other's.

What is kept in parameters, buffers and submodules is shared, by sharing the dictionaries that hold them.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch

_SHARED = (
    "_non_persistent_buffers_set",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class Facade(torch.nn.Module):
    """Stands for ``original``. What a subclass defines itself wins over an attribute of that name of the original.

    ``OWN``: attributes that are the facade's, beside those that its class defines.
    """

    OWN: frozenset[str] = frozenset()

    def __init__(self, original: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"] = original
        # The very dicts of the original: names, values and changes of parameters and submodules are the original's.
        self._parameters, self._buffers, self._modules = original._parameters, original._buffers, original._modules
        for name in _SHARED:  # what ``state_dict`` and ``load_state_dict`` go by
            self.__dict__[name] = original.__dict__[name]

    @property
    def original(self) -> torch.nn.Module:
        """The module that was given."""
        found: torch.nn.Module = self.__dict__["_original"]
        return found

    @property
    def training(self) -> bool:
        """The mode of the original."""
        return self.original.training

    @training.setter
    def training(self, mode: bool) -> None:
        if "_original" in self.__dict__:  # nn.Module sets it when it is made, before there is one
            self.original.training = mode

    def train(self, mode: bool = True) -> Facade:
        """Set the mode of the original, as ``nn.Module.train``."""
        self.original.train(mode)
        return self

    def eval(self) -> Facade:
        """Set the mode of the original, as ``nn.Module.eval``."""
        self.original.eval()
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """That of the original."""
        self.original.zero_grad(set_to_none)

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__.get("_original")  # None while a copy is made
        if original is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_original")
        own = name in self.OWN or name in self.__dict__ or hasattr(type(self), name)
        if original is None or own or not hasattr(original, name):
            super().__setattr__(name, value)
        else:
            setattr(original, name, value)

    def __getstate__(self) -> dict[str, Any]:
        """Without what is made when it is asked for."""
        return {k: v for k, v in self.__dict__.items() if k != "_signed"}

    def __dir__(self) -> Iterable[str]:
        return sorted({*super().__dir__(), *dir(self.original)})

    # What an original may have changed for itself: hooks of its state, parameters that it also keeps elsewhere.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the original."""
        return self.original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """That of the original."""
        return self.original.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.original._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Facade:
        self.original._apply(fn, recurse)
        return self

    def apply(self, fn: Callable[[torch.nn.Module], None]) -> Facade:
        """Call ``fn`` on the original's submodules and on the original."""
        self.original.apply(fn)
        return self


class signed_as_original:
    """A method of a ``Facade`` whose signature is that of the original's ``forward``, and which is never compiled.

    Trainers ask for the signature, to know which columns of a batch the model takes. No data descriptor: ``forward``
    may be set.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __get__(self, module: Facade | None, owner: type | None = None) -> Callable[..., Any]:
        if module is None:
            return self._function
        forward = module.original.forward
        made = module.__dict__.get("_signed")
        if made is None or made[0] != forward:
            made = module.__dict__["_signed"] = (forward, _signed(self._function, forward))
        return MethodType(made[1], module)


def _signed(function: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with the signature of the bound method ``forward``; ``torch.compile`` runs it as it is."""
    uncompiled: Callable[..., Any] = torch.compiler.disable(
        function, reason="a Rockmate runs a plan of its own; compile parts beside it, or rk.original without a budget"
    )
    # What ``inspect.signature`` follows; an attribute ``__signature__`` would go on to whatever wraps the bound method.
    uncompiled.__wrapped__ = forward.__func__ if isinstance(forward, MethodType) else _with_self(forward)  # type: ignore[attr-defined]
    return uncompiled


def _with_self(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose signature is that of ``function`` behind ``self``."""

    def described(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    with contextlib.suppress(ValueError, TypeError):  # functions in C have none
        signature = inspect.signature(function)
        described.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[first, *signature.parameters.values()]
        )
    return described
