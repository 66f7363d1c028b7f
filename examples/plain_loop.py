"""A training loop of your own: one line more.

python examples/plain_loop.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import rockmate


def make_model() -> nn.Module:
    """Sixteen linear layers with dropout."""
    layers = [m for _ in range(8) for m in (nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def main() -> None:
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rockmate.attach(model, "40%")  # of what a step takes without it; or bytes: "8 GiB"
    for _ in range(5):
        x, target = torch.randn(2048, 64), torch.randint(10, (2048,))
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
    print(rockmate.attached(model).plan)


if __name__ == "__main__":
    main()
