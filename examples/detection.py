"""Detection with torchvision: attach the whole model.

It draws the sizes of images and reads them, so that it is not one graph: it is followed.

    python examples/detection.py
"""

import torch

import rockmate

try:
    from torchvision.models.detection import FCOS
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone
except RuntimeError as error:  # compiled for another build of torch
    raise SystemExit(f"torchvision does not fit this torch ({error}): install both from one index") from None


def main() -> None:
    torch.manual_seed(0)
    backbone = resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5)
    model = FCOS(backbone, num_classes=5, min_size=192, max_size=240)
    model.train()
    rockmate.attach(model, "70%")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    boxes = torch.tensor([[10.0, 10.0, 60.0, 60.0], [30.0, 30.0, 100.0, 110.0]])
    for _ in range(5):
        images = [torch.rand(3, 192, 192), torch.rand(3, 180, 225)]
        targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])} for _ in images]
        loss = sum(model(images, targets).values())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
    print(rockmate.attached(model).plan)


if __name__ == "__main__":
    main()
