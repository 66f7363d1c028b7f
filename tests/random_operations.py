"""The operations that random modules are made of: texts of Python with holes, by kind.

Holes are filled when a module is drawn (``random_modules.Holes``): ``{new}`` is the name of what the operation makes,
``{x}`` a tensor of floats that is there, ``{y}`` one of the same shape and dtype, ``{z}`` any one, ``{mask}`` one of
booleans, ``{ids}`` one of integers. ``{d}`` and ``{e}`` are dimensions of ``{x}``, ``{half}`` half of the size at
``{d}``, ``{last}`` and ``{second}`` the sizes at those places, ``{width}`` a size of the drawer's choice, ``{some}`` an
index expression for ``{x}``, ``{c}`` a number, ``{k}`` a small whole one, ``{order}`` all dimensions in another
order, ``{dtype}`` a dtype. ``{layer}`` is what the operation adds to the module, made by the text ``layer``.

What does not run for the values that fill the holes is not taken, so texts need not fit every value.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Operation:
    """``text``: statements of forward. ``layer``: what ``self.{layer}`` is, and ``setup`` statements of ``__init__``.
    ``breaks``: TorchDynamo ends a graph there.
    """

    kind: str
    text: str
    layer: str = ""
    setup: str = ""
    breaks: bool = False


def _all(kind: str, *texts: str, layer: str = "", setup: str = "", breaks: bool = False) -> list[Operation]:
    return [Operation(kind, text, layer, setup, breaks) for text in texts]


def _made(kind: str, *expressions: str, breaks: bool = False) -> list[Operation]:
    return _all(kind, *("{new} = " + expression for expression in expressions), breaks=breaks)


def _layers(kind: str, *layers: str, call: str = "self.{layer}({x})") -> list[Operation]:
    return [Operation(kind, "{new} = " + call, layer) for layer in layers]


LAYERS = [
    *_layers(
        "linear",
        "nn.Linear({last}, {width})",
        "nn.Linear({last}, {last})",
        "nn.Linear({last}, {width}, bias=False)",
        "nn.Sequential(nn.Linear({last}, {width}), nn.GELU(), nn.Linear({width}, {last}))",
    ),
    *_all(
        "linear in a loop",
        "{new} = {x}\nfor layer in self.{layer}:\n    {new} = F.gelu(layer({new}))",
        "{new} = {x}\nfor layer in self.{layer}:\n    {new} = {new} + torch.tanh(layer({new}))",
        layer="nn.ModuleList(nn.Linear({last}, {last}) for _ in range(3))",
    ),
    *_layers(
        "convolution",
        "nn.Conv1d({second}, {width}, 3, padding=1)",
        "nn.Conv1d({second}, {second}, 3, padding=1, groups={second})",
        "nn.Conv2d({second}, {width}, 3, padding=1)",
        "nn.Conv2d({second}, {width}, 2, stride=2)",
        "nn.Conv2d({second}, {second}, 3, padding=1, groups={second}, bias=False)",
        "nn.ConvTranspose2d({second}, {width}, 2, stride=2)",
    ),
    *_layers(
        "norm",
        "nn.LayerNorm({last})",
        "nn.GroupNorm(2, {second})",
        "nn.InstanceNorm1d({second}, affine=True)",
        "nn.RMSNorm({last})",
    ),
    *_layers("batch norm", "nn.BatchNorm1d({second})", "nn.BatchNorm2d({second})"),
    *_layers("batch norm", "nn.BatchNorm1d({second}, momentum=None)"),
    *_layers("attention", "nn.MultiheadAttention({last}, 2, batch_first=True)", call="self.{layer}({x}, {x}, {x})[0]"),
    *_layers("attention", "nn.TransformerEncoderLayer({last}, 2, 16, dropout=0.1, batch_first=True)"),
    *_all(
        "attention",
        "{new}, weights = self.{layer}({x}, {x}, {x})\n{new} = {new} + weights @ {x}",
        layer="nn.MultiheadAttention({last}, 2, batch_first=True)",
    ),
    *_layers("recurrent", "nn.GRU({last}, {width}, batch_first=True)", call="self.{layer}({x})[0]"),
    *_layers("recurrent", "nn.LSTM({last}, {width}, bidirectional=True)", call="self.{layer}({x})[0]"),
    *_layers("recurrent", "nn.LSTM({last}, {width}, 2, batch_first=True)", call="self.{layer}({x})[1][1]"),
    *_layers(
        "parametrized",
        "nn.utils.parametrizations.weight_norm(nn.Linear({last}, {width}))",
        "nn.utils.parametrizations.spectral_norm(nn.Linear({last}, {width}))",
        "nn.utils.parametrizations.orthogonal(nn.Linear({last}, {last}), orthogonal_map='cayley')",
    ),
    *_layers("embedding", "nn.Embedding(12, {width})", call="self.{layer}({ids})"),
    *_layers("dropout layer", "nn.Dropout(0.3)", "nn.Dropout(0.2, inplace=True)"),
]

PARAMETERS = [
    *_all(
        "tied weights",
        "{new} = F.linear(torch.tanh(self.{layer}({x})), self.{layer}.weight.t())",
        "{new} = self.{layer}(F.gelu(self.{layer}({x})))",
        layer="nn.Linear({last}, {last})",
    ),
    *_all(
        "frozen parameters",
        "{new} = F.gelu(self.{layer}({x}))",
        layer="nn.Linear({last}, {width}).requires_grad_(False)",
    ),
    *_all(
        "frozen parameters",
        "{new} = F.gelu(self.{layer}({x}))",
        layer="nn.Linear({last}, {width})",
        setup="self.{layer}.weight.requires_grad_(False)",
    ),
    *_all("parameter alone", "{new} = {x} * self.{layer}", layer="nn.Parameter(torch.linspace(0.5, 1.5, {last}))"),
]

ELEMENTWISE = _made(
    "elementwise",
    "F.gelu({x})",
    "torch.relu({x})",
    "torch.tanh({x})",
    "torch.sigmoid({x})",
    "F.silu({x})",
    "F.softplus({x})",
    "{x}.sin()",
    "{x}.square()",
    "{x}.abs().add(0.1).sqrt()",
    "{x} * {c}",
    "{x} + {c}",
    "{x} + {y}",
    "{x} * {y}",
    "{x} - {y}.detach()",
    "{x} / (1 + {y}.square())",
    "torch.maximum({x}, {y})",
    "torch.addcmul({x}, {x}, {y}, value={c})",
    "torch.lerp({x}, {y}, 0.25)",
    "{x}.clamp(min=-1, max=1)",
    "{x} * {z}",
    "{x} + {z}",
)

REDUCTIONS = [
    *_made(
        "softmax",
        "{x}.softmax({d})",
        "F.log_softmax({x}, {d})",
        "{x}.softmax(-1) @ {x}.transpose(-1, -2).softmax(-1).transpose(-1, -2)",
        "torch.logsumexp({x}, {d}, keepdim=True)",
    ),
    *_made(
        "reduction",
        "{x}.mean({d})",
        "{x}.sum({d}, keepdim=True)",
        "{x}.mean()",
        "{x}.var({d}, unbiased=False)",
        "{x}.amax({d})",
        "{x}.max({d}).values",
        "{x}.norm(dim={d})",
        "{x}.cumsum({d})",
        "{x}.sort({d}).values",
        "{x}.topk(2, {d}).values",
        "{x}.cummax({d}).values",
        "(1 + {x}.sigmoid()).cumprod({d})",
    ),
    *_all(
        "several results",
        "found = {x}.sort({d})\n{new} = found.values * found.indices",
        "found = {x}.topk(2, {d})\n{new} = found.values + found.indices",
        "std, {new} = torch.std_mean({x}, {d}, keepdim=True)\n{new} = ({x} - {new}) / (1 + std)",
        "low, {new} = torch.aminmax({x}, dim={d}, keepdim=True)\n{new} = ({x} - low) / (1 + {new} - low)",
    ),
    *_made(
        "product",
        "{x} @ {x}.transpose(-1, -2)",
        "torch.einsum('...i,...j->...ij', {x}, {x})",
        "torch.einsum('...ij,...kj->...ik', {x}, {y})",
        "torch.baddbmm({x}, {x}, torch.eye({last}).expand({x}.shape[0], -1, -1), beta={c})",
    ),
    *_made(
        "complex",
        "torch.complex({x}, {y}).abs()",
        "(torch.complex({x}, {y}) * torch.complex({y}, {x})).real",
        "torch.fft.rfft({x}).abs()",
        "torch.fft.ifft(torch.fft.fft({x}, dim={d}), dim={d}).real",
    ),
    *_made(
        "pooling and padding",
        "F.avg_pool2d({x}, 2)",
        "F.max_pool2d({x}, 2)",
        "F.adaptive_avg_pool2d({x}, 1)",
        "F.pad({x}, (1, 0))",
        "F.interpolate({x}, scale_factor=2, mode='nearest')",
    ),
    *_made(
        "attention",
        "F.scaled_dot_product_attention({x}, {x}, {x})",
        "F.scaled_dot_product_attention({x}, {y}, {x}, is_causal=True)",
        "F.scaled_dot_product_attention({x}, {x}, {y}, dropout_p=0.2)",
        "F.scaled_dot_product_attention({x}, {x}, {y}, torch.ones(2 * [{x}.shape[-2]]).tril().bool())",
        "F.scaled_dot_product_attention({x}, {x}, {y}, {x} @ {x}.mT)",
    ),
]

VIEWS = [
    *_made("slice", "{x}[{some}]", "{x}.narrow({d}, 0, {half})", "{x}.select({d}, 0)"),
    *_made(
        "permute",
        "{x}.transpose({d}, {e})",
        "{x}.transpose({d}, {e}).contiguous()",
        "{x}.permute({order})",
        "{x}.movedim({d}, {e})",
        "{x}.mT",
    ),
    *_made(
        "reshape",
        "{x}.flatten({k})",
        "{x}.reshape({x}.shape[0], -1)",
        "{x}.view({x}.shape[0], -1)",
        "{x}.unflatten({d}, (2, -1))",
        "{x}.unsqueeze({d})",
        "{x}.squeeze()",
        "{x}.view_as({y})",
    ),
    *_made(
        "unfold",
        "{x}.unfold({d}, 2, 1)",
        "{x}.unfold({d}, 2, 2)",
        "F.unfold({x}, 2, stride=2)",
        "F.fold(F.unfold({x}, 2), {x}.shape[-2:], 2)",
    ),
    *_made(
        "expand",
        "{x}.unsqueeze(0).expand(2, *{x}.shape)",
        "{x}.mean({d}, keepdim=True).expand_as({x})",
        "{x}.mean({d}, keepdim=True).expand_as({x}).clone().mul_({x})",
    ),
    *_made("diagonal", "{x}.diagonal(0, -2, -1)", "torch.diag_embed({x})", "{x}.as_strided((4, 2), (2, 1))"),
    *_all(
        "several of one",
        "{new}, other = {x}.chunk(2, {d})\n{new} = {new} * other.sigmoid()",
        "{new}, other = {x}.split({half}, {d})",
        "{new} = {x}.unbind({d})[0]",
        "parts = {x}.unbind({d})\n{new} = torch.stack(parts[::-1], {d})",
        "q, k, {new} = {x}, {x}.roll(1, {d}), {x}.flip({d})\n{new} = {new} * q + k",
        "parts = {x}.tensor_split(2, {d})\n{new} = torch.cat((parts[1], parts[0]), {d})",
        "{new} = torch.cat([(1 + k) * part.sin() for k, part in enumerate({x}.chunk(3, {d}))], {d})",
    ),
    *_made("rolled", "{x}.roll(1, {d})", "{x}.flip({d})", "{x}.repeat_interleave(2, {d})", "{x}.tril()"),
]

JOINED = _made(
    "joined",
    "torch.cat(({x}, {y}), {d})",
    "torch.stack(({x}, {y}), {d})",
    "torch.where({x} > {c}, {x}, {y})",
    "torch.where({mask}, {x}, {c})",
    "torch.where({x} > {c}, {c}, {x})",
    "torch.cat(({x}, torch.zeros_like({x})), {d})",
)

INDEXED = [
    *_made(
        "indexed",
        "{x}.index_select({d}, torch.tensor([0, 1, 0]))",
        "{x}[torch.tensor([1, 0, 1])]",
        "{x}.gather({d}, {x}.argsort({d}))",
        "{x}.masked_fill({mask}, 0)",
        "{x}.scatter({d}, {x}.argsort({d}), {y})",
        "{x}.index_add(0, torch.tensor([0, 0]), {x}[:2])",
        "{x}.index_put((torch.tensor([0, 0]),), {x}[:2], accumulate=True)",
        "{x}.scatter_add({d}, {x}.argsort({d}), {y})",
        "{x}.scatter_reduce({d}, {x}.argsort({d}), {y}, 'amax')",
    ),
    *_made("integers", "({x} * 4).long().clamp(0, 11)", "{x}.argmax({d})", "({ids} + 1) % 12"),
    *_made("mask", "{x} > {c}", "{x} < {y}", "{x}.isfinite()"),
]

IN_PLACE = [
    *_all(
        "in place",
        "{x}.mul_({c})",
        "{x}.add_({y})",
        "{x}.add_({y}.detach(), alpha={c})",
        "{x}.relu_()",
        "{x}.tanh_()",
        "F.relu({x}, inplace=True)",
        "{x}.clamp_(min=0)",
        "{x} += {z}",
        "{x} *= {c}",
        "{x}.copy_({y})",
        "{x}.sub_({x}.mean())",
        "{x}.zero_()",
        "{x}.detach().mul_({c})",
    ),
    *_all(
        "slice written",
        "{x}[{some}] = {c}",
        "{x}[{some}] *= {c}",
        "{x}[{some}] = {x}[{some}] * {c}",
        "{x}.select({d}, 0).zero_()",
        "{x}.select({d}, 0).copy_({x}.mean({d}))",
        "{x}.narrow({d}, 0, {half}).add_({c})",
        "{x}.transpose({d}, {e}).mul_({c})",
        "{new} = {x}.clone()\n{new}[{some}] = {new}[{some}].sigmoid()",
        "{new} = torch.zeros_like({x})\n{new}[{some}] = {x}[{some}]",
        "{new} = {x}.new_zeros({x}.shape)\n{new}.narrow({d}, 0, {half}).copy_({x}.narrow({d}, 0, {half}))",
    ),
    *_all(
        "written by index",
        "{x}.index_put_((torch.tensor([0, 1]),), torch.tensor({c}))",
        "{x}.index_put_((torch.tensor([0, 0]),), {x}[:2].detach(), accumulate=True)",
        "{x}[torch.tensor([1, 0])] = {c}",
        "{x}.masked_fill_({mask}, {c})",
        "{x}[{mask}] = {c}",
        "{x}.scatter_({d}, {x}.argsort({d}), {c})",
        "{x}.index_fill_({d}, torch.tensor([0]), {c})",
    ),
]

DTYPES = [
    *_made(
        "cast",
        "{x}.to({dtype})",
        "{x}.float()",
        "{x}.double()",
        "{x}.bfloat16().float()",
        "({x} > {c}).float()",
        "({x} > {c}).to({x}.dtype) * {x}",
        "{ids}.float() * 0.1",
        "{x}.type_as({z})",
    ),
]

DRAWS = [
    *_made(
        "draw",
        "F.dropout({x}, 0.4, self.training)",
        "F.dropout({x}, 0.25)",
        "F.alpha_dropout({x}, 0.2, True)",
        "{x} * torch.rand_like({x})",
        "{x} + 0.1 * torch.randn({x}.shape)",
        "{x} * torch.bernoulli(torch.full_like({x}, 0.7))",
        "{x} * torch.empty_like({x}).bernoulli_(0.6)",
        "{x}[torch.randperm({x}.shape[0])]",
        "F.rrelu({x}, training=True)",
    ),
]

BUFFERS = [
    *_all(
        "buffer updated",
        "self.{layer}.add_({x}.detach().mean())\n{new} = {x} + self.{layer}",
        "self.{layer}.mul_(0.9).add_({x}.detach().mean(), alpha=0.1)\n{new} = {x} * self.{layer}.sigmoid()",
        "{new} = {x} - self.{layer}\nwith torch.no_grad():\n    self.{layer}.copy_({x}.flatten(0, -2).mean(0))",
        "with torch.no_grad():\n    self.{layer} += 0.1\n{new} = {x} * self.{layer}",
        "{new} = {x} * self.{layer}.clone()\nself.{layer}.data.mul_(0.9)",
        "self.{layer}[0] = {x}.detach().mean()\n{new} = {x} * self.{layer}",
        setup="self.register_buffer('{layer}', torch.zeros({last}))",
    ),
    *_all(
        "buffer replaced",
        "self.{layer} = 0.9 * self.{layer} + 0.1 * {x}.detach().mean()\n{new} = {x} + self.{layer}",
        "{new} = {x} * self.{layer}\nself.{layer} = {x}.detach().flatten(0, -2).mean(0)",
        setup="self.register_buffer('{layer}', torch.ones({last}))",
    ),
]

GIVEN = [
    operation
    for setup in (
        "self.register_buffer('{layer}', torch.linspace(0.5, 1.5, {last}))",
        "self.{layer} = nn.Parameter(torch.linspace(0.5, 1.5, {last}))",
    )
    for operation in _all(
        "memory given",
        "{new} = {x} * self.{layer}\nself.{layer}.data = 0.9 * self.{layer}",
        "self.{layer}.data = self.{layer}.data + 0.1\n{new} = {x} * self.{layer}",
        "old = self.{layer}.data\nself.{layer}.data = old.sign()\n{new} = {x} + self.{layer}\nself.{layer}.data = old",
        setup=setup,
        breaks=True,
    )
]

DETACHED = [
    *_made("detached", "{x}.detach()", "{x} * {y}.detach().sigmoid()", "{x} - {x}.detach() + {y}"),
    *_all(
        "without gradient",
        "with torch.no_grad():\n    {new} = {x}.softmax(-1)\n{new} = {new} * {x}",
        "with torch.no_grad():\n    {new} = F.gelu({x}) * {c}",
    ),
]

PYTHON = [
    *_all(
        "attribute",
        "self.seen = {x}.detach()\n{new} = {x} * {c}",
        "self.seen = {x}.detach().clone()\n{new} = {x} + self.seen",
        "self.shape = tuple({x}.shape)\n{new} = {x}.reshape(self.shape)",
        "self.rate = 0.5 * self.rate + 0.25\n{new} = {x} * 0.5",
    ),
    *_all(
        "counter",
        "self.count += 1\n{new} = {x} * {c}",
        "self.count += 1\n{new} = {x}.clamp(max=1 + self.count)",
        "{new} = {x} / (1 + self.count)\nself.count += 1",
        "{new} = {x}.sin() if self.count % 2 else {x}.cos()\nself.count += 1",
    ),
]

BREAKS = [
    *_all(
        "break",
        "print(end='')\n{new} = F.gelu({x})",
        "{new} = {x} * {x}.mean().item()",
        "{new} = {x} * 2 if {x}.mean() > {c} else {x}.sin()",
        "{new} = {x} + torch.from_numpy(np.sort({x}.detach().numpy()))",
        "self.log.append(float({x}.sum()))\n{new} = {x} * {c}",
        "torch._dynamo.graph_break()\n{new} = {x}.sigmoid()",
        breaks=True,
    ),
    *_all(
        "hook",
        "{new} = {x} * {c}\nif {new}.requires_grad:\n    {new}.register_hook(lambda g: g * 0.5)",
        breaks=True,
    ),
    *_all(
        "hook",
        "{new} = self.{layer}({x}.tanh())",
        layer="nn.Linear({last}, {last})",
        setup="self.{layer}.register_forward_hook(lambda _, given, found: found * given[0])",
    ),
    *_all(
        "hook",
        "{new} = self.{layer}({x})",
        layer="nn.Sequential(nn.Linear({last}, {last}), nn.Tanh())",
        setup="self.{layer}[1].register_full_backward_hook(lambda _, made, got: (0.5 * made[0],))",
        breaks=True,
    ),
    *_all(
        "gradient inside",
        "with torch.enable_grad():\n    {new} = {x}.detach().requires_grad_()\n"
        "    {new} = torch.autograd.grad(({new}.sin() * {new}).sum(), {new})[0]\n{new} = {new} * {x}",
        breaks=True,
    ),
    *_all(
        "own generator",
        "{new} = {x} * torch.rand({x}.shape, generator=self.generator)",
        "{new} = {x} + torch.randn({last}, generator=self.generator)",
        breaks=True,
    ),
]

GROUPS = {
    "layers": (LAYERS, 4),
    "parameters": (PARAMETERS, 2),
    "elementwise": (ELEMENTWISE, 4),
    "reductions": (REDUCTIONS, 2),
    "views": (VIEWS, 3),
    "joined": (JOINED, 2),
    "indexed": (INDEXED, 1),
    "in place": (IN_PLACE, 3),
    "dtypes": (DTYPES, 1),
    "draws": (DRAWS, 2),
    "buffers": (BUFFERS, 1),
    "given": (GIVEN, 0.7),
    "detached": (DETACHED, 2),
    "python": (PYTHON, 1),
    "breaks": (BREAKS, 0.7),
}
"""What is drawn from: a group first, as often as its number says, then a kind of it, then an operation of that."""

SCOPES = {
    "no_grad": "with torch.no_grad():",
    "autocast": "with torch.autocast('cpu', torch.bfloat16):",
    "loop": "for _ in range(2):",
    "training": "if self.training:",
    "every other step": "self.count += 1\nif self.count % 2:",
}
"""What an operation may be within: lines that its text is indented under."""
