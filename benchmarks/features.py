"""Small models, each with something that real ones contain: cases for ``benchmarks/zoo.py``.

python benchmarks/zoo.py --cases benchmarks/features.py
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
CASES: dict[str, Callable[[], Case]] = {}


def names() -> list[str]:
    """The cases."""
    return list(CASES)


def build(name: str) -> Case:
    """(model in training mode, arguments, keyword arguments), the same at every call."""
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    return model.train(), args, kwargs


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    CASES[make.__name__] = make
    return make


class Calls(nn.Module):
    """A module whose forward is ``function(module, *args)``."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def linear(out: int = 8) -> nn.Linear:
    return nn.Linear(8, out)


Pair = collections.namedtuple("Pair", "first second")


@case
def gru_both_ways() -> Case:
    gru = nn.GRU(8, 16, 2, bidirectional=True, dropout=0.1, batch_first=True)
    return Calls(lambda m, x: m.out(m.gru(x)[0]), gru=gru, out=nn.Linear(32, 4)), (torch.randn(4, 10, 8),), {}


@case
def packed_lstm() -> Case:
    def forward(m: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return m.out(nn.utils.rnn.pad_packed_sequence(m.lstm(packed)[0], batch_first=True)[0])

    model = Calls(forward, lstm=nn.LSTM(8, 16, batch_first=True), out=nn.Linear(16, 4))
    return model, (torch.randn(4, 10, 8), torch.tensor([10, 7, 5, 3])), {}


@case
def unrolled_cell() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = c = x.new_zeros(x.shape[0], 16)
        for t in range(x.shape[1]):
            h, c = m.cell(x[:, t], (h, c))
        return m.out(h)

    return Calls(forward, cell=nn.LSTMCell(8, 16), out=nn.Linear(16, 4)), (torch.randn(4, 10, 8),), {}


@case
def mixture_of_experts() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = m.gate(x).softmax(-1).topk(2, -1)
        every = torch.stack([expert(x) for expert in m.experts], -2)
        index = chosen.unsqueeze(-1).expand(*chosen.shape, 8)
        return (every.gather(-2, index) * weights.unsqueeze(-1)).sum(-2)

    return Calls(forward, gate=linear(4), experts=nn.ModuleList(linear() for _ in range(4))), (torch.randn(4, 8),), {}


@case
def straight_through() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        return m.second(h + (h.round() - h).detach())

    return Calls(forward, first=linear(), second=linear()), (torch.randn(4, 8),), {}


@case
def gumbel_codebook() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.out(F.gumbel_softmax(m.scores(x), hard=True) @ m.codes.weight)

    return Calls(forward, scores=linear(16), codes=nn.Embedding(16, 8), out=linear()), (torch.randn(4, 8),), {}


@case
def parametrized_weights() -> Case:
    normed, orthogonal = nn.utils.parametrizations.weight_norm(linear()), nn.utils.parametrizations.orthogonal(linear())
    return Calls(lambda m, x: m.b(torch.relu(m.a(x))), a=normed, b=orthogonal), (torch.randn(4, 8),), {}


@case
def writes_into_slices() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros(4, 3, 8)
        for k in range(3):
            rows[:, k] = m.first(x) * k
        rows[:, 0] += x
        return m.second(rows)

    return Calls(forward, first=linear(), second=linear()), (torch.randn(4, 8),), {}


@case
def scattered() -> Case:
    def forward(m: Any, x: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        sums = torch.zeros(5, 8).index_add(0, to, h)
        return m.second(sums.scatter_reduce(0, to.unsqueeze(1).expand(4, 8), h, "amax"))[to]

    return Calls(forward, first=linear(), second=linear()), (torch.randn(4, 8), torch.tensor([0, 2, 2, 4])), {}


@case
def vmapped() -> Case:
    return (
        Calls(lambda m, x: torch.vmap(lambda row: torch.tanh(m.first(row)))(x), first=linear()),
        (torch.randn(4, 8),),
        {},
    )


@case
def nested_outputs() -> Case:
    def forward(m: Any, x: torch.Tensor) -> Any:
        a, b = m.first(x).chunk(2, -1)
        c, d = torch.split(b, [1, 3], -1)
        return [a * 2, {"c": c, "rest": (d, None, 3)}, Pair(a, x.sum())]

    return Calls(forward, first=linear()), (torch.randn(4, 8),), {}


@case
def inputs_as_outputs() -> Case:
    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        return x, m.first(x), y.view(-1), x[0]

    return Calls(forward, first=linear()), (torch.randn(4, 8, requires_grad=True), torch.randn(4, 8)), {}


@case
def writes_into_the_input() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return m.second(torch.relu(m.first(x)))

    return Calls(forward, first=linear(), second=linear()), (torch.randn(4, 8),), {}


@case
def channels_last() -> Case:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), linear(4)).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, (torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last),), {}


@case
def autocast_part() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = m.part(x)
        return m.out(h.float())

    part = nn.Sequential(linear(32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))
    return Calls(forward, part=part, out=linear()), (torch.randn(4, 8),), {}


@case
def masked_transformer() -> Case:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    masks = {"tgt_mask": nn.Transformer.generate_square_subsequent_mask(4), "src_key_padding_mask": padding}
    return model, (torch.randn(2, 5, 16), torch.randn(2, 4, 16)), masks


@case
def attention_with_weights() -> Case:
    attention = nn.MultiheadAttention(16, 2, dropout=0.1, batch_first=True)
    return Calls(lambda m, x: m.attention(x, x, x), attention=attention), (torch.randn(2, 5, 16),), {}


@case
def made_at_first_use() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        if getattr(m, "positions", None) is None:
            m.positions = torch.arange(x.shape[1]).float()
        return m.first(x + m.positions)

    return Calls(forward, first=linear()), (torch.randn(4, 8),), {}


@case
def norms_and_pools() -> Case:
    layers = [
        nn.Conv2d(3, 8, 3),
        nn.InstanceNorm2d(8, affine=True, track_running_stats=True),
        nn.PReLU(),
        nn.GroupNorm(2, 8),
        nn.LocalResponseNorm(2),
        nn.ConvTranspose2d(8, 4, 2, 2),
        nn.Dropout2d(0.2),
        nn.MaxPool2d(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    ]
    return nn.Sequential(*layers), (torch.randn(2, 3, 12, 12),), {}


@case
def unpooled() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        pooled, where = F.max_pool2d(torch.relu(m.up(x)), 2, return_indices=True)
        return m.down(F.max_unpool2d(torch.tanh(pooled), where, 2))

    up, down = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
    return Calls(forward, up=up, down=down), (torch.randn(2, 3, 8, 8),), {}


@case
def sparse_input() -> Case:
    with torch.sparse.check_sparse_tensor_invariants():
        edges = torch.sparse_coo_tensor(torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]]), torch.rand(4), (4, 4))
    model = Calls(lambda m, x, a: m.second(torch.sparse.mm(a, m.first(x))), first=linear(), second=linear())
    return model, (torch.randn(4, 8), edges), {}


@case
def cells_with_attention() -> Case:
    """A GRU cell writes into parts of one memory that count their versions apart."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = x[:, 0]
        for t in range(1, 4):
            weights = m.score(torch.cat([x, h.unsqueeze(1).expand(-1, 4, -1)], -1)).softmax(1)
            h = m.cell((weights * x).sum(1) + x[:, t], h)
        return m.out(h)

    return Calls(forward, cell=nn.GRUCell(8, 8), score=nn.Linear(16, 1), out=linear()), (torch.randn(4, 4, 8),), {}


@case
def statistics_in_a_chain() -> Case:
    """Norms that run again, whose statistics have changed since."""
    layers = [nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8, momentum=None), nn.ReLU()]
    layers += [nn.InstanceNorm1d(8, track_running_stats=True), nn.BatchNorm1d(8, affine=False), nn.RMSNorm([8, 10])]
    return nn.Sequential(*layers), (torch.randn(3, 4, 12),), {}


@case
def codebook_by_data() -> Case:
    """Buffers written through ``.data``, and a codebook assigned."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.first(x)
        nearest = torch.cdist(h, m.codes).argmin(-1)
        chosen = F.one_hot(nearest, 5).float()
        with torch.no_grad():
            m.count.data.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            m.sums.data.mul_(0.9).add_(chosen.T @ h, alpha=0.1)
            m.codes.data.copy_(m.sums / m.count.clamp(min=0.1).unsqueeze(1))
        return m.second(h + (F.embedding(nearest, m.codes) - h).detach())

    model = Calls(forward, first=linear(), second=linear())
    model.register_buffer("codes", torch.randn(5, 8))
    model.register_buffer("count", torch.zeros(5))
    model.register_buffer("sums", torch.randn(5, 8))
    return model, (torch.randn(4, 8),), {}


@case
def averaged_teacher() -> Case:
    """Parameters written in forward: averaged in place and through ``.data``, clamped, normalized."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for p, q in zip(m.first.parameters(), m.teacher.parameters(), strict=True):
                q.mul_(0.9).add_(p, alpha=0.1)
            for p, q in zip(m.second.parameters(), m.other.parameters(), strict=True):
                q.data = q.data * 0.9 + p.data * 0.1
            m.second.bias.clamp_(-0.1, 0.1)
            target = m.other(m.teacher(x).relu())
        m.second.weight.data.div_(m.second.weight.data.norm(dim=1, keepdim=True))
        h = m.first(x).relu()
        h.data.clamp_(max=0.5)
        return (m.second(h) - target).square().mean(-1)

    parts = {name: linear() for name in ("first", "second", "teacher", "other")}
    for name in ("teacher", "other"):
        parts[name].requires_grad_(False)
    return Calls(forward, **parts), (torch.randn(4, 8),), {}


@case
def booleans_as_numbers() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        keep = (x > 0) & True
        keep |= torch.full((4, 8), False)
        keep = keep.scatter(1, torch.zeros(4, 1, dtype=torch.long), True)
        keep &= True
        signs = x.view(torch.int32) >> 31
        return m.first(x).masked_fill(keep == False, 0.0) * (2 + signs)  # noqa: E712

    return Calls(forward, first=linear()), (torch.randn(4, 8),), {}


@case
def weights_from_another_net() -> Case:
    """``functional_call`` with computed weights, alone and for an ensemble; parametrizations cached."""

    def forward(m: Any, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        weights = m.maker(c)
        parts = {"weight": weights[:64].view(8, 8), "bias": weights[64:]}
        h = torch.func.functional_call(m.target, parts, (x,)).relu()
        three = {k: torch.stack([v, 2 * v, v.tanh()]) for k, v in parts.items()}
        several = torch.vmap(lambda p, y: torch.func.functional_call(m.target, p, (y,)), (0, None))(three, h)
        with nn.utils.parametrize.cached():
            return m.symmetric(m.symmetric(several).tanh())

    symmetric = linear()
    nn.utils.parametrize.register_parametrization(symmetric, "weight", Calls(lambda m, w: w.triu() + w.triu(1).mT))
    target = linear().requires_grad_(False)
    return (
        Calls(forward, maker=nn.Linear(5, 72), target=target, symmetric=symmetric),
        (torch.randn(4, 8), torch.randn(5)),
        {},
    )


@case
def attention_by_given_kernels() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = m.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            h = F.scaled_dot_product_attention(q, k, v)
        return F.scaled_dot_product_attention(q, k, h, is_causal=True)

    return Calls(forward, qkv=linear(48)), (torch.randn(2, 7, 8),), {}


@case
def vmapped_dropout() -> Case:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda row: F.dropout(m.first(row), 0.5), randomness="different")(x)

    return Calls(forward, first=linear()), (torch.randn(4, 8),), {}


class Counting(torch.autograd.Function):
    """Writes into a buffer, and into its input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        mean.mul_(0.9).add_(x.mean(0), alpha=0.1)
        x.clamp_(min=0)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * (x > 0), None


@case
def function_that_writes() -> Case:
    model = Calls(lambda m, x: m.second(Counting.apply(m.first(x), m.mean)) - m.mean, first=linear(), second=linear())
    model.register_buffer("mean", torch.zeros(8))
    return model, (torch.randn(4, 8),), {}


@case
def losses_of_columns() -> Case:
    """Losses of columns of one result, whose gradients must be added in eager mode's order."""

    def forward(m: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h, p = m.first(x), (y == 1).float()
        loss = F.cross_entropy(h, y) + F.nll_loss(h.log_softmax(1), y)
        loss = loss + F.binary_cross_entropy_with_logits(h[:, 0], p)
        return loss + F.smooth_l1_loss(h[:, 1], p) + F.huber_loss(h[:, 2], p)

    return Calls(forward, first=linear()), (torch.randn(5, 8), torch.tensor([0, 1, 3, 1, 5])), {}


@case
def detached_branches() -> Case:
    """A teacher that is run with gradients and then detached, and weights rounded to three values."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        target = m.teacher(x).detach()
        w = m.first.weight
        scale = w.abs().mean()
        w = w + ((w / scale).round().clamp(-1, 1) * scale - w).detach()
        return (m.second(F.linear(x, w).tanh()) - target).square()

    teacher = nn.Sequential(*(layer for _ in range(6) for layer in (linear(), nn.Tanh())))
    return Calls(forward, teacher=teacher, first=linear(), second=linear()), (torch.randn(64, 8),), {}
