"""Section ``zoo``: small models of many kinds, against eager mode and against eager mode's own second run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from gpu_run.context import ROOT, Context, load, portion
from gpu_run.models import torchvision_models
from rkgb.trace.preserved import preserved
from rkgb.trees import tensors_of
from rockmate import Rockmate

Built = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]

VISION = (
    "resnet18 squeezenet1_1 mobilenet_v3_small mnasnet0_5 shufflenet_v2_x0_5 regnet_y_400mf efficientnet_b0 vgg11_bn"
).split()
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LANGUAGE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "hf_gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}),
    "hf_llama": ("LlamaConfig", "LlamaForCausalLM", SMALL),
    "hf_qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SMALL | {"num_key_value_heads": 2}),
    "hf_opt": ("OPTConfig", "OPTForCausalLM", SMALL | {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "hf_bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 64, "n_layer": 2, "n_head": 4}),
    "hf_bert": ("BertConfig", "BertForMaskedLM", SMALL),
    "hf_roberta": ("RobertaConfig", "RobertaForMaskedLM", SMALL),
    "hf_distilbert": (
        "DistilBertConfig",
        "DistilBertForMaskedLM",
        {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    ),
}


def builders() -> dict[str, Callable[[], Built]]:
    """Thirty cases: those of the tests, then torchvision's and transformers' models with random weights."""
    small = load(ROOT / "tests" / "models.py")
    found: dict[str, Callable[[], Built]] = {}
    for case in small.ZOO:
        found[case.name] = lambda case=case: (case.model(), *case.call(1))
    for name in VISION:
        found[f"tv_{name}"] = lambda name=name: _vision(name)
    for name in LANGUAGE:
        found[name] = lambda name=name: _language(name)
    return found


def _vision(name: str) -> Built:
    models = torchvision_models()
    torch.manual_seed(0)
    return getattr(models, name)(weights=None), (torch.randn(4, 3, 64, 64),), {}


def _language(name: str) -> Built:
    with contextlib.suppress(ImportError):
        torchvision_models()  # transformers imports it where it is installed
    import transformers

    config, model, sizes = LANGUAGE[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, config)(vocab_size=128, **sizes)).train()
    return made, (torch.randint(3, 128, (8, 64)),), {}


def run(ctx: Context) -> None:
    """A part of them; in a dry run, one of each source but transformers, whose import takes longer than the rest."""
    made = builders()
    names = ["dropout_mlp", "mlp", "tv_squeezenet1_1"] if ctx.dry else portion(made, ctx.part)
    ctx.run_each({name: (lambda name=name: _compare(ctx, name, made[name])) for name in names}, 10)


def _compare(ctx: Context, name: str, build: Callable[[], Built]) -> None:
    try:
        built = build()
    except ImportError as error:
        ctx.emit(case=name, skipped=f"not installed: {error}")
        return
    zoo = load(ROOT / "benchmarks" / "zoo.py")
    built = zoo.moved(built, str(ctx.device))
    seeds: dict[int, torch.Tensor] = {}
    eager, again = zoo.fresh(built), zoo.fresh(built)
    with zoo.plain_checkpoints():
        expected = zoo.step(eager[0], *eager, seeds)
        repeated = zoo.step(again[0], *again, seeds)
    model, args, kwargs = zoo.fresh(built)
    rk = Rockmate(model, args, "100 TiB", sample_kwargs=kwargs, costs="flops", cache=False)
    with preserved(model, tensors_of((args, kwargs)), [key for key, _ in model.named_parameters()]):
        zoo.step(rk, model, args, kwargs, seeds)  # plans for the values that this seed brings
    zoo.forget_gradients(model, args, kwargs)
    frontier = rk.frontier()
    rk.budget = (3 * frontier.min_budget + frontier.max_budget) // 4
    found = zoo.step(rk, model, args, kwargs, seeds)
    gaps = {what: zoo.difference(found[what], expected[what]) for what in found}
    own = {what: zoo.difference(repeated[what], expected[what]) for what in found}
    ctx.emit(
        case=name,
        nodes=len(rk.plan.problem.nodes),
        run_again=rk.plan.recomputed,
        equal=not any(gaps.values()),
        as_near_as_eager=all(gaps[what] <= 2 * own[what] for what in gaps),
        **gaps,
        **{f"{what}_of_eager": gap for what, gap in own.items()},
    )
