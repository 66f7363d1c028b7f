"""What Inductor makes of a piece: one forward and one backward, called with nothing but their arguments."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx

from rkgb.program import in_mode
from rkgb.storages import storage_key
from rkgb.trace.capture import current_mode
from rkgb.trace.preserved import each_saved
from rockmate.pieces.inductor import Code, inner_compiled, no_warnings
from solvers.work import Work


@dataclass(frozen=True)
class Form:
    """All of a tensor that code is made for."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: torch.Tensor) -> Form:
        """That of ``t``."""
        return cls(t.shape, t.stride(), t.dtype, t.device)


def form_of(a: Any) -> Hashable:
    """The ``Form`` of a tensor; anything else is what it is."""
    return Form.of(a) if isinstance(a, torch.Tensor) else a


@dataclass(frozen=True)
class Kernel:
    """The compiled code of a piece for arguments of one form.

    ``forward`` takes those arguments that are ``tensors``, and returns ``count`` results and then what ``backward``
    reads. ``backward`` takes that and the ``gradients`` of the results that have one, of these forms; it returns a
    gradient, or None, for each tensor. ``seconds``: that compiling took.
    """

    forward: Code
    backward: Code
    count: int
    gradients: tuple[Form, ...]
    tensors: tuple[bool, ...]
    seconds: float


class OwnMemory:
    """``code`` of a forward, with memory of its own for each result that eager kernels give some: the caller may change
    it in place. ``homes``: a number of the memory of each result; ``saved``: of that in which something is saved.
    """

    def __init__(self, code: Code, homes: tuple[int, ...], saved: frozenset[int]) -> None:
        self.code, self.homes, self.saved = code, homes, saved
        self.copied: list[int] | None = None  # known from the first call on

    def __call__(self, given: list[Any]) -> Any:
        found = self.code(given)
        if self.copied is None:
            self.copied = self._shared(found)
        if self.copied:
            found = [t.clone() if k in self.copied else t for k, t in enumerate(found)]
        return found

    def _shared(self, found: Sequence[Any]) -> list[int]:
        """The places of results, and of what is saved, that share memory with a result though they should not."""
        shared, homes = [], dict[int, int]()
        for k, t in enumerate(found):
            if not isinstance(t, torch.Tensor):
                continue
            if k < len(self.homes):
                if homes.setdefault(storage_key(t), self.homes[k]) != self.homes[k]:
                    shared.append(k)
            elif homes.get(storage_key(t), -1) not in {*self.saved, -1}:
                shared.append(k)
        return shared


T = TypeVar("T")


def isolated(work: Callable[[], T]) -> T:
    """What ``work`` returns, done with gradients in the mode of now, in a thread of its own, where no tracer, hook or
    mode is in force that is in this one.
    """
    mode = current_mode()

    def run() -> T:
        with in_mode(mode), torch.enable_grad(), no_warnings():
            return work()

    thread = Work([run])
    thread.start()
    while not thread.look():
        pass
    return thread.results()[0]


def compiled(body: fx.GraphModule, forms: Sequence[Any], wants: Sequence[bool]) -> Kernel:
    """Compile ``body`` for arguments of such ``forms``; ``wants``: which of them need a gradient. Nothing runs."""
    from torch._functorch import config as of_autograd
    from torch._functorch._aot_autograd.utils import make_boxed_func
    from torch._functorch.aot_autograd import aot_function
    from torch._guards import TracingContext, tracing
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    start = time.perf_counter()
    made: dict[str, Code] = {}
    gradients: list[Form] = []
    *_, returned = body.graph.nodes
    count = len(returned.args[0])
    mode = FakeTensorMode(static_shapes=True, shape_env=ShapeEnv())  # without one Inductor's disk cache is left out

    def like(t: Any) -> torch.Tensor:
        with mode:
            return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)

    def standing_in(gm: fx.GraphModule) -> Code:
        """What is called in place of the code of ``gm``."""
        *_, output = gm.graph.nodes
        values = [o.meta["val"] if isinstance(o, fx.Node) else o for o in output.args[0]]
        return lambda *_: [like(v) if isinstance(v, torch.Tensor) else v for v in values]

    def forward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        *_, output = gm.graph.nodes
        output.meta["user_visible_output_idxs"] = list(range(count))  # these lie as in eager mode
        found = standing_in(gm)
        made["forward"] = inner_compiled(gm, example_inputs)
        return make_boxed_func(found)

    def backward(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        gradients.extend(map(Form.of, example_inputs[len(example_inputs) - flowing :]))
        found = standing_in(gm)
        with unset_fake_temporarily():
            made["backward"] = inner_compiled(gm, example_inputs, is_backward=True)
        return make_boxed_func(found)

    with mode:
        tensors = [
            torch.empty_strided(f.shape, f.strides, dtype=f.dtype, device=f.device).requires_grad_(w)
            for f, w in zip(forms, wants, strict=True)
            if isinstance(f, Form)
        ]

    def call(*given: torch.Tensor) -> Any:
        feed = iter(given)
        return body(*(next(feed) if isinstance(f, Form) else f for f in forms))

    with mode:
        homes, saved = homes_of_results(call, tensors)
    with tracing(TracingContext(mode)), of_autograd.patch(donated_buffer=False):  # what is saved may be read again
        function = aot_function(
            call, forward, backward, partition_fn=_partitioned, decompositions=select_decomp_table(),
            num_params_buffers=len(tensors),  # whose sizes are numbers
        )  # fmt: skip
        results = function(*tensors)
        flows = [r for r in results if r.requires_grad]
        flowing = len(flows)
        with mode:  # gradients that lie in another way than is expected are copied before the backward is compiled
            torch.autograd.grad(flows, [t for t in tensors if t.requires_grad], [torch.zeros_like(r) for r in flows],
                                allow_unused=True)  # fmt: skip
    are_tensors = tuple(isinstance(f, Form) for f in forms)
    seconds = time.perf_counter() - start
    own = OwnMemory(made["forward"], homes, saved)
    return Kernel(own, made["backward"], count, tuple(gradients), are_tensors, seconds)


def homes_of_results(
    body: Callable[..., Any], tensors: Sequence[torch.Tensor]
) -> tuple[tuple[int, ...], frozenset[int]]:
    """A number for the memory of each result of ``body`` by eager kernels, and those where the backward's data lie."""
    kept: list[torch.Tensor] = []
    with each_saved(kept.append):
        results = [*body(*tensors)]
    keys = [storage_key(r) for r in results]
    saved = {storage_key(t) for t in kept}
    return tuple(map(keys.index, keys)), frozenset(keys.index(key) for key in saved.intersection(keys))


def without_data(
    body: fx.GraphModule, arguments: Sequence[Any], wants: Sequence[bool], flows: Sequence[bool]
) -> Kernel:
    """What stands for the kernel of ``body`` on the meta device, where nothing is compiled. ``wants``: which arguments
    need a gradient; ``flows``: which results have one.

    Results lie as the kernel's, gradients as what they are of. What the kernel saves is not known: here, what it is
    given.
    """
    others = tuple(None if isinstance(a, torch.Tensor) else a for a in arguments)
    are_tensors = tuple(isinstance(a, torch.Tensor) for a in arguments)
    wanted = [w for w, is_tensor in zip(wants, are_tensors, strict=True) if is_tensor]

    def forward(given: list[Any]) -> list[torch.Tensor]:
        feed = iter(given)
        with torch.no_grad():
            results = body(*(next(feed) if t else a for t, a in zip(are_tensors, others, strict=True)))
        return [*results, *given]

    def backward(given: list[Any]) -> list[Any]:
        return [torch.empty_like(t) if w else None for t, w in zip(given, wanted, strict=False)]

    results = forward([a for a in arguments if isinstance(a, torch.Tensor)])[: len(flows)]
    gradients = tuple(Form.of(r) for r, has_one in zip(results, flows, strict=True) if has_one)
    return Kernel(forward, backward, len(flows), gradients, are_tensors, 0.0)


def _partitioned(program: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    from torch._guards import detect_fake_mode
    from torch._inductor.compile_fx import partition_fn
    from torch._inductor.virtualized import V

    with V.set_fake_mode(detect_fake_mode(inputs)):
        return partition_fn(program, inputs, **options)
