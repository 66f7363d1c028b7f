"""What is said of planning: one line for each plan, by the logger ``rockmate``."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch.utils._pytree import tree_flatten_with_path

from rkgb.sample import Call
from rockmate.budget import show_bytes
from rockmate.calls.masks import without_padding
from rockmate.calls.numbers import NUMBER
from rockmate.planning.artefact import autocast_of_now
from rockmate.planning.kept import LOADED
from rockmate.planning.plan import Plan
from rockmate.planning.report import line_of_call, some_of

LOG = logging.getLogger("rockmate")

SILENT = logging.Logger("rockmate")
"""Takes the lines of who plans for an answer, and not for a training."""
SILENT.disabled = True

MANY = 4
"""From this plan on, the line says what to do about it."""

LONG = 1.0
"""Seconds of a step from which on it is said what took them."""

ANOTHER_OVERHEAD = 0.01
"""A predicted overhead that differs by more than this fraction of a step from what was said is said."""


class _IfNobodyElse(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to standard error where the program has set up no logging of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:
            self.stream = sys.stderr
            super().emit(record)


def be_heard() -> None:
    """From now on lines of ``rockmate`` are seen, also by programs that set up no logging."""
    if not LOG.handlers:
        LOG.addHandler(_IfNobodyElse())
        if LOG.level == logging.NOTSET:
            LOG.setLevel(logging.INFO)


def be_silent() -> None:
    """A command prints itself what it has found: lines of ``rockmate`` are seen only where logging is set up."""
    if not LOG.handlers:
        LOG.addHandler(logging.NullHandler())


def described(names: list[str], values: list[Any], training: bool | None) -> tuple[str, ...]:
    """A call in a few words: its tensors, numbers, and what else a plan depends on."""
    named = ((k, v) for k, v in zip(names, values, strict=True) if "()" not in k and not k.startswith(NUMBER))
    found = [f"{k} {_form(v)}" for k, v in named]
    if training is not None:
        found.append("train" if training else "eval")
    if (full := without_padding()) is not None:
        found.append("padding none" if full else "padding some")
    return *found, *autocast_of_now()


def names_of(call: Call) -> list[str]:
    """What the arguments are called, as ``Attachment.described`` reads it."""
    names = []
    try:
        paths = [path for path, _ in tree_flatten_with_path((call.args, call.kwargs))[0]]
    except ValueError:  # a class was registered with PyTorch's trees without names of what it holds
        paths = []
    for path in paths:
        kind, *rest = path
        where = "kwargs" if getattr(kind, "idx", 0) else "args"
        names.append(".".join([where, *(str(getattr(key, "key", getattr(key, "idx", key))) for key in rest)]))
    return names if len(names) == len(call.leaves) else [f"input {k}" for k in range(len(call.leaves))]


def _form(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return str(value)
    strides = value.layout == torch.strided and not value.is_contiguous()
    lies = f" strides {list(value.stride())}" if strides else ""
    return f"{_short(value.dtype)}{list(value.shape)}{lies}" + (" with gradient" if value.requires_grad else "")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def planned_line(what: str, call: tuple[str, ...], plan: Plan, number: int, before: tuple[str, ...] | None) -> str:
    """What is said of plan ``number`` of the model ``what``. ``before``: of the calls that came before, the one most
    like ``call``.
    """
    line = (
        f"planned {what} in {sum(plan.setup_seconds.values()):.1f} s{_loaded(plan)} for {line_of_call(call)}: "
        f"predicted peak {show_bytes(plan.predicted_peak)}, budget {show_bytes(plan.budget)}, "
        f"{100 * plan.predicted_overhead:.1f} % more time{costly(plan.predicted_overhead)}"
    )
    if before is not None:
        line += f"; {_difference(before, call)}"
    if number >= MANY:
        pad = "" if before is None or shapes_of(before) == shapes_of(call) else "pad inputs to a few shapes, and "
        line += f". This is plan {number}: {pad}keep what changes at every step in tensors"
    return line


def shapes_of(call: tuple[str, ...]) -> list[str]:
    """Of what is said of a call, what is said of tensors."""
    return [words for words in call if "[" in words.partition(" ")[2]]


def costly(overhead: float) -> str:
    """What is said of a plan that runs again for longer than a step takes; empty of others."""
    return "" if overhead <= 1 else ". A larger budget may take far less time: see frontier()"


def _loaded(plan: Plan) -> str:
    """What of the plan an earlier process has found."""
    found = [] if "measure" in plan.setup_seconds else ["costs"]
    found += ["schedule"] if plan.solver.endswith(LOADED) else []
    return f" ({' and '.join(found)} loaded)" if found and "load" in plan.setup_seconds else ""


_NAMES = dict.fromkeys(("train", "eval"), "train or eval")
"""Of what is said of a call without a name."""


def _difference(before: tuple[str, ...], now: tuple[str, ...]) -> str:
    """In what two calls differ, by the names of their inputs."""
    old, new = ({_NAMES.get(words, words.partition(" ")[0]): words for words in call} for call in (before, now))
    changed = [f"{words} was {old[k].removeprefix(f'{k} ')}" for k, words in new.items() if old.get(k, words) != words]
    changed += [f"{words}, not there before" for k, words in new.items() if k not in old]
    changed += [f"no {k}" for k in old if k not in new]
    if changed:
        return "new: " + ", ".join(some_of(changed))
    return "new: something in the module's Python, or gradients, differs"
