"""Training scripts whose batches differ in length, or whose models are no one graph: plain, and with one line more.

    python benchmarks/scripts.py [NAME …] [--repeat 1] [--out FILE] [--short]

NAMEs are those of ``SCRIPTS``, or parts of them; all by default.
Each script runs plain and attached, in turns, each time in a fresh process of one thread. Seconds are of the processor,
from the first step to the last, everything that planning needs included. Losses must be equal, bit for bit, and the
largest peak of a step within the budget, a share of the largest plain one. The first step of each size is compared and
planned for, so peaks are of a fifth pass over all steps, each with the random numbers that it had before.
``torch``: the same of ``torch.compile(model, backend="eager")``, which compiles no kernel: what captures take at least.
``later``: the median of the steps after the third, as a multiple of the plain one. Some of them bring a new size, or
other layers, and are planned for. ``settled``: the same of steps that came twice before, with the same random numbers.
Exit status 1 if a check fails. Needs transformers, but for ``--short``.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map_only

import rockmate

Batch = dict[str, Any]


@dataclass(frozen=True)
class Script:
    """``batches``: in the order of the steps. ``loss``: of the model on a batch. ``goal``: seconds more than plain.
    ``percent``: of the largest plain peak, the budget. ``most``: of ``later``.
    """

    model: Callable[[], nn.Module]
    batches: Callable[[], list[Batch]]
    loss: Callable[[nn.Module, Batch], torch.Tensor]
    goal: float | None = None
    percent: int = 60
    most: float | None = None


@dataclass(frozen=True)
class Row:
    """``steps``, ``sizes``: how many; ``plans``: graphs that were traced or solved for. Seconds of the processor;
    ``torch``: those of captures alone, see the file's text.
    ``later``, ``settled``: of steps, as multiples of the plain ones. ``most``: see ``Script``.
    """

    name: str
    steps: int
    sizes: int
    plans: int
    plain: float
    attached: float
    goal: float | None
    torch: float | None
    equal: bool
    budget: int
    peak: int
    later: float
    settled: float
    most: float | None


def text(steps: int, sizes: int, shortest: int, longest: int, vocabulary: int) -> list[Batch]:
    """Batches of four texts, as long as the longest of them."""
    lengths = random.Random(0).sample(range(shortest, longest), sizes)
    found = []
    for k in range(steps):
        made, length = torch.Generator().manual_seed(k), lengths[k % sizes]
        ids = torch.randint(vocabulary, (4, length), generator=made)
        mask = torch.ones_like(ids)
        for row in range(1, 4):
            mask[row, length - 2 * row :] = 0
        found.append({"input_ids": ids, "attention_mask": mask, "labels": torch.where(mask > 0, ids, -100)})
    return found


def transformers() -> Any:
    """The library; it imports torchvision, whose operators do not load on a CPU build: as the tests do it."""
    tests = Path(__file__).resolve().parents[1] / "tests" / "training" / "vision.py"
    spec = importlib.util.spec_from_file_location("vision", tests)
    assert spec is not None
    assert spec.loader is not None
    vision = importlib.util.module_from_spec(spec)
    sys.modules["vision"] = vision  # the schemas live as long as it does
    spec.loader.exec_module(vision)
    vision.import_can_go_on()
    return importlib.import_module("transformers")


def gpt2() -> nn.Module:
    found = transformers()
    model: nn.Module = found.GPT2LMHeadModel(
        found.GPT2Config(n_layer=4, n_embd=96, n_head=4, vocab_size=512, n_positions=256)
    )
    return model


def llama() -> nn.Module:
    found = transformers()
    model: nn.Module = found.LlamaForCausalLM(
        found.LlamaConfig(
            hidden_size=96, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, vocab_size=512
        )
    )
    return model


def language_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def pairs(steps: int, sizes: int, width: int) -> list[Batch]:
    """Sequences and targets, padded, with masks of the padding."""
    lengths = random.Random(1).sample(range(10, 60), sizes)
    found = []
    for k in range(steps):
        made, source, target = torch.Generator().manual_seed(k), lengths[k % sizes], lengths[(k + 3) % sizes]
        batch = {
            "src": torch.randn(8, source, width, generator=made),
            "tgt": torch.randn(8, target, width, generator=made),
            "src_key_padding_mask": torch.zeros(8, source, dtype=torch.bool),
            "tgt_key_padding_mask": torch.zeros(8, target, dtype=torch.bool),
        }
        batch["src_key_padding_mask"][0, source - 3 :] = True
        batch["tgt_key_padding_mask"][0, target - 3 :] = True
        found.append(batch)
    return found


def square(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).square().mean()
    return loss


class Residual(nn.Module):
    """Three stages of residual blocks with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU()) for _ in range(9)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.zeros(len(x), dtype=torch.long, device=x.device))


def images(epochs: int, side: int) -> list[Batch]:
    """Each epoch ends with a smaller batch."""
    made = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(n, 3, side, side, generator=made)} for _ in range(epochs) for n in (32, 32, 32, 20)]


def itself(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(**batch)
    return loss


def transformer() -> nn.Module:
    return nn.Transformer(64, 4, 2, 2, 128, batch_first=True)


def detector(name: str) -> nn.Module:
    transformers()  # makes torchvision's import possible
    detection = importlib.import_module("torchvision.models.detection")
    model: nn.Module = getattr(detection, name)(
        weights=None, weights_backbone=None, num_classes=5, min_size=224, max_size=256
    )
    return model


def pictures() -> list[Batch]:
    """Two images a batch, with four boxes each."""
    found: list[Batch] = []
    for k in range(STEPS):
        made = torch.Generator().manual_seed(k)
        images = [torch.rand(3, 224, 256, generator=made) for _ in range(2)]
        corners = [torch.rand(4, 2, generator=made) * 100 for _ in range(2)]
        boxes = [torch.cat([c, c + torch.rand(4, 2, generator=made) * 80 + 20], 1) for c in corners]
        found.append({"images": images, "targets": [{"boxes": b, "labels": torch.arange(1, 5)} for b in boxes]})
    return found


def sum_of_losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    total: torch.Tensor = torch.stack(list(model(**batch).values())).sum()
    return total


class Experts(nn.Module):
    """Blocks of four experts, each of which gets the tokens that its gate chooses."""

    def __init__(self, width: int = 128, blocks: int = 3) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(blocks))
        self.gates = nn.ModuleList(nn.Linear(width, 4) for _ in range(blocks))
        self.experts = nn.ModuleList(
            nn.ModuleList(
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(4)
            )
            for _ in range(blocks)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, gate, experts in zip(self.norms, self.gates, self.experts, strict=True):
            tokens = norm(x).flatten(0, 1)
            best, chosen = gate(tokens).softmax(-1).topk(2, -1)
            y = torch.zeros_like(tokens)
            for k, expert in enumerate(experts):  # type: ignore[arg-type]
                rows, which = torch.where(chosen == k)
                if len(rows):
                    y = y.index_add(0, rows, expert(tokens[rows]) * best[rows, which, None])
            x = x + y.view_as(x)
        return x


def hugging(name: str, config: str, **sizes: Any) -> nn.Module:
    found = transformers()
    model: nn.Module = getattr(found, name)(getattr(found, config)(**sizes))
    return model


def encoder_decoder(name: str, config: str, **sizes: Any) -> nn.Module:
    """Three layers each, of which some are dropped in every step."""
    return hugging(
        name, config, vocab_size=256, d_model=96, encoder_layers=3, decoder_layers=3, encoder_ffn_dim=256,
        decoder_ffn_dim=256, encoder_attention_heads=4, decoder_attention_heads=4, encoder_layerdrop=0.2, **sizes,
    )  # fmt: skip


def sounds(length: tuple[int, ...], labels: int, name: str) -> list[Batch]:
    found: list[Batch] = []
    for k in range(STEPS):
        made = torch.Generator().manual_seed(k)
        batch = {name: torch.randn(8, *length, generator=made)}
        found.append({**batch, "labels": torch.randint(3, 32, (8, labels), generator=made)})
    return found


def translations(steps: int) -> list[Batch]:
    """Batches of eight sentences and their translations, of other lengths in each step."""
    lengths = random.Random(0)
    found: list[Batch] = []
    for k in range(steps):
        source, target = lengths.randint(20, 90), lengths.randint(15, 70)
        made = torch.Generator().manual_seed(k)
        ids = torch.randint(2, 500, (8, source), generator=made)
        labels = torch.randint(2, 500, (8, target), generator=made)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def t5() -> nn.Module:
    return hugging(
        "T5ForConditionalGeneration", "T5Config", vocab_size=500, d_model=128, d_kv=32, d_ff=256, num_layers=3,
        num_heads=4, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip


def marian() -> nn.Module:
    return hugging(
        "MarianMTModel", "MarianConfig", vocab_size=500, d_model=96, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=192, decoder_ffn_dim=192,
        max_position_embeddings=128, pad_token_id=0, decoder_start_token_id=0, eos_token_id=1,
    )  # fmt: skip


def sides(steps: int) -> list[Batch]:
    """Four images a step, of other heights and widths each time."""
    lengths = random.Random(0)
    shapes = [(lengths.randint(40, 120), lengths.randint(40, 120)) for _ in range(steps)]
    return [{"x": torch.randn(4, 3, *s, generator=torch.Generator().manual_seed(k))} for k, s in enumerate(shapes)]


class Convolutions(nn.Module):
    """Convolutions, whose sizes are halved and doubled again, and a mean over all places."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1, stride=2), nn.GroupNorm(4, 32), nn.GELU(), nn.Upsample(scale_factor=2),
            nn.Conv2d(32, 32, 3), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3))).logsumexp(1).sum()


class Recurrent(nn.Module):
    """A language model of an LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm = nn.Embedding(512, 96), nn.LSTM(96, 192, 2, batch_first=True, dropout=0.1)
        self.body = nn.Sequential(nn.Linear(192, 768), nn.GELU(), nn.Linear(768, 192), nn.GELU())
        self.head = nn.Linear(192, 512)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.body(self.lstm(self.embedding(input_ids))[0]))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Speech(nn.Module):
    """An acoustic model, whose loss ``ctc_loss`` computes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(40, 96, 5, 2, 2), nn.GELU(), nn.Conv1d(96, 96, 5, 2, 2), nn.GELU())
        self.body = nn.ModuleList(
            nn.TransformerEncoderLayer(96, 4, 256, 0.1, F.gelu, batch_first=True) for _ in range(4)
        )
        self.head = nn.Linear(96, 32)

    def forward(self, sounds: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.front(sounds.transpose(1, 2)).transpose(1, 2)
        for layer in self.body:
            x = layer(x)
        scores = self.head(x).log_softmax(-1).transpose(0, 1)
        rows, length = labels.shape
        given, wanted = torch.full((rows,), scores.shape[0]), torch.full((rows,), length)
        return F.ctc_loss(scores, labels, given, wanted)


def recordings(steps: int) -> list[Batch]:
    """Eight recordings a step, of another length and with more or fewer letters each time."""
    lengths = random.Random(0)
    found: list[Batch] = []
    for k in range(steps):
        made = torch.Generator().manual_seed(k)
        frames, letters = lengths.randint(80, 320), lengths.randint(5, 18)
        sound = torch.randn(8, frames, 40, generator=made)
        found.append({"sounds": sound, "labels": torch.randint(1, 32, (8, letters), generator=made)})
    return found


STEPS = 10


SCRIPTS = {
    "gpt2, 26 lengths": Script(gpt2, lambda: text(40, 26, 20, 200, 512), language_loss, 5),
    "llama, 53 lengths": Script(llama, lambda: text(80, 53, 20, 200, 512), language_loss, 8),
    "transformer, 17 lengths": Script(transformer, lambda: pairs(40, 17, 64), square, 5, 85),
    "t5, 30 pairs of lengths": Script(t5, lambda: translations(30), language_loss, 7),
    "speech, 30 lengths": Script(Speech, lambda: recordings(30), itself, 7),
    "marian, 30 pairs of lengths": Script(marian, lambda: translations(30), language_loss, 7),
    "convolutions, 30 pairs of sides": Script(Convolutions, lambda: sides(30), itself, 5, 75),
    "lstm, 26 lengths": Script(Recurrent, lambda: text(40, 26, 20, 100, 512), itself, 5, 105),
    "resnet, smaller last batch": Script(Residual, lambda: images(4, 32), itself),
    "fcos": Script(lambda: detector("fcos_resnet50_fpn"), pictures, sum_of_losses, None, 80, 1.3),
    "retinanet": Script(lambda: detector("retinanet_resnet50_fpn"), pictures, sum_of_losses, None, 80, 1.3),
    "experts": Script(
        Experts,
        lambda: [{"x": torch.randn(16, 64, 128, generator=torch.Generator().manual_seed(k))} for k in range(STEPS)],
        square, None, 80, 1.3,
    ),
    "opt, layers dropped": Script(
        lambda: hugging(
            "OPTForCausalLM", "OPTConfig", hidden_size=96, num_hidden_layers=4, ffn_dim=384, num_attention_heads=4,
            vocab_size=512, max_position_embeddings=128, word_embed_proj_dim=96, layerdrop=0.2,
        ),
        lambda: text(STEPS, 1, 95, 97, 512), language_loss, None, 70, 1.3,
    ),
    "bart, layers dropped": Script(
        lambda: encoder_decoder("BartForConditionalGeneration", "BartConfig", max_position_embeddings=128),
        lambda: text(STEPS, 1, 95, 97, 256), language_loss, None, 70, 1.3,
    ),
    "whisper, layers dropped": Script(
        lambda: encoder_decoder(
            "WhisperForConditionalGeneration", "WhisperConfig", max_source_positions=100, max_target_positions=64,
            num_mel_bins=40, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        ),
        lambda: sounds((40, 200), 32, "input_features"), language_loss, None, 70, 1.3,
    ),
    "wav2vec2": Script(
        lambda: hugging(
            "Wav2Vec2ForCTC", "Wav2Vec2Config", vocab_size=32, hidden_size=96, num_hidden_layers=3,
            num_attention_heads=4, intermediate_size=256, conv_dim=(64, 64, 64), conv_stride=(5, 2, 2),
            conv_kernel=(10, 3, 3), num_feat_extract_layers=3, num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4, mask_time_length=4,
        ),
        lambda: sounds((8000,), 10, "input_values"), language_loss, None, 70, 1.3,
    ),
    "transformer": Script(transformer, lambda: pairs(STEPS, 1, 64), square, None, 85, 1.3),
    # One kernel: there is nothing to save.
    "lstm": Script(Recurrent, lambda: text(STEPS, 1, 95, 97, 512), itself, None, 105, 1.3),
}  # fmt: skip
SHORT = {
    "transformer": Script(
        lambda: nn.Transformer(16, 2, 1, 1, 32, batch_first=True), lambda: pairs(4, 3, 16), square, 5,
    ),
    "resnet": Script(Residual, lambda: images(1, 8), itself),
    "experts": Script(
        lambda: Experts(16, 1),
        lambda: [{"x": torch.randn(8, 64, 16, generator=torch.Generator().manual_seed(k))} for k in range(4)],
        square, None, 80,
    ),
}  # fmt: skip


def run(script: Script, budget: int | None, device: str = "cpu", captures: bool = False) -> dict[str, Any]:
    """Train once; seconds, losses, the plans made, and the largest peak of a step in a fifth pass. ``captures``: one
    pass alone, of the model as ``torch.compile`` captures it.

    Seconds are of the processor, and on another device of the clock.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    clock = time.process_time if device == "cpu" else time.perf_counter
    model = script.model().to(device)
    batches = tree_map_only(torch.Tensor, lambda t: t.to(device), script.batches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.zero_grad()
    start, losses, times = clock(), [], []
    handle = None if budget is None else rockmate.attach(model, budget, cache=False)
    if captures:
        model.compile(backend="eager")

    def step(batch: Batch) -> None:
        begun = clock()
        loss = script.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()).hex())
        times.append(clock() - begun)

    def seeded(number: int) -> None:
        for generator in (torch.manual_seed, random.seed, numpy.random.seed):
            generator(number)
        step(batches[number])

    steps = range(len(batches))
    for k in steps:
        seeded(k)
    seconds, peaks = clock() - start, []
    if captures:
        return {"seconds": seconds}
    for _ in range(3):  # a size that fits as it is gets its plan at its second call, and the others meet that plan then
        for k in steps:
            seeded(k)
    settled = times[-len(batches) :]
    for k in steps:  # all is known by now: no plan can be made while memory is measured
        peaks.append(rockmate.measure_peak(partial(seeded, k), torch.device(device)))
    plans = 0 if handle is None else handle.plans_made
    found = {"losses": losses, "plans": plans, "times": times[: len(batches)], "settled": settled}
    return {"seconds": seconds, "peak": max(peaks), **found}


def in_a_process(name: str, budget: int | None, short: bool, captures: bool = False) -> dict[str, Any]:
    """``run`` in a fresh process; of toy sizes, whose times say nothing, in this one."""
    if short:
        with warnings.catch_warnings(action="ignore"):
            return run(SHORT[name], budget, captures=captures)
    way = "captures" if captures else "plain" if budget is None else str(budget)
    command = [sys.executable, __file__, name, "--one", way]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}: {done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(name: str, script: Script, repeat: int, short: bool) -> Row:
    """Plain and attached in turns."""
    plain = [in_a_process(name, None, short)]
    budget = int(plain[0]["peak"] * script.percent / 100)
    attached = []
    for k in range(repeat):
        attached.append(in_a_process(name, budget, short))
        if k:
            plain.append(in_a_process(name, None, short))
    batches, alone = script.batches(), statistics.median(x["seconds"] for x in plain)
    captured = None if script.goal is None else in_a_process(name, None, short, captures=True)["seconds"] - alone
    return Row(
        name,
        len(batches),
        len({_sizes(batch) for batch in batches}),
        attached[0]["plans"],
        round(alone, 2),
        round(statistics.median(x["seconds"] for x in attached), 2),
        script.goal,
        None if captured is None else round(captured, 2),
        all(x["losses"] == plain[0]["losses"] for x in attached),
        budget,
        max(x["peak"] for x in attached),
        *(round(median_of(attached, what) / median_of(plain, what), 3) for what in ("times", "settled")),
        script.most,
    )


def _sizes(batch: Batch) -> tuple[torch.Size | None, ...]:
    return tuple(t.shape if isinstance(t, torch.Tensor) else None for t in batch.values())


def median_of(runs: list[dict[str, Any]], what: str) -> float:
    """Seconds of a step after the third of these."""
    return statistics.median(seconds for run in runs for seconds in run[what][3:])


def main(argv: list[str] | None = None) -> int:
    """Print one row a script."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="scripts, or parts of their names; all by default")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--short", action="store_true", help="toy sizes, in one process")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    scripts = SHORT if options.short else SCRIPTS
    if options.one:
        warnings.simplefilter("ignore")
        budget = int(options.one) if options.one.isdigit() else None
        print(json.dumps(run(SCRIPTS[options.names[0]], budget, captures=options.one == "captures")))
        return 0
    names = [name for name in scripts if not options.names or any(part in name for part in options.names)]
    if not names:
        parser.error(f"no script has such a name: give parts of these: {'; '.join(scripts)}")
    print(
        "script                           steps  sizes  plans   plain  attached    more    goal    torch  equal"
        "  peak of budget   later  settled    goal"
    )
    rows = []
    for name in names:
        row = measured(name, scripts[name], options.repeat, options.short)
        rows.append(row)
        goal = "" if row.goal is None else f"{row.goal:.0f} s"
        most = "" if row.most is None else f"{row.most} x"
        least = "" if row.torch is None else f"{row.torch:.1f} s"
        print(
            f"{row.name:<33}{row.steps:>5}  {row.sizes:>5}  {row.plans:>5}  {row.plain:>4.1f} s  {row.attached:>6.1f} s"
            f"  {row.attached - row.plain:>4.1f} s  {goal:>6}  {least:>7}  {'yes' if row.equal else 'NO':>5}"
            f"  {100 * row.peak / row.budget:>12.1f} %  {row.later:>4.2f} x  {row.settled:>5.2f} x  {most:>6}",
            flush=True,
        )
    if options.out:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    return 0 if all(row.equal and row.peak <= row.budget for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
