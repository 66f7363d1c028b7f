"""Models that compute their loss: the least budget beside eager's peak, and predicted peaks beside measured ones.

    python benchmarks/losses.py [NAME …] [--jobs 2] [--out FILE] [--short]
    python benchmarks/losses.py --gpt2 [--out FILE]

Each model runs in a process of its own, in the two ways in which people write a step: ``out = model(**batch)`` and
then ``out.loss.backward()``, which holds ``out`` through the backward, and ``model(**batch).loss.backward()``.
``--out`` adds to what FILE, which is JSON, has of other models, and writes a page of Markdown beside it. ``--gpt2`` is
for GPT-2 of 124 million parameters; with PYTHONPATH naming another checkout it adds that one's figures, under its
commit.
Exit status 1 if a check fails. Needs transformers and torchvision, but for ``--short``.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import rockmate
from rockmate import InfeasibleBudgetError, Rockmate, measure_peak

FRACTIONS = (0.0, 1 / 3, 2 / 3)  # of the way from the least budget to the one without recomputation
PERCENT = (60, 45, 30)  # of eager's peak, for GPT-2
VOCABULARY = 20000


@dataclass(frozen=True)
class Case:
    """``batch``: keyword arguments; ``loss``: of what the model returns. ``note``: for the page."""

    model: nn.Module
    batch: dict[str, Any]
    loss: Callable[[Any], torch.Tensor]
    note: str = ""


class Alone(nn.Module):
    """A model that returns its loss and nothing else."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.model, self.loss = case.model, case.loss

    def forward(self, **batch: Any) -> torch.Tensor:
        return self.loss(self.model(**batch))


class Layer(nn.Module):
    """Causal attention and a perceptron, each beside a way around it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.before(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(mixed.transpose(1, 2).flatten(2))
        return x + self.narrow(F.gelu(self.wide(self.between(x))))


class Language(nn.Module):
    """A language model that returns (logits, loss) as nanoGPT's does."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Layer(width, 4) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, words: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


class Experts(nn.Module):
    """Perceptrons of which a gate mixes two for each row; with it the loss that evens out how often each is chosen."""

    def __init__(self, width: int, layers: int, experts: int = 4) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, experts) for _ in range(layers))
        self.experts = nn.ModuleList(
            nn.ModuleList(nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)))
            for _ in range(layers)
            for _ in range(experts)
        )
        self.count = experts

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        uneven = x.new_zeros(())
        for layer, gate in enumerate(self.gates):
            shares = gate(x).softmax(-1)
            best, which = shares.topk(2, -1)
            chosen = torch.zeros_like(shares).scatter(-1, which, best)
            y = x
            for k in range(self.count):
                first, act, second = self.experts[layer * self.count + k]
                y = y + chosen[:, k : k + 1] * second(act(first(x)))
            uneven = uneven + self.count * (shares.mean(0) * (chosen > 0).float().mean(0)).sum()
            x = y
        return x, uneven


@functools.cache
def transformers() -> Any:
    """transformers imports torchvision, whose operators do not load on a CPU build: as the tests do it."""
    path = Path(__file__).resolve().parents[1] / "tests" / "training" / "vision.py"
    spec = importlib.util.spec_from_file_location("vision", path)
    assert spec is not None and spec.loader is not None
    vision = importlib.util.module_from_spec(spec)
    sys.modules["vision"] = vision  # the schemas live as long as it does
    spec.loader.exec_module(vision)
    vision.import_can_go_on()
    import transformers

    return transformers


def of_loss(out: Any) -> torch.Tensor:
    return out.loss


def tokens(*shape: int, below: int = VOCABULARY) -> torch.Tensor:
    return torch.randint(0, below, shape)


def hugging(kind: str) -> Case:
    """A small model of transformers, with random weights."""
    t = transformers()
    ids = tokens(4, 128)
    wide = {"vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    batch = {"input_ids": ids, "labels": ids}
    if kind == "GPT-2":
        few = {"n_layer": 4, "n_embd": 128, "n_head": 4, "n_positions": 128}
        model = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCABULARY, use_cache=False, **few))
    elif kind == "Llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**wide, intermediate_size=344, use_cache=False))
    elif kind == "BERT":
        model = t.BertForSequenceClassification(t.BertConfig(**wide, intermediate_size=512, num_labels=3))
        batch = {"input_ids": tokens(8, 128), "labels": tokens(8, below=3)}
    elif kind == "T5":
        few = {"d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 3, "num_heads": 4}
        model = t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=VOCABULARY, use_cache=False, decoder_start_token_id=0, **few)
        )
    else:
        wide.pop("vocab_size")
        model = t.ViTForImageClassification(
            t.ViTConfig(**wide, intermediate_size=512, image_size=64, patch_size=8, num_labels=10)
        )
        batch = {"pixel_values": torch.randn(8, 3, 64, 64), "labels": tokens(8, below=10)}
    return Case(model, batch, of_loss)


def of_dict(out: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack(list(out.values())).sum()


def detection(kind: str, resized: bool = False) -> Case:
    """torchvision's detectors on one small map of features."""
    transformers()
    from torchvision.models.detection import FCOS, RetinaNet
    from torchvision.models.detection.anchor_utils import AnchorGenerator

    layers = [(nn.Conv2d(k, 32, 3, s, 1), nn.BatchNorm2d(32), nn.ReLU()) for k, s in ((3, 1), (32, 2), (32, 2))]
    body = nn.Sequential(*(m for layer in layers for m in layer))
    body.out_channels = 32
    make, ratios = (FCOS, (1.0,)) if kind == "FCOS" else (RetinaNet, (0.5, 1.0, 2.0))
    model = make(
        body,
        5,
        anchor_generator=AnchorGenerator(((16,),), (ratios,)),
        min_size=128,
        max_size=128,
        _skip_resize=not resized,
    )
    boxes = torch.tensor([[10.0, 10.0, 60.0, 60.0], [30.0, 30.0, 100.0, 110.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in range(4)]
    batch = {"images": [torch.rand(3, 128, 128) for _ in range(4)], "targets": targets}
    note = "_skip_resize=True"
    if resized:
        note = "resized by the model, which draws the size, one of one, and reads the number drawn by .item()"
    return Case(model, batch, of_dict, note)


def nanogpt(short: bool = False) -> Case:
    vocabulary, layers = (512, 2) if short else (VOCABULARY, 4)
    model = Language(vocabulary, 128, 64 if short else 128, layers)
    words = tokens(4, 129, below=vocabulary)
    return Case(model, {"words": words[:, :-1].contiguous(), "targets": words[:, 1:].contiguous()}, lambda out: out[1])


def experts(short: bool = False) -> Case:
    width, layers = (64, 2) if short else (128, 4)
    x, y = torch.randn(512, width), torch.randn(512, width)
    return Case(Experts(width, layers), {"x": x}, lambda out: F.mse_loss(out[0], y) + 0.01 * out[1])


CASES: dict[str, Callable[[], Case]] = {
    **{name: partial(hugging, name) for name in ("GPT-2", "Llama", "BERT", "T5", "ViT")},
    "nanoGPT": nanogpt,
    "experts": experts,
    "FCOS": partial(detection, "FCOS"),
    "RetinaNet": partial(detection, "RetinaNet"),
    "FCOS, resized": partial(detection, "FCOS", True),
}
SHORT: dict[str, Callable[[], Case]] = {
    "tiny nanoGPT": partial(nanogpt, True),
    "tiny experts": partial(experts, True),
}


def holding(case: Case, call: nn.Module) -> None:
    out = call(**case.batch)
    case.loss(out).backward()


def letting_go(case: Case, call: nn.Module) -> None:
    case.loss(call(**case.batch)).backward()


def of_alone(case: Case, call: nn.Module) -> None:
    call(**case.batch).backward()


SCRIPTS = {"let go": letting_go, "held": holding}


def peak_of(step: Callable[[], None], model: nn.Module, warm: int) -> int:
    """Of a step after ``warm`` others, no gradient being there before each."""
    for _ in range(warm):
        model.zero_grad()
        step()
    model.zero_grad()
    gc.collect()
    return measure_peak(step, "cpu")


def beside(rk: Rockmate) -> int:
    """Bytes of outputs that a plan does not count once forward has returned."""
    k = rk.plan.graph
    d = k.s.d
    counted = k.usage.held_storages(d)
    sizes = {d.values[v].storage: d.values[v].bytes for v in d.outputs}
    return sum(size for storage, size in sizes.items() if storage not in counted)


def row_of(case: Case, script: str, rk: Rockmate, budget: int) -> dict[str, Any]:
    """One budget: bytes, the predicted overhead as a fraction of eager's step, what the caller was warned of."""
    step = SCRIPTS[script]
    row: dict[str, Any] = {"script": script, "budget": budget}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rk.zero_grad()
        rk.budget = budget
        for _ in range(2):
            rk.zero_grad()
            step(case, rk)
        if rk.plans_made > 1:
            return {**row, "refused": f"plans anew at every step ({rk.plans_made} plans in 2 steps)"}
        measured = peak_of(partial(step, case, rk), rk, 0)
    return {
        **row,
        "predicted": rk.plan.predicted_peak,
        "measured": measured,
        "overhead": rk.plan.predicted_overhead,
        "beside": beside(rk) if script == "held" else 0,
        "warnings": sorted({f"{w.category.__name__}: {w.message}" for w in caught}),
    }


def figures(name: str, make: Callable[[], Case], parts: tuple[float, ...]) -> dict[str, Any]:
    """Everything about one model."""
    torch.manual_seed(0)
    case = make()
    case.model.train()
    alone = Alone(case)
    found = {"name": name, "note": case.note}
    for script, step in SCRIPTS.items():
        found[f"eager {script}"] = peak_of(partial(step, case, case.model), case.model, 1)
    found["eager alone"] = peak_of(partial(of_alone, case, alone), alone, 1)
    case.model.zero_grad()
    inside = rockmate.frontier(alone, (), sample_kwargs=case.batch, costs="flops")
    found |= {"least alone": inside.min_budget, "most alone": inside.max_budget, "rows": []}
    for script in SCRIPTS:
        case.model.zero_grad()
        rk = Rockmate(case.model, (), "1 TiB", sample_kwargs=case.batch, costs="flops", cache=False)
        curve = rk.frontier()
        found |= {"least": curve.min_budget, "most": curve.max_budget}
        for part in parts:
            budget = curve.min_budget + int(part * (curve.max_budget - curve.min_budget))
            found["rows"].append(row_of(case, script, rk, budget))
            if "refused" in found["rows"][-1]:
                return found
            found.setdefault("least after", rk.frontier().min_budget)
    return found


def of_gpt2(place: str, measured: bool, eager: int) -> dict[str, Any]:
    """GPT-2 of 124 million parameters, its loss ``inside`` or ``outside``. ``eager``: its peak, 0 if not known yet."""
    torch.manual_seed(0)
    t = transformers()
    config = t.GPT2Config(use_cache=False)
    ids = tokens(4, 512, below=config.vocab_size)
    batch = {"input_ids": ids, "labels": ids} if place == "inside" else {"input_ids": ids}

    def loss_of(out: Any) -> torch.Tensor:
        return out.loss if place == "inside" else F.cross_entropy(out.logits.flatten(0, 1), ids.flatten())

    case = Case(t.GPT2LMHeadModel(config).train(), batch, loss_of)
    found: dict[str, Any] = {"place": place, "commit": commit()}
    found["eager"] = eager or peak_of(partial(letting_go, case, case.model), case.model, 0)
    case.model.zero_grad()
    rk = Rockmate(case.model, (), "1 TiB", sample_kwargs=batch, costs="flops", cache=False)
    found["first"] = of_budgets(rk, found["eager"])
    if place == "outside" and hasattr(rk.plan, "room"):
        rk.budget = max(int(PERCENT[0] / 100 * found["eager"]), found["first"]["least"])
        letting_go(case, rk)
        rk.zero_grad()
        rk(**batch)  # plans for what the step has shown
        found["adapted"] = of_budgets(rk, found["eager"])
    if measured:
        found["measured"] = measured_at(case, int(PERCENT[1] / 100 * found["eager"]))
    return found


def measured_at(case: Case, budget: int) -> dict[str, Any]:
    """Planned with measured costs, and a step measured."""
    rk = Rockmate(case.model, (), budget, sample_kwargs=case.batch, cache=False)
    peak = peak_of(partial(letting_go, case, rk), rk, 1)
    plan = rk.plan
    return {"budget": budget, "predicted": plan.predicted_peak, "measured": peak, "overhead": plan.predicted_overhead}


def of_budgets(rk: Rockmate, eager: int) -> dict[str, Any]:
    """The least budget, and predicted overheads; None where a budget is below it."""
    found: dict[str, Any] = {"least": rk.frontier().min_budget}
    for percent in PERCENT:
        try:
            rk.budget = int(percent / 100 * eager)
            found[str(percent)] = rk.plan.predicted_overhead
        except InfeasibleBudgetError:
            found[str(percent)] = None
    return found


def commit() -> str:
    """Of the product that runs."""
    folder = Path(rockmate.__file__).parent
    command = ["git", "log", "-1", "--format=%h", "--", "rockmate", "rkgb", "solvers"]
    return subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, check=False).stdout.strip()


def missed(found: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    name, rows = found["name"], found.get("rows", [])
    misses = [found["error"]] if "error" in found else []
    for row in (r for r in rows if "measured" in r):
        where = f"{name}, {row['script']}, budget {mib(row['budget'])}"
        low, high = row["predicted"], row["predicted"] + row["beside"]
        off = max(low - row["measured"], row["measured"] - high) / row["measured"]
        if row["measured"] > row["budget"] + row["beside"]:
            misses.append(f"{where}: {row['measured'] - row['budget'] - row['beside']} bytes above it")
        if off > 0.005:
            misses.append(f"{where}: predicted {low}, measured {row['measured']}: {100 * off:.2f} % off")
        if row["warnings"]:
            misses.append(f"{where}: warned: {'; '.join(row['warnings'])}")
    if "least" in found:
        share, share_alone = found["least"] / found["eager let go"], found["least alone"] / found["eager alone"]
        if share_alone < 0.6 <= share:
            misses.append(f"{name}: least {100 * share:.0f} % of eager, with the loss alone {100 * share_alone:.0f} %")
    return misses


def mib(size: int) -> str:
    return f"{size / 2**20:.1f}"


def line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def header(*cells: str) -> list[str]:
    return [line(*cells), "|" + "---|" * len(cells)]


EXPLAINED = """\
Sizes in MiB. Least: the least budget that can be planned before any step, and its share of eager's peak; after: the
same once steps have shown what the loss takes. Alone: the same model, wrapped so that it returns its loss only. Eager's
peak where the outputs are let go before the backward, and where they are held.

Rows: a step in each of the two ways to write it (`model(**batch).loss.backward()` lets the outputs go,
`out = model(**batch); out.loss.backward()` holds them), at the least budget, and a third and two thirds of the way to
the one without recomputation. Predicted is `rk.plan.predicted_peak` after two steps, measured the step after these,
gradients being None before each. Beside: outputs held that the budget has no room for; they are the caller's, so that
the limit is the budget and these, and the measured peak lies between the predicted one and the two together. Costs are
modelled (`costs="flops"`), one thread."""


def page(data: dict[str, Any]) -> str:
    """The results as Markdown."""
    models, versions = data.get("models", []), data.get("versions", {})
    misses = [miss for found in models for miss in missed(found)]
    out = ["# Models that compute their loss", ""]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    out += [f"`OMP_NUM_THREADS=1 python benchmarks/losses.py --out benchmarks/results/losses.json`; {named}.", ""]
    out += ["Written by that program from [losses.json](losses.json).", ""]
    out += ["## Misses", "", *(f"- {miss}" for miss in misses or ["None."]), "", "## Peaks", "", EXPLAINED, ""]
    out += header("model", "eager", "eager, held", "least", "after", "alone: eager", "alone: least")
    out += [summary(found) for found in models if "least" in found]
    out += ["", *header("model", "outputs", "budget", "predicted", "measured", "off", "beside", "overhead")]
    out += [detail(found["name"], row) for found in models for row in found.get("rows", [])]
    out += ["", *(f"- {found['name']}: {found['note']}" for found in models if found.get("note")), ""]
    return "\n".join(out + (gpt2_page(data["gpt2"]) if data.get("gpt2") else []))


def summary(found: dict[str, Any]) -> str:
    def share(least: int, eager: int) -> str:
        return f"{mib(least)} ({100 * least / eager:.0f} %)"

    eager, after = found["eager let go"], found.get("least after")
    return line(
        found["name"],
        mib(eager),
        mib(found["eager held"]),
        share(found["least"], eager),
        share(after, eager) if after else "–",
        mib(found["eager alone"]),
        share(found["least alone"], found["eager alone"]),
    )


def detail(name: str, row: dict[str, Any]) -> str:
    if "refused" in row:
        return line(name, row["script"], mib(row["budget"]), row["refused"], "–", "–", "–", "–")
    low, high = row["predicted"], row["predicted"] + row["beside"]
    off = row["measured"] - min(max(row["measured"], low), high)
    sizes = [mib(row[key]) for key in ("budget", "predicted", "measured")]
    more = [
        f"{100 * abs(off) / row['measured']:.2f} %",
        (mib(row["beside"]) if row["beside"] > 2**17 else f"{row['beside']} bytes") if row["beside"] else "–",
        f"{100 * row['overhead']:.1f} %",
    ]
    return line(name, row["script"], *sizes, *more)


def gpt2_page(runs: list[dict[str, Any]]) -> list[str]:
    """The table of GPT-2."""
    out = [
        "## GPT-2, 124 million parameters",
        "",
        "`OMP_NUM_THREADS=2 python benchmarks/losses.py --gpt2 --out benchmarks/results/losses.json`, and the same",
        "with `PYTHONPATH` naming a checkout of f0d8f61, which is before outputs without a gradient were planned for.",
        "Batch 4 × 512, vocabulary 50,257, gradients included. Inside: `labels=`, the loss computed by the model;",
        "outside: it returns logits, and the loop calls `F.cross_entropy` on them. Overheads are predicted, at budgets",
        "of a percentage of eager's peak; – is below the least budget.",
        "",
        *header("loss", "commit", "plan", "eager", "least", *(f"overhead at {p} %" for p in PERCENT)),
    ]
    for run in runs:
        for key, when in (("first", "before any step"), ("adapted", "after a step")):
            if key in run:
                found, eager = run[key], run["eager"]
                least = f"{mib(found['least'])} ({100 * found['least'] / eager:.1f} %)"
                overheads = (found[str(p)] for p in PERCENT)
                cells = ("–" if o is None else f"{100 * o:.1f} %" for o in overheads)
                out.append(line(run["place"], run["commit"], when, mib(eager), least, *cells))
    out.append("")
    for run in (r for r in runs if "measured" in r):
        budget, predicted, measured = (mib(run["measured"][key]) for key in ("budget", "predicted", "measured"))
        overhead = f"{100 * run['measured']['overhead']:.1f} %"
        out += [
            f"Loss {run['place']}, {run['commit']}, planned with measured costs for {budget} MiB: predicted peak",
            f"{predicted} MiB, measured {measured} MiB, predicted overhead {overhead}.",
            "",
        ]
    return out


def child(*arguments: str, limit: float = 1500) -> dict[str, Any]:
    """What this program prints as JSON for ``arguments``, in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"name": arguments[1], "error": f"{arguments[1]}: not done after {limit:.0f} s"}
    if done.returncode:
        return {"name": arguments[1], "error": f"{arguments[1]}: {(done.stderr.strip() or '?').splitlines()[-1]}"}
    return json.loads(done.stdout.splitlines()[-1])


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """``old`` with ``new`` in the places of those of the same keys."""
    found = {tuple(entry.get(key) for key in keys): entry for entry in old}
    found |= {tuple(entry.get(key) for key in keys): entry for entry in new}
    return list(found.values())


def main() -> int:
    """Print a line for each model and each miss; 1 if there is a miss."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, help="write the figures as JSON, and beside it a page of Markdown")
    parser.add_argument("--short", action="store_true", help="two tiny models")
    parser.add_argument("--gpt2", action="store_true", help="GPT-2 of 124 million parameters")
    parser.add_argument("--measured", action="store_true", help="with --gpt2: also plan and measure a step, inside")
    parser.add_argument("--page", action="store_true", help="only write the page anew")
    parser.add_argument("--figures", help=argparse.SUPPRESS)
    parser.add_argument("--place", help=argparse.SUPPRESS)
    parser.add_argument("--eager", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.figures or options.place:
        cases = CASES | SHORT
        parts = FRACTIONS[1:2] if options.figures in SHORT else FRACTIONS
        one = of_gpt2(options.place, options.measured, options.eager) if options.place else None
        print(json.dumps(one or figures(options.figures, cases[options.figures], parts)))
        return 0
    data: dict[str, Any] = {}
    if options.out and options.out.exists():
        data = json.loads(options.out.read_text())
    found: list[dict[str, Any]] = []
    if options.gpt2:
        for place in ("inside", "outside"):
            known = [run["eager"] for run in data.get("gpt2", []) if run["place"] == place]
            more = ["--measured"] if options.measured and place == "inside" else []
            found.append(child("--place", place, "--eager", str(known[0] if known else 0), *more))
            print(json.dumps(found[-1]), flush=True)
        data["gpt2"] = merged(data.get("gpt2", []), [f for f in found if "error" not in f], "commit", "place")
    elif not options.page:
        with ThreadPoolExecutor(options.jobs) as pool:
            names = options.names or list(SHORT if options.short else CASES)
            for one in pool.map(lambda name: child("--figures", name), names):
                print(json.dumps(one), flush=True)
                found.append(one)
        data["models"] = merged(data.get("models", []), found, "name")
        data["versions"] = {"commit": commit()} | {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "torchvision")
            if importlib.util.find_spec(name)
        }
    if options.out:
        options.out.write_text(json.dumps(data, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(page(data))
    misses = [miss for one in found for miss in (missed(one) if "name" in one else [])]
    print("\n".join(misses or ["no misses"]))
    return 1 if misses else 0


if __name__ == "__main__":
    sys.exit(main())
