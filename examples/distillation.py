"""Distillation: attach the student. The teacher runs under ``no_grad``, so it needs no plan.

python examples/distillation.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import rockmate


def classifier(width: int, depth: int) -> nn.Module:
    layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))]
    return nn.Sequential(nn.Linear(64, width), *layers, nn.Linear(width, 10))


def main() -> None:
    torch.manual_seed(0)
    teacher, student = classifier(128, 8).eval(), classifier(64, 8)
    rockmate.attach(student, "50%")
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-3)
    for _ in range(5):
        x, target = torch.randn(2048, 64), torch.randint(10, (2048,))
        with torch.no_grad():
            soft = F.softmax(teacher(x) / 2, dim=1)  # before the student's forward, so beside its budget
        logits = student(x)
        match = F.kl_div(F.log_softmax(logits / 2, dim=1), soft, reduction="batchmean")
        loss = F.cross_entropy(logits, target) + 4 * match
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
    print(rockmate.attached(student).plan)


if __name__ == "__main__":
    main()
