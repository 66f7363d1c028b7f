"""How commands end: exit codes, and errors as text or JSON."""

from __future__ import annotations

import click

from rkgb.errors import GraphError, MismatchError, TraceError
from rockmate.errors import InputError, RockmateError

UNSUPPORTED, MISUSE, DEFECT = 1, 2, 3
"""Exit codes beside 0: the model is not supported or no plan fits; what was given cannot be used; Rockmate failed."""


class Misuse(click.ClickException):
    """What was given cannot be used. ``__cause__`` is the error that showed it, if there was one."""

    exit_code = MISUSE


class Unsupported(click.ClickException):
    """The model is not supported, or no plan fits the budget. ``__cause__`` is the error that showed it."""

    exit_code = UNSUPPORTED


def told(error: Exception) -> click.ClickException | None:
    """The error of a command for an error of the library; None if neither user nor model are to blame."""
    if isinstance(error, click.ClickException):
        return error
    if not isinstance(error, (GraphError, RockmateError)):
        return None
    misused = isinstance(error, InputError)
    found = Misuse(str(error)) if misused else Unsupported(f"{error}{_more(error)}")
    found.__cause__ = error
    return found


def kind_of(error: click.ClickException) -> str:
    """The class of error that JSON names."""
    return type(error.__cause__ or error).__name__


def _more(error: Exception) -> str:
    """What else to do where the message itself cannot know it."""
    if isinstance(error, (TraceError, MismatchError)) and "submodule" not in str(error):
        return "\nParts of the model may be supported all the same: rockmate.attach(model.part, budget)."
    return ""
