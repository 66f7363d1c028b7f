"""Random small modules, as texts of Python that a person can read, paste and run.

``random_module(number)`` is always the same one, and ``modules`` a strategy of all for Hypothesis. Small changes of a
number change everything, so Hypothesis cannot make a module smaller: ``random_training.smallest`` does.
"""

from __future__ import annotations

import random
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from random_operations import GROUPS, SCOPES, Operation
from torch import nn

SHAPES = ((48, 8), (6, 8, 8), (4, 4, 6, 6))
"""Of the input ``x``: rows, sequences, images."""

LARGEST = 4096
"""Elements of a value, at most."""

CHOICES: dict[str, tuple[Any, ...]] = {
    "width": (4, 8, 12),
    "c": (0.5, -0.5, 2, 0.1),
    "k": (0, 1, 2),
    "dtype": ("torch.bfloat16", "torch.float64", "torch.float16", "torch.float32"),
}
"""What may fill holes that do not follow from values."""

LOSSES = {
    "squares": "sum(t.float().square().mean() for t in read)",
    "sums": "sum(t.float().sum() for t in read)",
    "weights": "sum((t.float() * torch.linspace(0, 1, t.shape[-1])).mean() for t in read)",
    "products": "sum((t * t).sum() for t in read).float()",
}

STEPS = {
    "one call": "result = call(*arguments)\ntotal = loss(result)\ntotal.backward()",
    "two calls": (
        "other = call(*arguments)\nresult = call(*arguments)\ntotal = loss(result) + loss(other)\n"
        "del other\ntotal.backward()"
    ),
    "a backward that retains": (
        "result = call(*arguments)\ntotal = loss(result)\ntotal.backward(retain_graph=True)\ntotal.backward()"
    ),
    "gradients asked for": (
        "result = call(*arguments)\ntotal = loss(result)\nasked = [p for p in call.parameters() if p.requires_grad]\n"
        "for p, gradient in zip(asked, torch.autograd.grad(total, asked, allow_unused=True)):\n    p.grad = gradient"
    ),
}
"""What a step does."""

BEFORE = {
    "nothing": "pass",
    "evaluation": "with torch.no_grad():\n    call(*arguments)",
    "inference": "with torch.inference_mode():\n    call(*arguments)",
    "accumulation": "loss(call(*arguments)).backward()",
}
"""What comes before a step."""


@dataclass(frozen=True, slots=True)
class Statement:
    """A few lines of forward. ``init``: what ``__init__`` does for them. ``reads``: names of values; ``last``: of the
    one that is made, or else changed. ``kinds``: of which operations they are.
    """

    text: str
    init: str
    reads: tuple[str, ...]
    last: str
    kinds: tuple[str, ...]
    breaks: bool


@dataclass(frozen=True, slots=True)
class RandomModule:
    """The parts of a text. ``number``: see ``random_module``. ``shape``: of the input. ``left``: names of what nobody
    reads, not even the caller. ``read``: names of what the loss reads of what forward returns. ``form``: how that is
    returned. ``loss``, ``step`` and ``before``: keys of ``LOSSES``, ``STEPS`` and ``BEFORE``.
    """

    number: int
    shape: tuple[int, ...]
    statements: tuple[Statement, ...]
    left: tuple[str, ...]
    read: tuple[str, ...]
    form: str
    loss: str
    step: str
    before: str
    input_gradient: bool

    @property
    def returned(self) -> tuple[str, ...]:
        """Names of what no statement reads, but for what is ``left``."""
        return tuple(name for name in unread(self.statements) if name not in self.left)

    @property
    def breaks(self) -> bool:
        """Whether TorchDynamo ends a graph somewhere."""
        return any(s.breaks for s in self.statements)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Of all that is in it, each once."""
        found = [kind for s in self.statements for kind in s.kinds]
        found += [f"returns a {self.form}", f"loss of {self.loss}", f"step of {self.step}", f"after {self.before}"]
        return tuple(dict.fromkeys([*found, *self._more()]))

    def _more(self) -> list[str]:
        found = ["gradient of the input"] if self.input_gradient else []
        found += ["what nobody reads"] if set(self.left).intersection(unread(self.statements)) else []
        return found + (["an output that the loss leaves out"] if len(self.read) < len(self.returned) else [])

    @property
    def source(self) -> str:
        """A file of Python with ``Net``, ``batch(seed)``, its arguments, ``loss(result)``, and what a step does."""
        init = "\n".join(s.init for s in self.statements if s.init)
        body = "\n".join(s.text for s in self.statements)
        picked = {
            "tensor": "(result,)",
            "tuple": f"[result[k] for k in {[self.returned.index(name) for name in self.read]}]",
            "dict": f"[result[name] for name in {list(self.read)}]",
            "nest": f"[result[1][0][name] for name in {list(self.read)}]",
        }[self.form]
        named = "{" + ", ".join(f'"{name}": {name}' for name in self.returned) + "}"
        returned = {
            "tensor": self.returned[0],
            "tuple": ", ".join(self.returned),
            "dict": named,
            "nest": f"None, [{named}]",
        }[self.form]
        asked = ".requires_grad_()" if self.input_gradient else ""
        return _FILE.format(
            init=textwrap.indent(init, " " * 8),
            body=textwrap.indent(f"{body}\nreturn {returned}", " " * 8).strip(),
            shape=self.shape,
            asked=asked,
            rows=self.shape[:2],
            picked=picked,
            loss=LOSSES[self.loss],
            step=textwrap.indent(STEPS[self.step], " " * 4),
            before=textwrap.indent(BEFORE[self.before], " " * 4),
        )

    def smaller(self) -> Iterator[RandomModule]:
        """The same with less: a statement, or an output that the loss reads. Not all of these run."""
        for k in reversed(range(len(self.statements))):
            rest = self.statements[:k] + self.statements[k + 1 :]
            returned = replace(self, statements=rest).returned
            if returned:
                read = tuple(name for name in self.read if name in returned) or returned[-1:]
                yield replace(self, statements=rest, read=read)
        if len(self.read) > 1:
            yield from (replace(self, read=tuple(n for n in self.read if n != name)) for name in self.read)
        if self.form != "tensor" and len(self.returned) == 1:
            yield replace(self, form="tensor")
        if self.step != "one call":
            yield replace(self, step="one call")
        if self.before != "nothing":
            yield replace(self, before="nothing")
        if self.input_gradient:
            yield replace(self, input_gradient=False)


def unread(statements: tuple[Statement, ...]) -> tuple[str, ...]:
    """Names of values that no statement reads after the last one that made or changed them."""
    found: dict[str, None] = {}
    for statement in statements:
        for name in (*statement.reads, statement.last):
            found.pop(name, None)
        found[statement.last] = None
    return tuple(name for name in found if name not in ("x", "ids"))


_FILE = """\
import numpy as np
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.count, self.rate, self.log = 0, 1.0, []
        self.generator = torch.Generator().manual_seed(1)
{init}

    def forward(self, x, ids):
        {body}


def batch(seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn({shape}, generator=draw){asked}, torch.randint(12, {rows}, generator=draw)


def loss(result):
    read = {picked}
    return {loss}


def before(call, arguments):
{before}


def step(call, arguments):
{step}
    return result, total
"""


class Impossible(Exception):
    """There is no value for a hole, or what fills it does not run."""


class Live:
    """The module so far, run: ``values`` by name, in the order in which they were made."""

    def __init__(self, shape: tuple[int, ...], input_gradient: bool) -> None:
        self.module = nn.Module()
        self.module.count, self.module.rate, self.module.log = 0, 1.0, []
        self.module.generator = torch.Generator().manual_seed(1)
        draw = torch.Generator().manual_seed(0)
        x = torch.randn(shape, generator=draw).requires_grad_(input_gradient)
        ids = torch.randint(12, shape[:2], generator=draw)
        self.names: dict[str, torch.Tensor] = {"x": x, "ids": ids}
        self.space: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "np": np, "self": self.module, **self.names}

    def run(self, statement: Statement) -> None:
        """Raises ``Impossible`` if that fails, or if a backward would fail then."""
        try:
            exec(statement.init.replace("super().", ""), self.space)
            exec(statement.text, self.space)
        except Exception as error:
            raise Impossible from error
        self.names[statement.last] = self.space[statement.last]
        try:
            fit = all(_is_fit(t) for t in self.names.values())
            if ends := [t for t in self.names.values() if fit and t.requires_grad and t.grad_fn is not None]:
                torch.autograd.backward([t.sum() for t in ends], retain_graph=True)
        except RuntimeError as error:  # of autograd, of views that were written within no_grad for one
            raise Impossible from error
        if not fit:
            raise Impossible


def _is_fit(t: Any) -> bool:
    if not isinstance(t, torch.Tensor) or not 0 < t.numel() <= LARGEST or t.dim() > 5:
        return False
    return bool(t.isfinite().all())


class Holes(dict[str, str]):
    """What fills the holes of a text, drawn where it is asked for. ``reads``: the values among it."""

    def __init__(self, draw: random.Random, live: Live, number: int) -> None:
        super().__init__()
        self.draw, self.live, self.number = draw, live, number
        self.reads: list[str] = []

    def __missing__(self, key: str) -> str:
        self[key] = found = str(self._drawn(key))
        return found

    @property
    def x(self) -> torch.Tensor:
        """The tensor that the operation is for."""
        return self.live.names[self["x"]]

    def _drawn(self, key: str) -> object:
        if key in ("x", "y", "z", "mask", "ids"):
            return self._value(key)
        if key == "new":
            again = self["x"] not in ("x", "ids") and self.draw.random() < 0.4
            return self["x"] if again else f"v{self.number}"
        if key == "layer":
            return f"l{self.number}"
        if key in ("d", "e"):
            return self.draw.randrange(-self.x.dim(), self.x.dim()) if self.x.dim() else 0
        if key == "order":
            return ", ".join(map(str, self.draw.sample(range(self.x.dim()), self.x.dim())))
        if key == "some":
            return ", ".join(self.draw.choice((":", ":", "::2", "1:", ":-1", "0")) for _ in self.x.shape) or "..."
        return self.draw.choice(CHOICES[key]) if key in CHOICES else self._size(key)

    def _size(self, key: str) -> int:
        """A size of ``{x}``."""
        at = {"last": -1, "second": 1}[key] if key in ("last", "second") else int(self["d"])
        if not -self.x.dim() <= at < self.x.dim():
            raise Impossible
        return max(1, self.x.shape[at] // 2) if key == "half" else self.x.shape[at]

    def _value(self, key: str) -> str:
        """A value that fits; a late one more often than not."""
        fits = [name for name, t in self.live.names.items() if self._fits(key, t)]
        if not fits:
            raise Impossible
        found = fits[-1] if self.draw.random() < 0.5 else self.draw.choice(fits)
        self.reads.append(found)
        return found

    def _fits(self, key: str, t: torch.Tensor) -> bool:
        if key == "mask":
            return t.dtype == torch.bool and t.shape == self.x.shape
        if key == "ids":
            return t.dtype == torch.int64
        alike = key != "y" or (t.shape == self.x.shape and t.dtype == self.x.dtype)
        return t.is_floating_point() and alike


def _statement(draw: random.Random, operation: Operation, holes: Holes) -> Statement:
    """A statement of forward that ``operation`` becomes."""
    text, kinds = operation.text.format_map(holes), [operation.kind]
    init = f"self.{holes['layer']} = {operation.layer.format_map(holes)}\n" if operation.layer else ""
    init += operation.setup.format_map(holes)
    if draw.random() < 0.2:
        scope = draw.choice(sorted(SCOPES))
        before = f"{holes['new']} = {holes['x']}\n" if "new" in holes and holes["new"] != holes.get("x") else ""
        text = f"{before}{SCOPES[scope]}\n" + textwrap.indent(text, "    ")
        kinds.append(f"in {scope}")
    last = holes.get("new") or holes["x"]
    return Statement(text, init.rstrip(), tuple(holes.reads), last, tuple(kinds), operation.breaks)


class Drawing:
    """A module while it is drawn: what was taken so far, and what of it nobody has read."""

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw
        self.shape = draw.choice(SHAPES)
        self.input_gradient = draw.random() < 0.2
        self.taken: tuple[Statement, ...] = ()
        self.live = Live(self.shape, self.input_gradient)

    def add(self) -> None:
        """Take a random operation, or none where that does not fit: each kind of a group is as likely."""
        groups, weights = zip(*GROUPS.values(), strict=True)
        group = self.draw.choices(groups, weights)[0]
        kind = self.draw.choice(sorted({operation.kind for operation in group}))
        self.take(self.draw.choice([operation for operation in group if operation.kind == kind]))

    def take(self, operation: Operation) -> bool:
        """Add ``operation``, if it fits."""
        holes = Holes(self.draw, self.live, len(self.taken))
        try:
            statement = _statement(self.draw, operation, holes)
        except Impossible:
            return False
        try:
            self.live.run(statement)
        except Impossible:  # it may have changed values: all is run anew without it
            self.live = Live(self.shape, self.input_gradient)
            for before in self.taken:
                self.live.run(before)
            return False
        self.taken += (statement,)
        return True

    def module(self, number: int) -> RandomModule | None:
        """What was drawn, if it can be trained."""
        names, unused = self.live.names, unread(self.taken)
        carried = [name for name in unused if names[name].requires_grad]
        if not carried or not any(p.requires_grad for p in self.live.module.parameters()):
            return None
        first = self.draw.choice(carried)
        read = tuple(name for name in carried if name == first or self.draw.random() < 0.6)
        left = tuple(name for name in unused if name not in read and self.draw.random() < 0.3)
        several = ("tuple", "dict", "nest")
        forms = several if len(unused) > 1 + len(left) else ("tensor", "tensor", *several)
        form, loss = self.draw.choice(forms), self.draw.choice(sorted(LOSSES))
        step = self.draw.choice(("one call", "one call", *STEPS))
        before = self.draw.choice(("nothing", "nothing", "nothing", *BEFORE))
        return RandomModule(number, self.shape, self.taken, left, read, form, loss, step, before, self.input_gradient)


def random_module(number: int) -> RandomModule:
    """Module ``number``: 4 to 14 operations, which eager mode can train for a step."""
    draw = random.Random(number)
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what torch says of odd operations is no matter
        while True:
            torch.manual_seed(0)
            drawing, most = Drawing(draw), draw.randint(4, 14)
            for _ in range(5 * most):
                if len(drawing.taken) < most:
                    drawing.add()
            if (found := drawing.module(number)) is not None:
                return found
