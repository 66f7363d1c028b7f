"""Where S is cut: equal layers become equal blocks, whatever else crosses; and what makes blocks unequal."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch
import torch.nn.functional as F
from models import randn
from torch import nn

from rkgb import Atools, make_all_graphs
from rkgb.blocks.cut import _Merger
from rkgb.pipeline import Graphs, make_S


def graphs_of(model: nn.Module, *args: torch.Tensor, **kwargs: torch.Tensor) -> Graphs:
    torch.manual_seed(0)
    return make_all_graphs(model, args, kwargs, costs="flops")


def sizes(graphs: Graphs) -> list[int]:
    """For each block the nodes that may run again."""
    return [sum(not n.fixed for n in graphs.S.nodes[a:b]) for a, b in graphs.S.blocks]


def test_layers_of_an_encoder_and_a_decoder_that_reads_its_output() -> None:
    model = nn.Transformer(16, 2, 6, 6, 32, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(4)
    graphs = graphs_of(model, torch.randn(2, 5, 16), torch.randn(2, 4, 16), tgt_mask=mask)
    # The first encoder layer in part, five; the last norms and the first decoder layer, whose input needs no gradient;
    # five decoder layers, of 34 nodes in three parts each; the last norm.
    assert graphs.classes == (0, *[1] * 5, 2, 3, *[4, 5, 6] * 5, 4, 7)
    assert max(sizes(graphs)) <= 24


class SharedBias(nn.Module):
    """Attention whose bias is made once, of parameters, and read by every layer."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.bias = nn.Embedding(16, 1)
        self.register_buffer("ids", torch.arange(16).view(4, 4))
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(8, 8) for _ in range(5)) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias(self.ids).squeeze(-1)
        for q, k, v, up, down in self.layers:
            x = x + (q(x) @ k(x).transpose(1, 2) + bias).softmax(-1) @ v(x)
            x = x + down(F.gelu(up(x)))
        return x


def test_a_tensor_that_all_layers_read_is_in_nobodys_way() -> None:
    graphs = graphs_of(SharedBias(8), torch.randn(2, 4, 8, requires_grad=True))
    assert graphs.classes.count(1) == 7 and len(set(graphs.classes)) == 3
    assert graphs.summary().widest_interface == 2


class Res(nn.Sequential):
    """Two convolutions beside a residual."""

    def __init__(self, width: int) -> None:
        parts = (nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        super().__init__(*parts, *(nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class UNet(nn.Module):
    """Three res-blocks a level on both sides, four at the bottom; skips from side to side."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Sequential(*[Res(c) for _ in range(3)]) for c in (4, 8))
        self.wider = nn.ModuleList(nn.Conv2d(c, 2 * c, 1) for c in (4, 8))
        self.bottom = nn.Sequential(*[Res(16) for _ in range(4)])
        self.narrower = nn.ModuleList(nn.Conv2d(3 * c, c, 1) for c in (8, 4))
        self.up = nn.ModuleList(nn.Sequential(*[Res(c) for _ in range(3)]) for c in (8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips = []
        for down, wider in zip(self.down, self.wider, strict=True):
            x = down(x)
            skips.append(x)
            x = wider(F.avg_pool2d(x, 2))
        x = self.bottom(x)
        for up, narrower in zip(self.up, self.narrower, strict=True):
            x = up(narrower(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)))
        return x


def test_res_blocks_on_both_sides_of_a_u_net_are_equal() -> None:
    graphs = graphs_of(UNet(), torch.randn(1, 4, 8, 8, requires_grad=True))
    # Res-blocks of one width are of one class, going down and up, but for the first, which reads the input; between
    # them what changes the width.
    assert graphs.classes == (0, 1, 1, 2, 3, 3, 3, 4, 5, 5, 5, 5, 6, 3, 3, 3, 7, 1, 1, 1)


def test_units_are_joined_so_that_none_is_left_over() -> None:
    merger = _Merger([*range(100)], [0] * 100, target=12, largest=24)
    ways = [(size, times) for size in (2, 3, 5, 6, 7, 12, 20) for times in (4, 5, 97)]
    found = {way: merger.together(*way) for way in ways}
    assert found == {
        **{(2, 4): 4, (2, 5): 5, (2, 97): 6, (3, 4): 4, (3, 5): 4, (3, 97): 4},
        **{(5, 4): 2, (5, 5): 2, (5, 97): 2, (6, 4): 2, (6, 5): 1, (6, 97): 1},
        **{(size, times): 1 for size in (7, 12, 20) for times in (4, 5, 97)},
    }


def test_what_is_joined_is_of_nearly_equal_size_and_cut_where_little_crosses() -> None:
    bytes_at = [5] * 40
    bytes_at[11] = bytes_at[23] = 1
    merger = _Merger([*range(100)], bytes_at, target=12, largest=24)
    pieces = [(k, k + 1) for k in range(35)]
    assert merger.merge(pieces, [*range(35)]) == [(0, 11), (11, 23), (23, 35)]


# ------------------------------------------------------------------------------------------ what blocks are equal

Change = Callable[[torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A linear layer and what comes behind it."""

    def __init__(self, change: Change = torch.tanh, bias: bool = True) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(8, 8, bias), change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.linear(x))


def key(model: nn.Module, x: torch.Tensor, exact: bool = False) -> Hashable:
    """The key of all of a model as one block."""
    _, d, s = make_S(model, x)
    return Atools.nodes_key(d, s.nodes, exact)


def sample(*shape: int) -> torch.Tensor:
    return randn(*shape, seed=1)


UNEQUAL: dict[str, tuple[nn.Module, torch.Tensor]] = {
    "operation": (Block(torch.sigmoid), sample(4, 8)),
    "size": (Block(), sample(6, 8)),
    "dtype": (Block().double(), sample(4, 8).double()),
    "strides": (Block(), sample(8, 4).t()),
    "gradient of the input": (Block(), sample(4, 8).requires_grad_()),
    "frozen parameters": (Block().requires_grad_(False), sample(4, 8)),
    "no bias": (Block(bias=False), sample(4, 8)),
    "one more": (Block(lambda x: torch.tanh(torch.tanh(x))), sample(4, 8)),
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_what_costs_otherwise_is_of_another_class(name: str) -> None:
    assert key(Block(), sample(4, 8)) == key(Block(), sample(4, 8))
    assert key(*UNEQUAL[name]) != key(Block(), sample(4, 8))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda x: x.clamp(max=1.0), lambda x: x.clamp(max=2.0)),
        (lambda x: x**2.0, lambda x: x**3.0),
        (lambda x: F.dropout(x, 0.0), lambda x: F.dropout(x, 0.1)),
        (lambda x: x * 2, lambda x: x * 2.0),
    ],
)
def test_constants_count(one: Change, other: Change) -> None:
    assert key(Block(one), sample(4, 8)) != key(Block(other), sample(4, 8))


def drop_path(x: torch.Tensor, rate: float) -> torch.Tensor:
    return x * x.new_empty(4, 1).bernoulli_(1 - rate).div_(1 - rate)


@pytest.mark.parametrize("change", [lambda x, rate: x * rate, F.dropout, drop_path])
def test_rates_count_for_what_is_computed_but_not_for_what_it_costs(
    change: Callable[[torch.Tensor, float], torch.Tensor],
) -> None:
    for exact in (False, True):
        found = [key(Block(lambda x, rate=rate: change(x, rate)), sample(4, 8), exact) for rate in (0.1, 0.2)]
        assert (found[0] == found[1]) == (not exact)


def test_layers_with_rates_of_their_own_are_one_class_but_share_no_graph() -> None:
    torch.manual_seed(0)
    rates = [0.1 + k / 20 for k in range(6)]
    model = nn.Sequential(*(Block(lambda x, rate=rate: torch.tanh(drop_path(x, rate))) for rate in rates))
    graphs = graphs_of(model, sample(4, 8).requires_grad_())
    halves = graphs.S.with_blocks(((0, 4), (4, 8), (8, 12), (12, 16), (16, 20), (20, 24)))
    blocks = Atools.S_list_to_K_list_eco(halves, model, sample(4, 8).requires_grad_())
    assert blocks.classes == [[0], [1, 2, 3, 4, 5]]
    assert len({id(k) for k in blocks.K}) == 6


class Halves(nn.Module):
    """A product of two halves, of one tensor or of two."""

    def __init__(self, one: bool) -> None:
        super().__init__()
        self.a, self.b, self.one = nn.Linear(8, 8), nn.Linear(8, 8), one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.a(x), self.b(x)
        return first[:, :4] * (first if self.one else second)[:, 4:] + second[:, :4]


def test_what_lies_in_one_memory_counts() -> None:
    products = []
    for one in (False, True):
        _, d, s = make_S(Halves(one), sample(4, 8))
        products.append(Atools.nodes_key(d, [n for n in s.nodes if n.name == "mul"]))
    assert products[0] != products[1]
