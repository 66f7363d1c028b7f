"""Callbacks of training libraries: results without them, and the figures that they log."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import assert_same
from libraries import QUIET, accelerate, lightning, transformers
from models import randn
from torch import nn
from torch.nn import functional as F

import rockmate
from rkgb.device import Cpu
from rockmate import BudgetError, InputError, measure_peak
from rockmate.calls.front import TIMED
from rockmate.integrations import Meter
from rockmate.integrations.lightning import RockmateCallback as ForLightning
from rockmate.integrations.transformers import RockmateCallback as ForTrainer

STEPS = 9
PLAIN = 2
PREDICTED = {"rockmate_predicted_peak", "rockmate_predicted_overhead"}
ALL = {*PREDICTED, "rockmate_measured_peak", "rockmate_measured_overhead"}

pytestmark = pytest.mark.filterwarnings(*QUIET)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens."""

    def __init__(self) -> None:
        self.rows = torch.randint(64, (96, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[k], "labels": self.rows[k]}


class Seen(transformers.TrainerCallback):  # type: ignore[misc]
    """Stands for a logger: W&B's and TensorBoard's callbacks come before those that people give."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, *, logs: Any = None, **others: Any) -> None:
        """As a logger copies it."""
        self.logs.append(dict(logs))


def trainer(folder: Path, callbacks: list[Any], **options: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0
    )
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        max_steps=STEPS,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **options,
    )
    model = transformers.GPT2LMHeadModel(config)
    return transformers.Trainer(model, arguments, train_dataset=Texts(), callbacks=callbacks)


def losses(of: Any) -> list[float]:
    return [entry["loss"] for entry in of.state.log_history if "loss" in entry]


@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}, {"bf16": True}], ids=str)
def test_a_callback_of_transformers_trainer(options: dict[str, Any], tmp_path: Path) -> None:
    plain = trainer(tmp_path, [], **options)
    plain.train()
    logger, callback = Seen(), ForTrainer("60%", plain_steps=PLAIN, costs="flops")
    ours = trainer(tmp_path, [logger, callback], **options)
    ours.train()
    assert len(losses(plain)) == STEPS
    assert losses(ours) == losses(plain)
    assert_same(ours.model.parameters(), plain.model.parameters())
    plan = callback.meter.handle.plan
    assert plan.recomputed > 0
    last = [logs for logs in logger.logs if "loss" in logs][-1]
    assert last == {k: v for k, v in ours.state.log_history[STEPS - 1].items() if k != "step"}
    assert set(last) >= ALL
    assert last["rockmate_predicted_peak"] == plan.predicted_peak
    assert last["rockmate_predicted_overhead"] == plan.predicted_overhead
    assert 0 < last["rockmate_measured_peak"] <= plan.predicted_peak + Cpu.scalars
    assert not any(name.startswith("rockmate") for name in logger.logs[0])  # no plan yet
    # Another run of the same Trainer goes on under the plan.
    handle = callback.meter.handle
    ours.train()
    assert callback.meter.handle is handle is rockmate.attached(ours.model)


def test_a_callback_that_is_not_called_by_a_trainer() -> None:
    with pytest.raises(InputError, match="RockmateCallback is for transformers' Trainer"):
        ForTrainer("60%").on_train_begin(None, None, None, model=nn.Linear(2, 2))


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """Layers, and their loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers, nn.Linear(32, 8))
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch), torch.zeros(len(batch), dtype=torch.int64))
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def fit(module: Any, folder: Path, callbacks: list[Any]) -> Any:
    torch.manual_seed(1)
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=lightning.pytorch.loggers.CSVLogger(folder),
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(module, torch.utils.data.DataLoader(list(randn(64 * STEPS, 32, seed=2)), batch_size=64))
    return trainer


def test_a_callback_of_lightning(tmp_path: Path) -> None:
    plain, ours = Classifier(), Classifier()
    fit(plain, tmp_path, [])
    callback = ForLightning("60%", part="net", plain_steps=PLAIN, costs="flops")
    logger = fit(ours, tmp_path, [callback]).logger
    assert len(plain.losses) == STEPS
    assert_same([*ours.losses, *ours.parameters()], [*plain.losses, *plain.parameters()])
    plan = callback.meter.handle.plan
    assert plan.recomputed > 0
    figures = callback.meter.figures()
    assert set(figures) == ALL
    assert 0 < figures["rockmate_measured_peak"] <= plan.predicted_peak + Cpu.scalars + 8 * 64  # the targets
    *_, last = csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text(encoding="utf-8").splitlines())
    for name, value in figures.items():
        assert float(last[name]) == torch.tensor(float(value)).item()  # Lightning logs tensors of float32


class Wide(Classifier):
    """Activations are most of what a step takes, so that its first step is measured, and no plan is there then."""

    def training_step(self, batch: Any, at: int) -> torch.Tensor:
        return super().training_step(batch.repeat(32, 1), at)


def test_a_callback_of_lightning_whose_first_step_is_measured(tmp_path: Path) -> None:
    plain, ours = Wide(), Wide()
    fit(plain, tmp_path, [])
    callback = ForLightning("3 MiB", part="net", costs="flops")
    fit(ours, tmp_path, [callback])
    assert_same([*ours.losses, *ours.parameters()], [*plain.losses, *plain.parameters()])
    assert callback.meter.handle.plan.recomputed > 0
    beside = 2048 * (32 * 4 + 8)  # the batch and the targets
    assert 0 < callback.meter.figures()["rockmate_measured_peak"] <= 3 * 2**20 + beside


@pytest.mark.filterwarnings("ignore:.* without a plan, and no budget holds there:rockmate.BudgetWarning")
def test_a_part_that_training_step_does_not_call(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"did not call Classifier itself.*part="):
        fit(Classifier(), tmp_path, [ForLightning("60%", costs="flops")])
    with pytest.raises(InputError, match="part='body' is no part of Classifier"):
        fit(Classifier(), tmp_path, [ForLightning("60%", part="body", costs="flops")])


def test_a_meter_in_a_loop_of_accelerate() -> None:
    results = []
    for budget in (None, "60%"):
        accelerate.state.AcceleratorState._reset_state(True)
        tool = accelerate.Accelerator(cpu=True)
        model = Classifier().net
        meter = Meter(budget, costs="flops") if budget else None
        if meter:
            meter.attach(model)
        call, optimizer = tool.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        torch.manual_seed(1)
        found = []
        for k in range(5):
            x = randn(64, 32, seed=k)
            if meter:
                meter.begin()
            loss = call(x).square().mean()
            tool.backward(loss)
            if meter:
                meter.end()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        results.append([*found, *model.parameters()])
    accelerate.state.AcceleratorState._reset_state(True)
    assert_same(results[1], results[0])
    assert meter and set(meter.figures()) == PREDICTED | {"rockmate_measured_peak"}
    x = randn(64, 32, seed=9)
    model.zero_grad()
    again = measure_peak(lambda: model(x).square().mean().backward())
    assert abs(meter.figures()["rockmate_measured_peak"] - again) <= Cpu.scalars


def test_an_overhead_is_measured_without_plain_steps() -> None:
    model = Classifier().net
    meter = Meter("60%", costs="flops")
    meter.attach(model)
    for k in range(TIMED + 8):
        meter.begin()
        model(randn(64, 32, seed=k)).square().mean().backward()
        meter.end()
        model.zero_grad()
    assert set(meter.figures()) == ALL


def test_a_measurement_gives_way_to_a_new_plan() -> None:
    """A batch of another size comes in the step that is measured: it is planned, and nothing wrong is said."""
    model = Classifier().net
    meter = Meter("60%", costs="flops")
    meter.attach(model)
    for size in (64, 64, 64, 48, 48, 48, 48, 64):
        x = randn(size, 32, seed=size)
        meter.begin()
        model(x).square().mean().backward()
        meter.end()
        model.zero_grad()
        found = meter.figures()
        assert found["rockmate_predicted_peak"] == meter.handle.plan.predicted_peak  # type: ignore[union-attr]
        assert found.get("rockmate_measured_peak", 0) <= found["rockmate_predicted_peak"] + Cpu.scalars


def test_a_step_that_fails_is_forgotten() -> None:
    model = Classifier().net
    meter = Meter("60%", costs="flops")
    meter.attach(model)
    for k in range(6):
        x = randn(64, 32, seed=k)
        meter.begin()
        loss = model(x).square().mean()
        if k == 3:
            del loss  # its backward is never run
            continue
        loss.backward()
        meter.end()
        model.zero_grad()
    assert 0 < meter.figures()["rockmate_measured_peak"] <= meter.figures()["rockmate_predicted_peak"] + Cpu.scalars


def test_misuse_of_a_meter() -> None:
    with pytest.raises(BudgetError, match="no amount of memory"):
        Meter("much")
    with pytest.raises(InputError, match="plain_steps=-1 is no number of steps"):
        Meter("60%", plain_steps=-1)
    with pytest.raises(InputError, match=r"call meter\.attach"):
        Meter("60%").begin()


@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_a_missing_library_is_named(library: str) -> None:
    code = (
        "import sys\nclass Without:\n  def find_spec(self, name, *rest):\n"
        f"    if name == {library!r}: raise ModuleNotFoundError(name, name=name)\n"
        f"sys.meta_path.insert(0, Without())\nimport rockmate.integrations.{library}"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=300)
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: rockmate.integrations.{library} is for {library}, which is not installed: pip install {library}"
    )
