"""What differs between devices, as rules: settings, values that are as valid, random draws, one device a plan.

There is no GPU here. A stand-in for the CPU's ``Kind``, or the meta device, takes its place, as each test says.
"""

from __future__ import annotations

import ast
import copy
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from models import randn
from programs import ROOT, load
from torch import nn

from rkgb.Btools import make_B
from rkgb.device import KINDS, Cpu, Cuda, one_device
from rkgb.Dtools import probe
from rkgb.errors import UnsupportedError
from rkgb.pipeline import make_all_graphs, make_S
from rkgb.probe.check import _shifted
from rkgb.sample import Call
from rkgb.trace.capture import Recorder
from rkgb.trace.record import record
from rockmate import rotor
from rockmate.demo import compare

META = torch.device("meta")


# ------------------------------------------------------------------------------------------- one place


def words(path: Path) -> Iterator[str]:
    """Names, and texts that are not documentation."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    documents = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documents:
            yield node.value
        elif isinstance(node, (ast.Name, ast.Attribute, ast.alias)):
            yield getattr(node, "id", "") or getattr(node, "attr", "") or getattr(node, "name", "")


def test_one_file_knows_of_cuda() -> None:
    files = [f for folder in ("rkgb", "rockmate", "solvers", "benchmarks") for f in (ROOT / folder).rglob("*.py")]
    naming = {f.relative_to(ROOT).as_posix() for f in files if any("cuda" in word.lower() for word in words(f))}
    assert naming == {"rkgb/device/__init__.py", "rkgb/device/cuda.py"}  # the first lists the kinds


# -------------------------------------------------------------------------------------------- settings


SETTING = """
    import torch
    from torch import nn
    from rockmate import Rockmate
    from rkgb.settings import settings

    x, model = torch.ones(4, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU())
    rk = Rockmate(model, x, "1 MiB", costs="flops")
    backends, planned = torch.backends, {settings()}
    for changed in (
        'backends.cuda.matmul.fp32_precision = "tf32"',  # from here on, reading the old flags raises
        'backends.cudnn.conv.fp32_precision = "ieee"',
        'backends.cudnn.rnn.fp32_precision = "ieee"',
        'backends.mkldnn.matmul.fp32_precision = "bf16"',
        'backends.fp32_precision = "ieee"',
        'backends.cuda.matmul.fp32_precision = "none"',
        'backends.cudnn.allow_tf32 = True',
        'backends.cudnn.allow_tf32 = False',
        'backends.cuda.matmul.allow_tf32 = True',
        'torch.set_float32_matmul_precision("highest")',
        'torch.set_float32_matmul_precision("high")',
        'torch.set_float32_matmul_precision("medium")',
        'backends.cuda.matmul.allow_fp16_accumulation = True',
    ):
        before = settings()
        exec(changed)
        assert settings() != before, changed
        planned.add(settings())
        rk(x).sum().backward()
        assert rk.plans_made == len(planned), changed
"""


def test_settings_of_precision_old_and_new() -> None:
    """Set as they are in the CPU's build, in a process of its own: the old flags cannot be read afterwards."""
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(SETTING)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


# ------------------------------------------------------------------------------- values that are as valid


class Indexed(nn.Module):
    """Notes whether what it was called with would have passed the assertions of kernels on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.valid: list[bool] = []

    def forward(self, x: torch.Tensor, edges: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            rows, columns = edges.unbind()
            self.valid.append(bool((rows < 6).all()) and bool((columns < 3).all()))
            self.valid.append(starts.tolist() == sorted(starts.tolist()))
        return x * self.weight


def test_the_check_calls_the_module_with_valid_indices() -> None:
    edges, starts = torch.tensor([[5, 4, 3, 0], [0, 1, 2, 2]]), torch.tensor([0, 2, 5, 6])
    model = Indexed()
    make_S(model, (randn(6, 4, seed=1), edges, starts))
    assert len(model.valid) > 2, "the module was not called with other values"
    assert all(model.valid)


def test_what_the_check_moves() -> None:
    numbers, edges, row, mask = randn(3, 2, seed=1), torch.arange(8).view(2, 4), torch.arange(5), torch.eye(3).bool()
    moved = _shifted(Call((numbers, edges, row, mask, torch.arange(3)[:, None]), {})).args
    assert torch.equal(moved[0], numbers.roll(1, 0))
    assert torch.equal(moved[1], edges.roll(1, 1))
    assert torch.equal(moved[2], row)
    assert torch.equal(moved[3], mask.roll(1, 0))
    assert torch.equal(moved[4], torch.arange(3)[:, None])


# ------------------------------------------------------------------------------------------------ draws


class Unmoved(Cpu):
    """A generator whose state shows nothing. With it as the CPU's, that of the meta device stands for a GPU's."""

    def random_state(self, device: torch.device) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.uint8)

    def set_random_state(self, device: torch.device, state: torch.Tensor) -> None:
        pass


@pytest.fixture
def drawn_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch draws from is the generator of the meta device."""
    kinds = {"cpu": Unmoved(), "meta": Cpu()}
    monkeypatch.setattr("rkgb.randomness.kind_of", lambda device: kinds[device.type])


def test_a_draw_that_nothing_uses_stays_in_the_trace(drawn_elsewhere: None) -> None:
    def dead(x: torch.Tensor) -> list[torch.Tensor]:
        torch.rand(3)
        return [x * 2]

    x = randn(3, seed=1)
    seen = Recorder([x, torch.empty(1, device=META)])
    record(dead, [x], seen, nn.Module())
    assert len(seen.draws) == 1


class Made(nn.Module):
    """What it draws reads no tensor."""

    def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(3)


def test_random_tensors_made_of_none_are_random(request: pytest.FixtureRequest) -> None:
    x = randn(3, seed=1)
    b = make_B(Made(), (x, x))
    request.getfixturevalue("drawn_elsewhere")
    d = probe(b, Made(), [x, torch.empty(1, device=META)]).graph
    assert [node.name for node, facts in zip(d.nodes, d.facts, strict=True) if facts.random] == ["rand"]


def test_the_benchmark_of_the_zoo_on_a_device(drawn_elsewhere: None) -> None:
    """Gradients on the outputs' device, and its generator's state compared; the meta device stands for a GPU."""
    zoo = load("benchmarks/zoo.py")
    model, (x,), _ = zoo.moved((nn.Linear(3, 3), (randn(2, 3, seed=1),), {}), "meta")
    found = zoo.step(model, model, (x,), {}, {})
    assert found["gradients"][0].device == META
    assert any(torch.equal(state, torch.get_rng_state()) for state in found["random"])


def test_the_demo_compares_the_generator_of_the_device(drawn_elsewhere: None) -> None:
    model = nn.Embedding(8, 8, device="meta")
    batch = torch.zeros(2, 4, dtype=torch.long, device=META)
    found = compare._trained(model, [(batch, batch)], keep_grads=False)
    cpu, device = (t for t in found if t.dtype == torch.uint8)
    assert torch.equal(cpu, Unmoved().random_state(META))
    assert torch.equal(device, torch.get_rng_state())


class Recurrent(Cpu):
    """A device with cuDNN's recurrent layers: their generator cannot be read or put back."""

    hides_draws = Cuda.hides_draws


class RecurrentElsewhere(Unmoved):
    """As that, and the CPU's generator, which their stand-in draws from, is not put back either."""

    hides_draws = Cuda.hides_draws


class Lstm(nn.Module):
    """Two layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.lstm = nn.Linear(8, 8), nn.LSTM(8, 8, 2, dropout=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.lstm(self.inner(x))[0]
        return y


def test_recurrent_layers_with_dropout_never_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def reruns() -> dict[str, bool]:
        graphs = make_all_graphs(Lstm(), randn(4, 2, 8, seed=1), costs="flops")
        return {node.name: k.rerun for node, k in zip(graphs.S.nodes, graphs.K.nodes, strict=True)}

    assert reruns()["lstm"]
    monkeypatch.setitem(KINDS, "cpu", Recurrent())
    assert not reruns()["lstm"]
    assert reruns()["linear"]
    with pytest.raises(UnsupportedError, match=r"layer 0 \(0\) has LSTM layers with dropout between them.*cuDNN"):
        rotor.Checkpointable(nn.Sequential(Lstm()), randn(4, 2, 8, seed=1))


def test_recurrent_layers_with_dropout_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of the module differ, and nothing can be done about it."""
    monkeypatch.setitem(KINDS, "cpu", RecurrentElsewhere())
    (note,) = make_all_graphs(Lstm(), randn(4, 2, 8, seed=1), costs="flops").D.notes
    assert note.startswith("lstm at test_device.py:")
    assert "draws from a state of its own" in note


def test_which_recurrent_layers_draw_unseen() -> None:
    drawing = {"train": True, "dropout": 0.5, "num_layers": 2}
    assert Cuda().hides_draws("gru", lambda: drawing)
    assert not Cuda().hides_draws("dropout", lambda: drawing)
    assert not Cpu().hides_draws("gru", lambda: drawing)
    for quiet in ({"train": False}, {"dropout": 0.0}, {"num_layers": 1}):
        assert not Cuda().hides_draws("gru", partial(dict, drawing, **quiet))
    with torch.backends.cudnn.flags(enabled=False):
        assert not Cuda().hides_draws("gru", lambda: drawing)


# ------------------------------------------------------------------------------------------- one device


def test_two_devices_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, cpu = torch.device("cuda:0"), torch.device("cuda:1"), torch.device("cpu")
    with pytest.raises(UnsupportedError, match=r"a\.weight is on cuda:0 and b\.weight on cuda:1"):
        one_device([("a.weight", first), ("b.weight", second)])
    with pytest.raises(UnsupportedError, match=r"a is on cuda:0 and b on cpu"):
        one_device([("a", first), ("b", cpu)])
    with pytest.raises(UnsupportedError, match=r"a is on cpu and x on cuda:0"):
        one_device([("a", cpu)], [("x", first)])
    with pytest.raises(UnsupportedError, match=r"a is on mps:0, and plans can be made for cpu and cuda"):
        one_device([("a", torch.device("mps:0"))])
    assert one_device([("a", first), ("b", first)], [("scalar", cpu), ("shape", META)]) == first
    assert one_device([], [("x", cpu), ("y", second)]) == second


def test_the_devices_of_a_model_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """No kind is known of its name: the CPU stands for a device that is not."""
    model = copy.deepcopy(nn.Linear(2, 2))
    monkeypatch.setattr("rkgb.device.KINDS", {"cuda": Cuda()})
    with pytest.raises(UnsupportedError, match="weight is on cpu, and plans can be made for cuda"):
        make_S(model, randn(2, 2, seed=1))
