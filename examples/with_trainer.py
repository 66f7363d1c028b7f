"""transformers' Trainer: a callback attaches the model, and logs what it takes beside the loss.

python examples/with_trainer.py
"""

try:
    import torchvision  # noqa: F401 - transformers imports it where it is installed
except ImportError:
    pass
except RuntimeError as error:  # compiled for another build of torch
    raise SystemExit(f"torchvision does not fit this torch ({error}): install both from one index") from None

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rockmate
from rockmate.integrations.transformers import RockmateCallback


class Texts(torch.utils.data.Dataset):
    """Rows of tokens."""

    def __init__(self) -> None:
        self.rows = torch.randint(512, (48, 64), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[k], "labels": self.rows[k]}


def main() -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=512, n_positions=64, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        options = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=5,
            logging_steps=1,
            learning_rate=1e-3,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        trainer = Trainer(
            model,
            options,
            train_dataset=Texts(),
            callbacks=[RockmateCallback("50%")],
        )
        trainer.train()
        trainer.save_model(folder)
        GPT2LMHeadModel.from_pretrained(folder)  # saved as without Rockmate
    for entry in trainer.state.log_history:
        if "loss" in entry:
            print("loss", entry["loss"])
    print(rockmate.attached(model).plan)


if __name__ == "__main__":
    main()
