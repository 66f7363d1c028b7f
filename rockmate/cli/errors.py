"""How commands end: exit codes, and errors as text or JSON."""

from __future__ import annotations

import traceback

import click

from rkgb.errors import GraphError, MismatchError, TraceError
from rockmate.errors import InputError, RockmateError

UNSUPPORTED, MISUSE, DEFECT = 1, 2, 3
"""Exit codes beside 0: the model is not supported or no plan fits; what was given cannot be used; Rockmate failed."""


class Misuse(click.ClickException):
    """What was given cannot be used. ``__cause__`` is the error that showed it, if there was one."""

    exit_code = MISUSE


class Unsupported(click.ClickException):
    """The model is not supported, or no plan fits the budget. ``kind``: the class of Rockmate's error."""

    exit_code = UNSUPPORTED

    def __init__(self, message: str, kind: str) -> None:
        super().__init__(message)
        self.kind = kind


def told(error: Exception) -> click.ClickException | None:
    """The error of a command for an error of the library; None if neither user nor model are to blame."""
    if isinstance(error, click.ClickException):
        return error
    if isinstance(error, InputError):
        misuse = Misuse(str(error))
        misuse.__cause__ = error
        return misuse
    if isinstance(error, (GraphError, RockmateError)):
        return Unsupported(f"{error}{_more(error)}", type(error).__name__)
    return None


def kind_of(error: click.ClickException) -> str:
    """The class of error that JSON names."""
    if isinstance(error, Unsupported):
        return error.kind
    return type(error.__cause__ or error).__name__


def _more(error: Exception) -> str:
    """What else to do where the message itself cannot know it."""
    if isinstance(error, (TraceError, MismatchError)) and "submodule" not in str(error):
        return "\nParts of the model may be supported all the same: rockmate.attach(model.part, budget)."
    return ""


def show_trace(error: BaseException) -> None:
    """Write the whole traceback to standard error."""
    click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
