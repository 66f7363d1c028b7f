"""Lightning: a callback attaches the network, and logs what it takes.

python examples/with_lightning.py
"""

try:
    import torchvision  # noqa: F401 - lightning imports it where it is installed
except ImportError:
    pass
except RuntimeError as error:  # compiled for another build of torch
    raise SystemExit(f"torchvision does not fit this torch ({error}): install both from one index") from None

import lightning
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rockmate
from rockmate.integrations.lightning import RockmateCallback


class Classifier(lightning.LightningModule):
    """A network and its loss."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers, nn.Linear(64, 10))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, target = batch
        loss = F.cross_entropy(self.net(x), target)
        print("loss", loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    module = Classifier()
    data = TensorDataset(torch.randn(2560, 64), torch.randint(10, (2560,)))
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[RockmateCallback("50%", part="net")],
    )
    trainer.fit(module, DataLoader(data, batch_size=512, shuffle=True))
    print(rockmate.attached(module.net).plan)


if __name__ == "__main__":
    main()
