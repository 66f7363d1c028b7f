"""Autocast and gradient accumulation: nothing changes. A plan is for the precision that its call runs in.

python examples/mixed_precision.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import rockmate


def main() -> None:
    torch.manual_seed(0)
    layers = [m for _ in range(8) for m in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    rockmate.attach(model, "50%")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu")
    for step in range(6):
        x, target = torch.randn(1024, 64), torch.randint(10, (1024,))
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), target) / 2
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        print("loss", loss.item())
    print(rockmate.attached(model).plan)


if __name__ == "__main__":
    main()
