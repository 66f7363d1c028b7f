"""Detection with torchvision: attach the backbone, which keeps most of the memory.

The model as a whole resizes images to sizes that it draws and reads, so that each step would be planned anew.

    python examples/detection.py
"""

import torch
from torchvision.models.detection import fcos_resnet50_fpn

import rockmate


def main() -> None:
    torch.manual_seed(0)
    model = fcos_resnet50_fpn(weights=None, weights_backbone=None, num_classes=5, min_size=128, max_size=160)
    model.train()
    rockmate.attach(model.backbone, "150 MiB")  # the heads run inside this budget, too
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    boxes = torch.tensor([[10.0, 10.0, 60.0, 60.0], [30.0, 30.0, 100.0, 110.0]])
    for _ in range(3):
        images = [torch.rand(3, 128, 128), torch.rand(3, 120, 150)]
        targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]
        loss = sum(model(images, targets).values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
    print(rockmate.attached(model.backbone).plan)


if __name__ == "__main__":
    main()
