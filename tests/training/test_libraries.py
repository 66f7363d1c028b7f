"""Training with the libraries that people use, under a budget that forces recomputation, against eager mode."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import assert_in_budget, assert_same, assert_trains_as_eager, snapshot, under_budget
from libraries import ASKED, LORA, QUIET, lightning, llama, peft, transformers
from models import randn, tokens
from sections import Sections
from torch import nn
from torch.nn import functional as F

from rkgb.device import Cpu
from rockmate import Rockmate, attach, frontier


def batch(seed: int, size: int = 4) -> dict[str, torch.Tensor]:
    ids = tokens(size, 16, high=64, seed=seed)
    mask = torch.ones_like(ids)
    mask[0, 12:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of one batch; with a column that the model does not take."""

    def __init__(self, size: int) -> None:
        self.rows = batch(0, size)

    def __len__(self) -> int:
        return len(self.rows["labels"])

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {**{name: rows[k] for name, rows in self.rows.items()}, "unknown": torch.tensor(k)}


def test_a_transformers_model_by_keywords_with_labels() -> None:
    eager = llama(attn_implementation="eager")
    rk = under_budget(llama(attn_implementation="eager"), **batch(0))

    def train(model: nn.Module, call: nn.Module) -> Any:
        optimizer = torch.optim.AdamW(model.parameters())
        for k in range(2):
            found = call(**batch(k))
            yield type(found)
            yield from (found.loss.detach(), found.logits.detach())
            found["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    assert_trains_as_eager(eager, rk, train)
    assert_loss_in_budget(rk)


def assert_loss_in_budget(rk: Rockmate) -> None:
    given = batch(3)

    def one() -> None:
        rk(**given).loss.backward()

    assert_in_budget(rk, one)


def assert_nothing_added(rk: Rockmate, sections: Sections) -> None:
    """The library's steps are in the budget, and allocate nothing beyond the prediction but the loss's own numbers."""
    assert rk.plan.recomputed > 0
    assert max(sections.peaks) <= rk.budget
    assert 0 < max(sections.peaks) <= rk.plan.predicted_peak + Cpu.scalars


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_transformers_trainer(precision: str, tmp_path: Path) -> None:
    def trainer(model: nn.Module) -> Any:
        options = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            bf16=precision == "bf16",
            save_strategy="no",
            disable_tqdm=True,
            seed=3,
        )
        return transformers.Trainer(model, options, train_dataset=Texts(24))

    eager = llama(attn_implementation="eager")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        rk = under_budget(llama(attn_implementation="eager"), **batch(0))
    histories = []
    for k, model in enumerate((eager, rk)):
        found = trainer(model)
        found.train()
        histories.append([x["loss"] for x in found.state.log_history if "loss" in x])
        found.save_model(str(tmp_path / f"saved{k}"))
    assert len(histories[0]) == 3
    assert histories[1] == histories[0]
    assert_same(rk.parameters(), eager.parameters())
    rk.zero_grad()
    again, sections = trainer(rk), Sections()
    again.training_step = sections.around(again.training_step)
    with sections:
        again.train()
    assert len(sections.peaks) == 6
    assert_nothing_added(rk, sections)


@pytest.mark.filterwarnings(ASKED)
def test_peft_lora() -> None:
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **LORA)
    torch.manual_seed(1)
    eager = peft.get_peft_model(llama(attn_implementation="eager"), config)
    rk = under_budget(copy.deepcopy(eager), **batch(0))

    def train(model: nn.Module, call: nn.Module) -> Any:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for k in range(2):
            loss = call(**batch(k)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()
        yield from peft.get_peft_model_state_dict(model).values()

    assert_trains_as_eager(eager, rk, train)
    assert_loss_in_budget(rk)


def mlp() -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(32, 32), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(32, 8))


def rows(seed: int) -> torch.Tensor:
    return randn(64, 32, seed=seed)


@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lightning(precision: str, tmp_path: Path) -> None:
    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net
            self.losses: list[float] = []
            self.sections = Sections()

        def training_step(self, rows: torch.Tensor, _: int) -> torch.Tensor:
            self.sections.begin()
            return F.cross_entropy(self.net(rows), torch.zeros(len(rows), dtype=torch.int64))

        def on_after_backward(self) -> None:
            self.sections.end()

        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            self.losses.append(float(outputs["loss"]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16-mixed", cache_enabled=False):
        rk = under_budget(mlp(), rows(0))
    results = []
    for net in (mlp(), rk):
        torch.manual_seed(1)
        module = Module(net)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            precision=precision,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            default_root_dir=tmp_path,
        )
        with module.sections:
            trainer.fit(module, torch.utils.data.DataLoader([row for k in range(3) for row in rows(k)], batch_size=64))
        results.append([*module.losses, *module.parameters()])
        trainer.save_checkpoint(tmp_path / "checkpoint")
        keys = torch.load(tmp_path / "checkpoint", weights_only=True)["state_dict"]
        assert list(keys) == [f"net.{key}" for key in mlp().state_dict()]
    assert_same(results[1], results[0])
    assert len(module.losses) == len(module.sections.peaks) == 6
    assert_nothing_added(rk, module.sections)


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str, accelerator: Callable[..., Any]) -> None:
    results = []
    for model in (mlp(), mlp()):
        tool = accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
        net = model
        if results:
            with tool.autocast():
                net = rk = under_budget(model, rows(0))
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
        data = torch.utils.data.DataLoader([row for k in range(4) for row in rows(k)], batch_size=64)
        net, optimizer, data = tool.prepare(net, optimizer, data)
        torch.manual_seed(1)
        losses, sections = [], Sections()
        with sections:
            for x in data:
                with tool.accumulate(net):
                    target = torch.zeros(len(x), dtype=torch.int64)
                    sections.begin()
                    loss = F.cross_entropy(net(x), target)
                    tool.backward(loss)
                    sections.end()
                    tool.clip_grad_norm_(net.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.detach())
        results.append([*losses, *tool.unwrap_model(net).parameters()])
    assert_same(results[1], results[0])
    assert_nothing_added(rk, sections)


def test_outputs_that_accelerate_casts_fit_in_the_room_for_the_loss(accelerator: Callable[..., Any]) -> None:
    """In mixed precision its wrapper returns them in float32, which is a copy. Here the peak is at the loss."""
    tool = accelerator(mixed_precision="bf16")
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 8), *(nn.Tanh() for _ in range(8)), nn.Linear(8, 512)), randn(64, 32, seed=0)
    with tool.autocast():
        rk = Rockmate(model, x, frontier(model, x, costs="flops").min_budget, costs="flops")
    net, target = tool.prepare(rk), torch.zeros(64, dtype=torch.int64)

    def step(call: nn.Module) -> None:
        out = call(x)
        assert out.dtype == torch.float32
        tool.backward(F.cross_entropy(out, target))

    assert_in_budget(rk, lambda: step(net))


@pytest.mark.filterwarnings(ASKED)
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")
@pytest.mark.parametrize("way", [None, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_lora_on_a_model_that_checkpoints_itself(way: dict[str, bool] | None) -> None:
    """The adapters' hook splits the graph, so that the model is followed, checkpoints included."""

    def made() -> nn.Module:
        base = llama()
        base.gradient_checkpointing_enable(gradient_checkpointing_kwargs=way)
        base.enable_input_require_grads()
        model: nn.Module = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], **LORA))
        return model.train()

    def train(model: nn.Module) -> Any:
        torch.manual_seed(5)
        for k in range(4):
            ids = tokens(4, 16, high=64, seed=k)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            yield loss.detach()
        yield from snapshot(model)

    model = made()
    handle = attach(model, "100%", costs="flops")
    assert_same([*train(model)], [*train(made())])
    assert handle.plan is not None
