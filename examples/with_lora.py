"""LoRA with PEFT: attach the model that PEFT returns. Frozen weights need no gradients, and the plan knows that.

python examples/with_lora.py
"""

try:
    import torchvision  # noqa: F401 - transformers imports it where it is installed
except ImportError:
    pass
except RuntimeError as error:  # compiled for another build of torch
    raise SystemExit(f"torchvision does not fit this torch ({error}): install both from one index") from None

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import rockmate


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    lora = LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(LlamaForCausalLM(config), lora)
    rockmate.attach(model, "50%")
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(5):
        ids = torch.randint(512, (8, 64))
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
    print(rockmate.attached(model).plan)


if __name__ == "__main__":
    main()
