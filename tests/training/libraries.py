"""Libraries that people train with, for tests. A test file that imports this is skipped where one is missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vision import import_can_go_on

import_can_go_on()
transformers: Any = pytest.importorskip("transformers")
peft: Any = pytest.importorskip("peft")
lightning: Any = pytest.importorskip("lightning")
accelerate: Any = pytest.importorskip("accelerate")

QUIET = [
    r"ignore:`isinstance\(treespec, LeafSpec\)` is deprecated:FutureWarning",
    "ignore:The '.*_dataloader' does not have many workers",
    "ignore:The number of training batches",
    "ignore:Checkpoint directory .* exists and is not empty",
]

LORA = {"r": 2, "lora_alpha": 4, "lora_dropout": 0.1, "task_type": "CAUSAL_LM"}
ASKED = "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning:transformers.modeling_utils"


def llama(**options: Any) -> Any:
    """Grouped queries, rotary positions."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
        **options,
    )
    return transformers.LlamaForCausalLM(config)
