"""The pass that fuses light operations, on programs as text: which groups it finds, and what is left of the program."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from rockmate.pieces.dropout import seeded_dropout, with_seeds
from rockmate.pieces.functional import without_writes
from rockmate.pieces.fuse import grouped, pieces_of, with_pieces
from rockmate.pieces.norms import without_statistics
from rockmate.pieces.piece import Piece
from rockmate.pieces.program import with_compiled_pieces
from rockmate.pieces.seen import watch


def tensor(*shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count).sin().view(shape).requires_grad_()


def fused(function: Callable[..., Any], *inputs: torch.Tensor) -> tuple[fx.GraphModule, dict[str, Piece]]:
    """The program of ``function`` with pieces, and these by name."""
    program = fx.symbolic_trace(function)
    without_statistics(program)
    with_seeds(program, torch.device("cpu"))
    seen = watch(program, inputs)
    if without_writes(program, seen):
        seen = watch(program, inputs)
    grouping = grouped(program, seen)
    made = with_pieces(program, grouping.order, pieces_of(grouping, seen, {}))
    return made, {name: m for name, m in made.named_children() if isinstance(m, Piece)}


def text(program: fx.GraphModule) -> list[str]:
    """The lines of a program, without what lets go of its variables."""
    lines = [re.sub(r";.*| *#.*", "", line).strip() for line in program.code.strip().splitlines()]
    return [line for line in lines if line and not line.startswith(("def ", "import "))]


def check(function: Callable[..., Any], inputs: Sequence[torch.Tensor], expected: Sequence[str], *words: str) -> None:
    """The text of the fused program, and the words of its pieces; it computes what ``function`` computes."""
    program, pieces = fused(function, *inputs)
    assert text(program) == list(expected)
    assert [p.words for p in pieces.values()] == list(words)
    for piece in pieces.values():
        piece.forward = piece.eager  # type: ignore[method-assign]
    again = [t.detach().clone() for t in inputs]
    ours, theirs = program(*[t.detach().clone() for t in inputs]), function(*again)
    for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_chain_between_products() -> None:
    def function(x, w, v):  # type: ignore[no-untyped-def]
        return torch.tanh(F.gelu(x @ w) * 2) @ v

    check(
        function,
        (tensor(4, 4), tensor(4, 4), tensor(4, 4)),
        ["matmul = x @ w", "piece_0 = self.piece_0(matmul)", "matmul_1 = piece_0 @ v", "return matmul_1"],
        "gelu_mul_tanh",
    )


def test_one_operation_is_no_piece() -> None:
    def function(x, w):  # type: ignore[no-untyped-def]
        return F.gelu(x @ w) @ w

    lines = ["matmul = x @ w", "gelu = torch._C._nn.gelu(matmul)", "matmul_1 = gelu @ w", "return matmul_1"]
    check(function, (tensor(4, 4), tensor(4, 4)), lines)


def test_a_group_is_convex() -> None:
    """The sum reads the first group's result and a product of it: it cannot be in that group."""

    def function(x, w):  # type: ignore[no-untyped-def]
        h = torch.tanh(x * 2)
        return torch.sin(h + h @ w).cos()

    check(
        function,
        (tensor(4, 4), tensor(4, 4)),
        [
            "piece_0 = self.piece_0(x)",
            "matmul = piece_0 @ w",
            "piece_1 = self.piece_1(piece_0, matmul)",
            "return piece_1",
        ],
        "mul_tanh",
        "add_sin_cos",
    )


def test_two_groups_do_not_wait_for_each_other() -> None:
    """Each alone is convex, both together not: a's second half reads b's first half, and b's a's."""

    def function(x, y, w):  # type: ignore[no-untyped-def]
        a, b = torch.tanh(x * 2), torch.tanh(y * 2)
        p, q = a @ w, b @ w
        return torch.sin(a + q).cos() @ w, torch.sin(b + p).cos() @ w

    program, pieces = fused(function, tensor(4, 4), tensor(4, 4), tensor(4, 4))
    assert sorted(p.words for p in pieces.values()) == ["add_sin_cos", "mul_tanh", "mul_tanh_add_sin"]
    program.graph.lint()  # each value is made before it is read


def test_views_vanish_within_and_stay_across_the_border() -> None:
    def function(x, w):  # type: ignore[no-untyped-def]
        h = (torch.tanh(x).view(2, 2, 4) + 1).transpose(0, 1)
        return h @ w

    check(
        function,
        (tensor(4, 4), tensor(4, 4)),
        ["piece_0 = self.piece_0(x)", "transpose = piece_0.transpose(0, 1)", "matmul = transpose @ w", "return matmul"],
        "tanh_add",
    )


def test_a_tensor_that_is_indexed() -> None:
    """A slice of what a piece makes is taken again outside; numbers from places stay outside."""

    def function(x, w):  # type: ignore[no-untyped-def]
        h = torch.tanh(x * 2)
        places = (h @ w).argmax(-1)
        return h[:, 0] @ w, torch.sin(h[places]).cos()

    check(
        function,
        (tensor(4, 4), tensor(4, 4)),
        [
            "piece_0 = self.piece_0(x)",
            "matmul = piece_0 @ w",
            "argmax = matmul.argmax(-1)",
            "getitem = piece_0[(slice(None, None, None), 0)]",
            "matmul_1 = getitem @ w",
            "getitem_1 = piece_0[argmax]",
            "piece_1 = self.piece_1(getitem_1)",
            "return (matmul_1, piece_1)",
        ],
        "mul_tanh",
        "sin_cos",
    )


def test_several_results() -> None:
    """A residual and its norm; parts of a tensor, and results that come as a tuple."""

    def function(x, y, w):  # type: ignore[no-untyped-def]
        h = x + y
        variance, mean = torch.var_mean(h, -1, keepdim=True)
        first, second = torch.chunk((h - mean) * variance, 2, -1)
        return (first * second) @ w, h @ h

    _, pieces = fused(function, tensor(4, 4), tensor(4, 4), tensor(2, 2))
    assert [len(p.flows) for p in pieces.values()] == [2]
    assert [p.words for p in pieces.values()] == ["add_var_mean_sub_mul"]


def test_work_in_place() -> None:
    """In a piece it makes memory; alone it stays in place; where another reads the old memory, it is no part."""

    def inside(x, w):  # type: ignore[no-untyped-def]
        return F.relu((x @ w) * 2, inplace=True) @ w

    lines = ["matmul = x @ w", "piece_0 = self.piece_0(matmul)", "matmul_1 = piece_0 @ w", "return matmul_1"]
    check(inside, (tensor(4, 4), tensor(4, 4)), lines, "mul_relu")

    def alone(x, w):  # type: ignore[no-untyped-def]
        return F.relu(x @ w, inplace=True) @ w

    program, pieces = fused(alone, tensor(4, 4), tensor(4, 4))
    assert not pieces
    assert "inplace = True" in program.code

    def seen(x, w):  # type: ignore[no-untyped-def]
        h = (x @ w).clone() * 2
        return h.add_(1).sin().cos() @ h

    program, pieces = fused(seen, tensor(4, 4), tensor(4, 4))
    assert "add_" in program.code
    assert [p.words for p in pieces.values()] == ["sin_cos"]


def test_what_writes_into_what_it_is_given_is_in_no_piece() -> None:
    def function(x, mean, variance, w):  # type: ignore[no-untyped-def]
        return F.instance_norm(x * 2 + 1, mean, variance).sin().cos() @ w

    mean, variance = torch.zeros(3), torch.ones(3)
    _, pieces = fused(function, tensor(2, 3, 4), mean, variance, tensor(4, 4))
    assert [p.words for p in pieces.values()] == ["mul_add", "sin_cos"]


def test_what_is_changed_later_is_read_by_no_piece() -> None:
    """Its code may save it, where eager kernels save a result. A buffer is changed by the next call, too."""

    def function(x, count, w):  # type: ignore[no-untyped-def]
        h = x @ w
        before = torch.tanh(h * 2)
        count.add_(1)
        h[0].fill_(0)
        return (before.exp() + torch.tanh(h * 2) + (h - count)) @ w

    _, pieces = fused(function, tensor(4, 4), torch.ones(4), tensor(4, 4))
    assert [p.words for p in pieces.values()] == ["tanh_exp_mul_add"]


def test_order_of_writes_and_reads() -> None:
    """A group that reads a buffer stands on its side of the write."""

    def function(x, count, w):  # type: ignore[no-untyped-def]
        before = torch.tanh(x * count)
        count.add_(1)
        return (torch.tanh(x * count) + before.sin()) @ w

    inputs = tensor(4, 4), torch.ones(4), tensor(4, 4)
    program, _ = fused(function, *(t.clone().detach().requires_grad_(t.requires_grad) for t in inputs))
    program.graph.lint()
    for m in program.children():
        m.forward = m.eager  # type: ignore[union-attr]
    given = [[t.detach().clone() for t in inputs] for _ in range(2)]
    torch.testing.assert_close(program(*given[0]), function(*given[1]), rtol=0, atol=0)


def test_libraries_draws_and_places_stay_outside() -> None:
    def function(x, w, k):  # type: ignore[no-untyped-def]
        h = F.embedding(k, w)
        h = torch.tanh(F.linear(h, w)) * 2
        h = h * torch.rand_like(h) + h.cumsum(0)
        return F.softmax(h, -1).sort(-1)[0].sum() + x.sum()

    program, pieces = fused(function, tensor(4, 4), tensor(4, 4), torch.arange(4))
    inside = "".join(p.body.code for p in pieces.values())
    for name in ("embedding", "linear", "rand_like", "sort", "cumsum"):
        assert name in program.code
        assert name not in inside


def test_dropout_draws_once_at_the_beginning() -> None:
    def function(x, w):  # type: ignore[no-untyped-def]
        x = F.dropout(x @ w, 0.5, True) + x
        return F.dropout(x @ w, 0.5, True) + F.dropout(x, 0.5, False)

    program, pieces = fused(function, tensor(4, 4), tensor(4, 4))
    lines = text(program)
    assert lines[0].startswith("drawn_seeds = rockmate_pieces_dropout_drawn_seeds(2,")
    assert sum("self.piece" in line for line in lines) == 2
    assert [(p.words, p.draws) for p in pieces.values()] == [("seeded_dropout_add", True)]  # the seed is no part of it


def test_batch_norm_is_apart_from_its_statistics() -> None:
    def function(x, mean, variance, w):  # type: ignore[no-untyped-def]
        return F.relu(F.batch_norm(x, mean, variance, w, None, True, 0.25, 1e-5))

    program, pieces = fused(function, tensor(8, 3, 2), torch.zeros(3), torch.ones(3), tensor(3))
    assert [p.words for p in pieces.values()] == ["normalized_relu"]
    for p in pieces.values():
        p.forward = p.eager  # type: ignore[method-assign]
    ours, theirs = [[torch.zeros(3), torch.ones(3)] for _ in range(2)]
    torch.testing.assert_close(
        program(tensor(8, 3, 2), *ours, tensor(3)), function(tensor(8, 3, 2), *theirs, tensor(3))
    )
    torch.testing.assert_close(ours, theirs)


def test_a_batch_norm_of_which_no_piece_comes_is_what_it_was() -> None:
    """Its statistics are updated by its own kernel, in the same pass."""

    class Eager:
        """No piece runs compiled."""

        def known(self, piece: Piece, forms: tuple[Any, ...]) -> bool:
            return False

        def made(self, piece: Piece, arguments: Sequence[Any]) -> bool:
            return False

    def function(x, mean, variance, w):  # type: ignore[no-untyped-def]
        return F.relu(F.batch_norm(x @ x, mean, variance, w, None, True, 0.25, 1e-5))

    choices: Any = Eager()
    inputs = tensor(4, 4), torch.zeros(4), torch.ones(4), tensor(4)
    made = with_compiled_pieces(fx.symbolic_trace(function), inputs, {}, choices)
    assert (made.pieces, made.eager) == ({}, 1)
    assert text(made.program) == [
        "matmul = x @ x",
        "batch_norm = torch.nn.functional.batch_norm(matmul, mean, variance, w, None, True, 0.25, 1e-05)",
        "relu = torch.nn.functional.relu(batch_norm, inplace = False)",
        "return relu",
    ]
    found, expected = ([t.detach().clone() for t in inputs] for _ in range(2))
    assert torch.equal(made.program(*found), function(*expected))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_equal_groups_are_one_piece() -> None:
    def function(x, w):  # type: ignore[no-untyped-def]
        for _ in range(3):
            x = torch.tanh((x @ w) * 2)
        return x

    program, pieces = fused(function, tensor(4, 4), tensor(4, 4))
    assert len({id(p) for p in pieces.values()}) == 1
    assert sum("self.piece" in line for line in text(program)) == 3


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_masks(p: float) -> None:
    """Rates are right up to five standard deviations, as a whole, between rows of many widths, and between seeds."""
    x, seeds = torch.ones(1 << 18), [[74, 1 << 29], [91_000_003, 77]]
    first, second = (seeded_dropout(x, torch.tensor(s, dtype=torch.int32), p) != 0 for s in seeds)
    kept = 1 - p
    apart = [1, 2, 64, 512, 768, 1024, 2048, 3072, 4096, 5120, 8192, 12288, 16384, 65536]
    both = [(first[k:] & first[:-k], kept**2) for k in apart]
    for found, expected in [(first, kept), *both, (first & second, kept**2)]:
        assert abs(float(found.double().mean()) - expected) < 5 * (expected * (1 - expected) / found.numel()) ** 0.5
    torch.testing.assert_close(
        seeded_dropout(x, torch.tensor(seeds[0], dtype=torch.int32), p)[first], (x / kept)[first]
    )
    transposed = seeded_dropout(x.view(512, 512).t(), torch.tensor(seeds[0], dtype=torch.int32), p)
    assert torch.equal(transposed != 0, first.view(512, 512))
