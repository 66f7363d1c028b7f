"""Training scripts as people write them with the usual libraries: the same with one line more, ``rockmate.attach``."""

from __future__ import annotations

import copy
import importlib.util
import io
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from against_eager import assert_same, snapshot
from libraries import ASKED, LORA, QUIET, accelerate, lightning, llama, peft, transformers
from models import SEVERAL, randn, tokens
from torch import nn
from torch.nn import functional as F

import rockmate
from rockmate import BudgetWarning, measure_peak
from rockmate.calls.masks import left_out_as_eager

NOT_A_LEAF = "ignore:The .grad attribute of a Tensor that is not a leaf"
"""TorchDynamo asks for gradients of inputs, and hides this warning, but not where it is an error."""

Line = Callable[[nn.Module], nn.Module]
"""The line that a script has more: it does nothing, or attaches the model, and returns it."""


def budget_of(model: nn.Module, loss: Callable[[Any], torch.Tensor], share: float) -> int:
    """A share of what a step takes on a model as it is."""
    twin = copy.deepcopy(model).train()

    def step() -> None:
        loss(twin).backward()

    with torch.random.fork_rng():
        step()
        twin.zero_grad()
        return int(share * measure_peak(step, "cpu"))


def alike(
    script: Callable[[Line], Iterable[Any]],
    loss: Callable[[Any], torch.Tensor],
    share: float = 0.6,
    least: bool = False,
    reason: str = "",
) -> list[rockmate.Attachment]:
    """``script`` yields the same with the line as without it. The budget is a share of what a step with ``loss`` takes
    in eager mode. ``least``: it need not be enough for all kinds of calls. ``reason``: why models are not captured as
    one graph, if they are not. What was attached, in order.
    """
    budgets: list[int] = []
    handles: list[rockmate.Attachment] = []

    def measured(model: nn.Module) -> nn.Module:
        budgets.append(budget_of(model, loss, share))
        return model

    def attached(model: nn.Module) -> nn.Module:
        budget = budgets[len(handles)]
        handles.append(rockmate.attach(model, budget, costs="flops", on_infeasible="least" if least else "error"))
        return model

    results = []
    for line in (measured, attached):
        torch.manual_seed(5)
        with warnings.catch_warnings():
            if least:
                warnings.filterwarnings("ignore", ".*plan of least memory runs instead", BudgetWarning)
            results.append([*script(line)])
    assert_same(results[1], results[0])
    assert len(results[0]) > 1
    for handle in handles:
        assert_recomputes(handle, reason)
    return handles


def assert_recomputes(handle: rockmate.Attachment, reason: str = "") -> None:
    """The model was captured as one graph, unless there is a reason against it, and some of it runs again."""
    assert bool(handle.reason) == bool(reason), handle.reason
    assert reason in handle.reason
    assert any(p.plan is not None and p.plan.recomputed for p in handle.plans), "the budget forces nothing"


def fresh(folder: Path) -> Path:
    """A new folder."""
    made = folder / str(len([*folder.iterdir()]))
    made.mkdir()
    return made


# -------------------------------------------------------------------------------------- transformers


def gpt2(**options: Any) -> Any:
    """Tied weights, dropout."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=0, **options
    )
    return transformers.GPT2LMHeadModel(config)


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, of one length or of several; with a column that the model does not take."""

    def __init__(self, size: int, lengths: tuple[int, ...] = (16,), seed: int = 0) -> None:
        self.rows = [tokens(lengths[k % len(lengths)], high=64, seed=100 * seed + k) for k in range(size)]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[k], "labels": self.rows[k], "unknown": torch.tensor(k)}


def padded(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch, as long as its longest row."""
    ids, labels = [row["input_ids"] for row in rows], [row["labels"] for row in rows]
    pad = torch.nn.utils.rnn.pad_sequence
    mask = pad([torch.ones_like(row) for row in ids], batch_first=True)
    labels = pad(labels, batch_first=True, padding_value=-100)
    return {"input_ids": pad(ids, batch_first=True), "attention_mask": mask, "labels": labels}


def loss_of_texts(model: Any) -> torch.Tensor:
    """Of the longest batch."""
    return model(**padded([Texts(8)[k] for k in range(8)])).loss


def trainer_of(model: nn.Module, folder: Path, lengths: tuple[int, ...] = (16,), **options: Any) -> Any:
    """A Trainer with the usual settings."""
    callbacks = options.pop("callbacks", None)
    given = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "seed": 3,
        "learning_rate": 0.01,
        "dataloader_pin_memory": False,
    }
    return transformers.Trainer(
        model,
        transformers.TrainingArguments(**{**given, **options}),
        train_dataset=Texts(64, lengths),
        eval_dataset=Texts(16, lengths, seed=1),
        data_collator=padded,
        callbacks=callbacks,
    )


def logged(trainer: Any) -> Iterator[Any]:
    """What was logged, but for times."""
    timed = ("runtime", "per_second", "flos")
    for entry in trainer.state.log_history:
        yield from sorted((name, value) for name, value in entry.items() if not name.endswith(timed))


def test_trainer_evaluates_saves_and_loads_the_best(tmp_path: Path) -> None:
    def script(line: Line) -> Iterator[Any]:
        folder = fresh(tmp_path)
        model = line(gpt2())
        trainer = trainer_of(
            model,
            folder,
            (16, 12, 9),
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=2,
            load_best_model_at_end=True,
            callbacks=[transformers.EarlyStoppingCallback(3)],
        )
        found = trainer.train()
        yield found.training_loss
        history = [*logged(trainer)]
        assert sum(name == "eval_loss" for name, _ in history) == 2
        yield from history
        yield trainer.evaluate()["eval_loss"]
        yield trainer.state.best_metric
        yield Path(trainer.state.best_model_checkpoint).name
        yield trainer.predict(Texts(8, seed=2)).metrics["test_loss"]
        yield from snapshot(model)
        trainer.save_model(str(folder / "saved"))
        yield sorted(path.name for path in (folder / "saved").iterdir())
        yield (folder / "saved" / "config.json").read_text()
        again = transformers.GPT2LMHeadModel.from_pretrained(folder / "saved")
        assert again.lm_head.weight is again.transformer.wte.weight
        assert_same(again.state_dict().values(), model.state_dict().values())
        yield list(again.state_dict())

    alike(script, loss_of_texts, least=True)


def test_trainer_resumes(tmp_path: Path) -> None:
    def script(line: Line) -> Iterator[Any]:
        folder = fresh(tmp_path)
        first = line(gpt2())
        trainer_of(first, folder, save_strategy="steps", save_steps=2).train()
        second = line(gpt2())
        trainer = trainer_of(second, folder, save_strategy="steps", save_steps=2)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        yield trainer.state.global_step
        yield from logged(trainer)
        assert_same(second.parameters(), first.parameters())
        yield from snapshot(second)

    alike(script, loss_of_texts)


def test_trainer_called_twice_accumulates_and_clips(tmp_path: Path) -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(gpt2())
        for steps in (2, 3):
            trainer = trainer_of(
                model, fresh(tmp_path), (16, 12), gradient_accumulation_steps=2, max_grad_norm=0.5, max_steps=steps
            )
            trainer.train()
            yield from logged(trainer)
            yield from snapshot(model)
        trainer.train()
        yield from logged(trainer)
        yield from snapshot(model)

    alike(script, loss_of_texts, least=True)


def test_trainer_in_bf16(tmp_path: Path) -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(gpt2())
        trainer = trainer_of(model, fresh(tmp_path), bf16=True, eval_strategy="steps", eval_steps=2)
        trainer.train()
        yield from logged(trainer)
        yield from snapshot(model)

    def loss(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of_texts(model)

    alike(script, loss)


def test_trainer_with_label_smoothing_and_its_own_loss(tmp_path: Path) -> None:
    def own(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        return F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def script(line: Line) -> Iterator[Any]:
        for options in ({"label_smoothing_factor": 0.1}, {}):
            model = line(gpt2())
            trainer = trainer_of(model, fresh(tmp_path), max_steps=2, **options)
            if not options:
                trainer.compute_loss_func = own
            yield trainer.label_names
            trainer.train()
            yield from logged(trainer)
            yield from snapshot(model)

    alike(script, loss_of_texts)


def test_sequences_to_sequences_with_generation(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            pad_token_id=0,
        )
        return transformers.T5ForConditionalGeneration(config)

    def script(line: Line) -> Iterator[Any]:
        model = line(make())
        options = transformers.Seq2SeqTrainingArguments(
            output_dir=str(fresh(tmp_path)),
            per_device_train_batch_size=8,
            max_steps=3,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            disable_tqdm=True,
            predict_with_generate=True,
            generation_max_length=5,
            dataloader_pin_memory=False,
        )
        trainer = transformers.Seq2SeqTrainer(
            model,
            options,
            train_dataset=Texts(32, (16, 12)),
            eval_dataset=Texts(8, seed=1),
            data_collator=padded,
            compute_metrics=lambda found: {"sum": float(found.predictions.sum())},
        )
        trainer.train()
        trainer.evaluate()
        yield from logged(trainer)
        yield from snapshot(model)

    alike(script, loss_of_texts, least=True)


def test_a_classifier_with_metrics_and_a_frozen_body(tmp_path: Path) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_labels=3,
            attn_implementation="eager",
        )
        return transformers.BertForSequenceClassification(config)

    def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        given = padded(rows)
        return {**given, "labels": given["input_ids"][:, 0] % 3}

    def script(line: Line) -> Iterator[Any]:
        model = line(make())
        for frozen in (False, True):
            model.bert.embeddings.requires_grad_(not frozen)
            trainer = trainer_of(model, fresh(tmp_path), max_steps=2, eval_strategy="epoch")
            trainer.data_collator = collate
            trainer.compute_metrics = lambda found: {"right": float((found.predictions.argmax(-1) == 0).mean())}
            trainer.train()
            trainer.evaluate()
            yield from logged(trainer)
            yield from snapshot(model)

    def loss(model: Any) -> torch.Tensor:
        return model(**collate([Texts(8)[k] for k in range(8)])).loss

    alike(script, loss, least=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_llama_with_activation_checkpointing(reentrant: bool, tmp_path: Path) -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(llama(attn_implementation="eager"))
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        trainer = trainer_of(model, fresh(tmp_path), max_steps=2)
        trainer.train()
        yield from logged(trainer)
        yield from snapshot(model)

    def loss(model: Any) -> torch.Tensor:
        model.activation_checkpointing_disable()
        return loss_of_texts(model)

    alike(script, loss)


def test_llama_with_checkpoints_for_a_while_and_generation() -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(llama(pad_token_id=0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = transformers.get_cosine_schedule_with_warmup(optimizer, 1, 6)
        for k in range(6):
            if k == 2:
                model.activation_checkpointing_enable()
            if k == 4:
                model.activation_checkpointing_disable()
            out = model(**padded([Texts(8, (16, 12), seed=k)[j] for j in range(8)]))
            out.loss.backward()
            yield nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            yield out.loss.detach()
        model.eval()
        yield model.generate(tokens(2, 4, high=64, seed=0), max_new_tokens=4, do_sample=False)
        yield from snapshot(model)

    alike(script, loss_of_texts)


def bert() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=64))


class Packing(nn.Module):
    """Makes the padding mask or the positions of the model that it wraps."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.model, self.what = llama(attn_implementation="sdpa"), what
        self.config = self.model.config

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> Any:
        padding = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        made = padding if self.what == "attention_mask" else torch.arange(input_ids.shape[1]) % padding.sum(1)[:, None]
        return self.model(input_ids=input_ids, labels=input_ids, **{self.what: made})


@pytest.mark.parametrize("kind", [llama, bert])
def test_masks_are_left_out_where_transformers_leaves_them_out(kind: Callable[[], Any]) -> None:
    """Where nothing is padded, it gives fused attention no mask, and then not even keys for each head, so that
    gradients have other bits. To know, it reads the values of the mask.
    """
    ids = tokens(8, 64, high=64, seed=0)
    none, some = torch.ones_like(ids), (torch.arange(64) < 50).expand(8, 64).long()

    def script(line: Line) -> Iterator[Any]:
        model = line(kind())
        for mask in (none, some, none, some, some[:5, 30:], none[:5, 30:], None, none, None):
            rows = ids if mask is None else ids[: mask.shape[0], : mask.shape[1]].contiguous()
            torch.manual_seed(0)
            loss = model(input_ids=rows, labels=rows, **({} if mask is None else {"attention_mask": mask})).loss
            loss.backward()
            yield loss.detach()
            yield from snapshot(model)
            model.zero_grad()

    (handle,) = alike(script, lambda model: model(input_ids=ids, labels=ids).loss, 0.9)
    assert handle.plans_made <= 3  # no padding, some padding, no mask


def test_a_capture_of_another_thread_leaves_out_no_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch has one flag for all threads, that one of them compiles. Two sequences in a row were taken for one."""
    library, positions = transformers.masking_utils, torch.arange(8)[None] % 4
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)
    with left_out_as_eager(full=True, values=True):
        found = library.find_packed_sequence_indices(positions)
    assert found is not None
    assert found.tolist() == [[0] * 4 + [1] * 4]


@pytest.mark.parametrize("what", ["attention_mask", "position_ids"])
def test_masks_and_positions_that_a_model_computes(what: str) -> None:
    """They differ from call to call: what holds for one call must not be taken for granted in the next."""
    ids = tokens(8, 64, high=64, seed=0)
    some = (torch.arange(64) < 32).expand(8, 64).long()

    def script(line: Line) -> Iterator[Any]:
        model = line(Packing(what))
        for mask in (None, some, None, some):
            loss = model(ids, attention_mask=mask).loss
            loss.backward()
            yield loss.detach()
            if mask is not None:  # else gradients differ in their last bits: see docs/limits.md
                yield from snapshot(model)
            model.zero_grad()

    alike(script, lambda model: model(ids).loss, 0.9)


# ------------------------------------------------------------------------------------------- diffusers


@pytest.fixture(scope="module")
def diffusers() -> Any:
    """The library; where it is there but cannot be imported, its tests fail."""
    if importlib.util.find_spec("diffusers") is None:
        pytest.skip("needs diffusers")
    return importlib.import_module("diffusers")


def unet(diffusers: Any) -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )


def test_a_unet_of_diffusers_and_its_pipeline(diffusers: Any, tmp_path: Path) -> None:
    scheduler = diffusers.DDPMScheduler(num_train_timesteps=10)

    def loss_of(model: Any, seed: int = 0) -> torch.Tensor:
        clean, noise = randn(8, 1, 8, 8, seed=seed), randn(8, 1, 8, 8, seed=seed + 50)
        steps = tokens(8, high=10, seed=seed)
        found = model(scheduler.add_noise(clean, noise, steps), steps, return_dict=seed % 2 == 0)
        return F.mse_loss(found.sample if seed % 2 == 0 else found[0], noise)

    def script(line: Line) -> Iterator[Any]:
        model = line(unet(diffusers))
        average = diffusers.training_utils.EMAModel(model.parameters(), decay=0.9)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for k in range(4):
            loss = loss_of(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            average.step(model.parameters())
            yield loss.detach()
        yield from average.shadow_params
        pipeline = diffusers.DDPMPipeline(model, scheduler)
        pipeline.set_progress_bar_config(disable=True)
        folder = fresh(tmp_path)

        def images(of: Any) -> torch.Tensor:
            made = of(2, torch.Generator().manual_seed(0), num_inference_steps=3, output_type="np").images
            return torch.from_numpy(made)

        yield images(pipeline)
        pipeline.save_pretrained(folder)
        yield sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        again = diffusers.DDPMPipeline.from_pretrained(folder)
        again.set_progress_bar_config(disable=True)
        assert torch.equal(images(again), images(pipeline))
        loss = loss_of(model.train(), 7)
        loss.backward()
        yield loss.detach()
        yield from snapshot(model)

    alike(script, loss_of)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
def test_a_conditional_unet_of_diffusers_with_checkpointing(diffusers: Any) -> None:
    def make() -> Any:
        torch.manual_seed(0)
        return diffusers.UNet2DConditionModel(
            sample_size=8,
            in_channels=2,
            out_channels=2,
            layers_per_block=1,
            block_out_channels=(8,),
            norm_num_groups=4,
            down_block_types=("CrossAttnDownBlock2D",),
            up_block_types=("CrossAttnUpBlock2D",),
            cross_attention_dim=12,
            attention_head_dim=4,
            mid_block_type=None,
        )

    def loss_of(model: Any, seed: int = 0) -> torch.Tensor:
        noise, text = randn(4, 2, 8, 8, seed=seed), randn(4, 5, 12, seed=seed + 50)
        return F.mse_loss(model(noise, tokens(4, high=10, seed=seed), encoder_hidden_states=text).sample, noise)

    def script(line: Line) -> Iterator[Any]:
        model = line(make())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for k in range(4):
            if k == 2:
                model.enable_gradient_checkpointing()
            loss = loss_of(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()
        yield from snapshot(model)

    alike(script, loss_of)


# ------------------------------------------------------------------------------------------ accelerate


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


def net(width: int = 32, outside: int = 8) -> nn.Module:
    """Three blocks and a head."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(3)), nn.Linear(width, outside))


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Rows of numbers and their classes."""

    def __init__(self, size: int = 512, seed: int = 0) -> None:
        self.x, self.y = randn(size, 32, seed=seed), tokens(size, high=8, seed=seed)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[k], self.y[k]


def loader(seed: int = 0, shuffle: bool = False) -> Any:
    return torch.utils.data.DataLoader(Rows(seed=seed), batch_size=128, shuffle=shuffle)


def loss_of_rows(model: Any, seed: int = 0) -> torch.Tensor:
    return F.cross_entropy(model(randn(128, 32, seed=seed)), tokens(128, high=8, seed=seed))


@pytest.mark.parametrize(("first", "precision"), [("attach", "bf16"), ("prepare", "no")])
def test_accelerate(first: str, precision: str, accelerator: Callable[..., Any], tmp_path: Path) -> None:
    def script(line: Line) -> Iterator[Any]:
        folder = fresh(tmp_path)
        tool = accelerator(mixed_precision=precision, gradient_accumulation_steps=2)
        model = net()
        if first == "attach":
            line(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        call, optimizer, data, schedule = tool.prepare(model, optimizer, loader(shuffle=True), schedule)
        if first == "prepare":
            line(call)
        for epoch in range(3):
            if epoch == 1:
                tool.save_state(str(folder))
            if epoch == 2:
                tool.load_state(str(folder))
            for x, y in data:
                with tool.accumulate(call):
                    loss = F.cross_entropy(call(x), y)
                    tool.backward(loss)
                    if tool.sync_gradients:
                        yield tool.clip_grad_norm_(call.parameters(), 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                    yield loss.detach()
            with torch.no_grad():
                yield call.eval()(randn(16, 32, seed=7))
            call.train()
        plain = tool.unwrap_model(call)
        yield type(plain) is nn.Sequential
        yield from tool.get_state_dict(call).values()
        yield list(plain.state_dict())
        tool.save_model(call, str(folder / "saved"))
        yield sorted(path.name for path in folder.rglob("*"))
        again = net()
        accelerate.load_checkpoint_in_model(again, str(folder / "saved"))
        assert_same(again.parameters(), plain.parameters())
        yield from snapshot(plain)

    def loss(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            return loss_of_rows(model)

    alike(script, loss, share=0.7, least=True)


# ------------------------------------------------------------------------------------------- Lightning


class Classifier(lightning.LightningModule):  # type: ignore[misc]
    """Attached by nobody, by itself, or in part by itself. ``given``: what the script has as its line."""

    line: Any = None

    def __init__(self, width: int = 32, where: str = "", way: str = "self") -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net, self.where, self.way = net(width), where, way
        self.losses: list[float] = []
        if where == "init":
            type(self).line(self.net if way == "net" else self)

    def configure_model(self) -> None:
        """Called for fit and for validate."""
        if self.where == "configure_model" and rockmate.attached(self) is None:
            type(self).line(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x) if self.way == "net" else self(x), y)
        self.log("train_loss", loss)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@pytest.mark.filterwarnings(*QUIET)
@pytest.mark.parametrize(
    ("where", "way"),
    [("before", "net"), ("init", "self"), ("configure_model", "self")],
)
def test_lightning(where: str, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(line: Line) -> Iterator[Any]:
        folder = fresh(tmp_path)
        monkeypatch.setattr(Classifier, "line", staticmethod(line))
        module = Classifier(where=where, way=way)
        if where == "before":
            line(module.net if way == "net" else module)
        best = lightning.pytorch.callbacks.ModelCheckpoint(folder, monitor="val_loss", filename="best", save_last=True)
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            logger=False,
            callbacks=[best, lightning.pytorch.callbacks.EarlyStopping("val_loss")],
            enable_progress_bar=False,
            enable_model_summary=False,
            gradient_clip_val=0.5,
            accumulate_grad_batches=2,
            default_root_dir=folder,
        )
        torch.manual_seed(1)
        trainer.fit(module, loader(shuffle=True), loader(seed=1))
        yield from module.losses
        yield float(trainer.callback_metrics["val_loss"])
        yield from snapshot(module)
        yield sorted(path.name for path in folder.iterdir())
        monkeypatch.setattr(Classifier, "line", staticmethod(lambda model: model))
        again = Classifier.load_from_checkpoint(folder / "last.ckpt")
        assert_same(again.state_dict().values(), module.state_dict().values())
        yield list(again.state_dict())
        yield trainer.validate(module, loader(seed=1), ckpt_path=str(folder / "best.ckpt"), verbose=False)

    alike(script, loss_of_rows, share=0.7, least=True)


@pytest.mark.filterwarnings(*QUIET, NOT_A_LEAF)
@pytest.mark.filterwarnings(SEVERAL)
def test_lightning_by_hand_with_two_models(tmp_path: Path) -> None:
    class Adversarial(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = net(outside=32), net(outside=1)
            self.losses: list[torch.Tensor] = []

        def training_step(self, batch: Any, _: int) -> None:
            first, second = self.optimizers()
            made = self.generator(batch[0])
            self.toggle_optimizer(first)
            loss = -self.critic(made).mean()
            self.manual_backward(loss)
            first.step()
            first.zero_grad()
            self.untoggle_optimizer(first)
            self.toggle_optimizer(second)
            other = self.critic(made.detach()).mean() - self.critic(batch[0]).mean()
            self.manual_backward(other)
            second.step()
            second.zero_grad()
            self.untoggle_optimizer(second)
            self.losses += [loss.detach(), other.detach()]

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(m.parameters(), lr=0.01) for m in (self.generator, self.critic)]

    def script(line: Line) -> Iterator[Any]:
        module = Adversarial()
        line(module.generator)
        line(module.critic)
        trainer = lightning.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        torch.manual_seed(1)
        trainer.fit(module, loader(shuffle=True))
        yield from module.losses
        yield from snapshot(module)

    alike(script, lambda model: model(randn(128, 32, seed=0)).square().mean(), share=0.7, least=True)


# ------------------------------------------------------------------------------------------------ PEFT


@pytest.mark.filterwarnings(ASKED)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_of_peft(checkpointing: bool, tmp_path: Path) -> None:
    def script(line: Line) -> Iterator[Any]:
        folder = fresh(tmp_path)
        base = llama(attn_implementation="eager")
        torch.manual_seed(1)
        model = peft.get_peft_model(base, peft.LoraConfig(target_modules=["q_proj", "v_proj"], **LORA))
        line(model)
        if checkpointing:
            model.enable_input_require_grads()
            base.activation_checkpointing_enable()
        trainer = trainer_of(model, folder, eval_strategy="steps", eval_steps=2)
        yield trainer.label_names
        trainer.train()
        yield from logged(trainer)
        model.save_pretrained(folder / "adapter")
        yield sorted(path.name for path in (folder / "adapter").iterdir())
        yield from peft.get_peft_model_state_dict(model).values()
        again = peft.PeftModel.from_pretrained(llama(attn_implementation="eager"), folder / "adapter")
        ids = tokens(2, 8, high=64, seed=0)
        with torch.no_grad():
            expected = model.eval()(input_ids=ids).logits
            assert torch.equal(again.eval()(input_ids=ids).logits, expected)
            with model.disable_adapter():
                yield model(input_ids=ids).logits
        merged = model.merge_and_unload()
        yield type(merged).__name__
        with torch.no_grad():
            yield merged(input_ids=ids).logits
        yield from merged.state_dict().values()

    reason = "forward makes a tensor, and calls its requires_grad_()" if checkpointing else ""
    alike(script, loss_of_texts, share=0.8, least=True, reason=reason)


@pytest.mark.filterwarnings(ASKED)
def test_adapters_that_change_while_training() -> None:
    def script(line: Line) -> Iterator[Any]:
        torch.manual_seed(1)
        config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], **LORA)
        model = line(peft.get_peft_model(llama(attn_implementation="eager"), config))
        model.add_adapter("other", peft.LoraConfig(target_modules=["o_proj"], **LORA))
        for name in ("default", "other", "default"):
            model.set_adapter(name)
            for k in range(2):
                loss = model(**padded([Texts(8, seed=k)[j] for j in range(8)])).loss
                loss.backward()
                yield loss.detach()
        with model.disable_adapter():
            yield model(**padded([Texts(8)[j] for j in range(8)])).loss.detach()
        yield from snapshot(model)

    alike(script, loss_of_texts, share=0.8, least=True)


# ------------------------------------------------------------------------------- DistributedDataParallel


# ---------------------------------------------------------------------------------- plain PyTorch scripts


def test_averages_of_weights() -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(net())
        twin = copy.deepcopy(model)
        ema = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(3):
            loss = loss_of_rows(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
            with torch.no_grad():
                for ours, new in zip(twin.parameters(), model.parameters(), strict=True):
                    ours.lerp_(new, 0.1)
            yield loss.detach()
            for average in (twin, ema):
                with torch.no_grad():
                    yield average.eval()(randn(16, 32, seed=9))
        for average in (twin, ema):
            loss = loss_of_rows(average.train())
            loss.backward()
            yield from snapshot(average)
        torch.optim.swa_utils.update_bn([randn(16, 32, seed=0)], ema)
        yield from snapshot(model)

    alike(script, loss_of_rows, share=0.7, least=True)


def test_a_gradient_scaler_and_half_precision() -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        for k in range(6):
            with torch.autocast("cpu", torch.float16):
                loss = loss_of_rows(model, k)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            yield nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            yield loss.detach()
            yield scaler.get_scale()
        yield from snapshot(model)

    def loss(model: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return loss_of_rows(model)

    def no_nan(given: Line) -> Iterator[Any]:
        yield from (x.nan_to_num() if isinstance(x, torch.Tensor) else x for x in script(given))

    alike(no_nan, loss, share=0.7, least=True)


def test_functional_calls_and_per_sample_gradients() -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(net())
        for k in range(2):
            loss = loss_of_rows(model, k)
            loss.backward()
            yield loss.detach()
        changed = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
        x = randn(128, 32, seed=3)
        for _ in range(2):
            loss = torch.func.functional_call(model, changed, (x,)).square().mean()
            yield from torch.autograd.grad(loss, [*changed.values()])
        model.eval()

        def one(parameters: dict[str, torch.Tensor], row: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, parameters, (row[None],)).square().mean()

        own = dict(model.named_parameters())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "under torch.func's transforms", BudgetWarning)
            found = torch.func.vmap(torch.func.grad(one), (None, 0))(own, x[:4])
        yield from found.values()
        loss = loss_of_rows(model.train())
        loss.backward()
        yield from snapshot(model)

    alike(script, loss_of_rows, share=0.7, least=True)


def test_an_inner_loop_that_is_differentiated() -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(net())
        outer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(2):
            fast = dict(model.named_parameters())
            found = torch.func.functional_call(model, fast, (randn(128, 32, seed=k),))
            gradients = torch.autograd.grad(found.square().mean(), [*fast.values()], create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), gradients, strict=True)}
            loss = torch.func.functional_call(model, fast, (randn(128, 32, seed=k + 5),)).square().mean()
            loss.backward()
            outer.step()
            outer.zero_grad()
            yield loss.detach()
        yield from snapshot(model)

    with pytest.warns(BudgetWarning, match="retain_graph=True"):
        alike(script, loss_of_rows, share=0.7, least=True)


def test_optimizers_in_the_backward() -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(net())
        order = []
        own = {p: torch.optim.AdamW([p], lr=0.01) for p in model.parameters()}

        def step(p: torch.Tensor) -> None:
            order.append([q is p for q in own].index(True))
            own[p].step()  # type: ignore[index]
            own[p].zero_grad()  # type: ignore[index]

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(step)
        for k in range(4):
            loss = loss_of_rows(model, k)
            loss.backward()
            yield loss.detach()
        yield order
        yield from snapshot(model)

    alike(script, loss_of_rows)


def test_early_stopping_and_a_search_for_the_rate() -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        start = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        for k in range(5):
            for group in optimizer.param_groups:
                group["lr"] *= 10
            loss = loss_of_rows(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()
        model.load_state_dict(start[0])
        optimizer.load_state_dict(start[1])
        best, kept = float("inf"), io.BytesIO()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for k in range(5):
            loss = loss_of_rows(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                found = loss_of_rows(model.eval(), 77).item()
            model.train()
            plateau.step(found)
            yield found
            if found < best:
                best, kept = found, io.BytesIO()
                torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "k": k}, kept)
        kept.seek(0)
        state = torch.load(kept, weights_only=True)
        model.load_state_dict(state["model"], assign=True)
        loss = loss_of_rows(model)
        loss.backward()
        yield loss.detach()
        yield from snapshot(model)

    alike(script, loss_of_rows)


def test_other_dtypes_and_new_parameters() -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(net())
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
            model.to(dtype)
            model.zero_grad()
            for k in range(2):
                loss = model(randn(128, 32, seed=k).to(dtype)).float().square().mean()
                loss.backward()
                yield loss.detach()
            yield from snapshot(model)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        loss = loss_of_rows(model)
        loss.backward()
        yield from snapshot(model)

    alike(script, loss_of_rows, least=True)


def test_gradient_penalties_and_adversarial_examples() -> None:
    def script(line: Line) -> Iterator[Any]:
        model = line(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(3):
            x = randn(128, 32, seed=k, requires_grad=True)
            (direction,) = torch.autograd.grad(model(x).square().mean(), x)
            attacked = (x + 0.1 * direction.sign()).detach().requires_grad_()
            found = model(attacked)
            (slope,) = torch.autograd.grad(found.sum(), attacked, create_graph=True)
            loss = found.square().mean() + (slope.norm(dim=1) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()
        yield from snapshot(model)

    with pytest.warns(BudgetWarning, match="retain_graph=True"):
        alike(script, loss_of_rows, least=True)


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


@pytest.mark.parametrize("way", ["weight_norm", "spectral_norm", "orthogonal", "symmetric", "old", "prune"])
def test_parametrized_weights(way: str) -> None:
    """Weights that are computed, from before or put on and taken off on the way."""

    def put(layer: nn.Linear) -> None:
        tools = nn.utils.parametrizations
        if way == "old":
            nn.utils.spectral_norm(layer)
        elif way == "prune":
            nn.utils.prune.l1_unstructured(layer, "weight", 0.3)
        elif way == "symmetric":
            nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
        else:
            getattr(tools, way)(layer)

    def take_off(layer: nn.Linear) -> None:
        if way == "old":
            nn.utils.remove_spectral_norm(layer)
        elif way == "prune":
            nn.utils.prune.remove(layer, "weight")
        else:
            nn.utils.parametrize.remove_parametrizations(layer, "weight")

    def script(line: Line) -> Iterator[Any]:
        torch.manual_seed(0)
        layers = [part for _ in range(3) for part in (nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32))]
        model = nn.Sequential(*layers, nn.Linear(32, 8))
        if way == "prune":  # what is pruned cannot be copied
            line(model)
            put(model[0])
        else:
            put(model[0])
            line(model)

        def steps() -> Iterator[Any]:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for k in range(2):
                loss = loss_of_rows(model, k)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield loss.detach()

        yield from steps()
        put(model[6])
        yield from steps()
        take_off(model[0])
        yield from steps()
        yield list(model.state_dict())
        yield from snapshot(model)

    alike(script, loss_of_rows, share=0.8, least=True)


def test_copies_train_as_they_are() -> None:
    model = net()
    budget = budget_of(model, loss_of_rows, 0.6)
    handle = rockmate.attach(model, budget, costs="flops")
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    loss_of_rows(model.eval()).backward()
    for other in copies:
        assert rockmate.attached(other) is None
        loss_of_rows(other.eval()).backward()
        assert_same([p.grad for p in other.parameters()], [p.grad for p in model.parameters()])
    again = rockmate.attach(copies[0], budget, costs="flops")
    copies[0].zero_grad()
    loss_of_rows(copies[0]).backward()
    assert_same([p.grad for p in copies[0].parameters()], [p.grad for p in model.parameters()])
    assert_recomputes(handle)
    assert_recomputes(again)


@pytest.mark.filterwarnings(NOT_A_LEAF)
def test_compiling_after_attaching() -> None:
    """``model.compile()`` takes the place of the plan; it is as if the model were not attached."""
    model, eager = net().eval(), net().eval()
    handle = rockmate.attach(model, budget_of(model, loss_of_rows, 0.6), costs="flops")
    model.eval()
    with pytest.warns(rockmate.BudgetWarning, match="took the place of the plan"):
        model.compile(backend="eager")
    assert rockmate.attached(model) is None and handle.plan is None
    for m in (model, eager):
        loss_of_rows(m).backward()
    assert_same(snapshot(model), snapshot(eager))


class Trunk(nn.Module):
    """A body with two heads, one of which is called for."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = net(outside=32), nn.ModuleDict({"a": nn.Linear(32, 8), "b": nn.Linear(32, 1)})

    def forward(self, x: torch.Tensor, task: str) -> torch.Tensor:
        return self.heads[task](torch.tanh(self.body(x)))


@pytest.mark.filterwarnings(SEVERAL)
@pytest.mark.filterwarnings("ignore:no plan fits a budget of .* for a step in which:rockmate.BudgetWarning")
def test_several_tasks_with_one_backward() -> None:
    def loss_of(model: Any, seed: int = 0) -> torch.Tensor:
        x = randn(128, 32, seed=seed)
        return F.cross_entropy(model(x, "a"), tokens(128, high=8, seed=seed)) + model(x, task="b").square().mean()

    def script(line: Line) -> Iterator[Any]:
        torch.manual_seed(0)
        model = line(Trunk())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for k in range(3):
            loss = loss_of(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()
        for task in ("a", "b", "a"):
            loss = model(randn(128, 32, seed=0), task).square().mean()
            loss.backward()
            yield loss.detach()
        yield from snapshot(model)

    alike(script, loss_of, share=0.3, least=True)


@pytest.mark.filterwarnings(NOT_A_LEAF)
@pytest.mark.filterwarnings(SEVERAL)
def test_a_generator_and_its_critic() -> None:
    def script(line: Line) -> Iterator[Any]:
        generator, critic = line(net(outside=32)), line(net(outside=1))
        first, second = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (generator, critic))
        for k in range(3):
            real, noise = randn(128, 32, seed=k), randn(128, 32, seed=k + 10)
            second.zero_grad()
            made = generator(noise)
            loss = F.softplus(critic(made.detach())).mean() + F.softplus(-critic(real)).mean()
            loss.backward()
            second.step()
            yield loss.detach()
            first.zero_grad()
            for p in critic.parameters():
                p.requires_grad_(False)
            loss = F.softplus(-critic(made)).mean()
            loss.backward()
            first.step()
            for p in critic.parameters():
                p.requires_grad_(True)
            yield loss.detach()
        for model in (generator, critic):
            yield from snapshot(model)

    alike(script, lambda model: model(randn(128, 32, seed=0)).square().mean(), share=0.7, least=True)


def test_distillation() -> None:
    def script(line: Line) -> Iterator[Any]:
        teacher, student = line(net()), line(net())
        for k in range(2):
            loss_of_rows(teacher, k).backward()
        teacher.eval().requires_grad_(False)
        optimizer = torch.optim.AdamW(student.parameters(), lr=0.01)
        for k in range(3):
            x = randn(128, 32, seed=k)
            with torch.no_grad():
                target = teacher(x)
            found = student(x)
            loss = F.kl_div(found.log_softmax(-1), target.softmax(-1), reduction="batchmean")
            loss = loss + F.mse_loss(found, teacher(x))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()
        yield from snapshot(student)

    alike(script, loss_of_rows, least=True)


@pytest.mark.filterwarnings(SEVERAL)
def test_siamese_nets() -> None:
    def loss_of(model: Any, seed: int = 0) -> torch.Tensor:
        a, b = (model(randn(128, 32, seed=seed + k)) for k in (0, 1))
        return F.cosine_embedding_loss(a, b, torch.ones(128)) + F.mse_loss(a, model(randn(128, 32, seed=seed)).detach())

    def script(line: Line) -> Iterator[Any]:
        model = line(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(3):
            loss = loss_of(model, k)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()
        yield from snapshot(model)

    alike(script, loss_of, share=0.35, least=True)


@pytest.mark.filterwarnings(NOT_A_LEAF)
@pytest.mark.parametrize(("kind", "through"), [(nn.LSTM, True), (nn.GRU, False)])
@pytest.mark.filterwarnings(SEVERAL)
def test_recurrent_nets_with_a_state_that_is_carried(kind: Any, through: bool) -> None:
    """The state is cut off at each step, or the backward goes through all of them."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.net = nn.Embedding(20, 32), kind(32, 32, 2, batch_first=True, dropout=0.1)
            self.before, self.after = net(outside=32), net(outside=20)

        def forward(self, ids: torch.Tensor, state: Any = None) -> tuple[torch.Tensor, Any]:
            x, state = self.net(self.before(self.embedding(ids)), state)
            return self.after(x), state

    def cut(state: Any) -> Any:
        return state.detach() if isinstance(state, torch.Tensor) else tuple(t.detach() for t in state)

    def script(line: Line) -> Iterator[Any]:
        torch.manual_seed(0)
        model = line(Recurrent())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state, losses = None, []
        for k in range(4):
            ids = tokens(8, 16, high=20, seed=k)
            found, state = model(ids, state)
            losses.append(F.cross_entropy(found.flatten(0, 1), ids.flatten()))
            if not through:
                losses.pop().backward()
                state = cut(state)
                optimizer.step()
                optimizer.zero_grad()
            yield found.detach()
        if through:
            torch.stack(losses).sum().backward()
        yield from snapshot(model)

    alike(script, lambda model: model(tokens(8, 16, high=20, seed=0))[0].square().mean(), share=0.7, least=True)


def test_models_that_read_attributes_in_ways_of_their_own() -> None:
    """Parameters are told apart also where submodules are read by the model's own ``__getattr__``, or are in lists."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)
            self.names, self.hidden = nn.Parameter(torch.ones(32)), [nn.Linear(32, 32), nn.Linear(32, 32)]
            self.register_buffer("given", 2 * torch.ones(32))

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.first(x)) * self.names
            for layer in self.hidden:
                x = torch.tanh(layer(x))
            return torch.tanh(self.second(x))[:, :8] * self.given[:8]

    def script(line: Line) -> Iterator[Any]:
        torch.manual_seed(0)
        model: Any = line(Own())
        for k in range(2):
            loss = loss_of_rows(model, k)
            loss.backward()
            yield loss.detach()
        yield from snapshot(model)
        yield from (p.grad for layer in model.hidden for p in layer.parameters())

    alike(script, loss_of_rows, share=0.8, least=True)
