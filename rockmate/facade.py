"""A module that stands for another one: state, attributes, methods and signature are the other's.

What is kept in parameters, buffers and submodules is shared, by sharing the dictionaries that hold them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from types import MethodType
from typing import Any

import torch


class Facade(torch.nn.Module):
    """Stands for ``original``. What a subclass defines itself wins over an attribute of that name of the original.

    ``OWN``: attributes that are the facade's, beside those that its class defines and those that begin with "_".
    """

    OWN: frozenset[str] = frozenset()

    def __init__(self, original: torch.nn.Module) -> None:
        super().__init__()
        self.__dict__["_original"] = original
        # The very dicts of the original: names, values and changes of parameters and submodules are the original's.
        self._parameters, self._buffers, self._modules = original._parameters, original._buffers, original._modules

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

    def __getattr__(self, name: str) -> Any:
        original = self.__dict__.get("_original")  # None while a copy is made
        if original is None:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(original, name)

    def __setattr__(self, name: str, value: Any) -> None:
        original = self.__dict__.get("_original")
        own = name.startswith("_") or name in self.OWN or name in self.__dict__ or hasattr(type(self), name)
        if original is None or own or not hasattr(original, name):
            super().__setattr__(name, value)
        else:
            setattr(original, name, value)

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
    """A method of a ``Facade`` whose signature is that of the original's ``forward``.

    Trainers ask for it, to know which columns of a batch the model takes. No data descriptor: ``forward`` may be set.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        functools.update_wrapper(self, function)

    def __get__(self, module: Facade | None, owner: type | None = None) -> Callable[..., Any]:
        return self if module is None else MethodType(_Signed(self._function, module), module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _Signed:
    """The function below a bound method; its signature is made when someone asks."""

    def __init__(self, function: Callable[..., Any], module: Facade) -> None:
        self._function, self._module = function, module
        self.__name__, self.__qualname__, self.__doc__ = function.__name__, function.__qualname__, function.__doc__
        self.__module__ = function.__module__

    @property
    def __signature__(self) -> inspect.Signature:
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(self._module.original.forward)
        return signature.replace(parameters=[first, *signature.parameters.values()])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)
