"""accelerate: attach the model before or after ``prepare``; a meter logs what steps take.

python examples/with_accelerate.py
"""

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import rockmate.integrations


def main() -> None:
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", gradient_accumulation_steps=2)
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    meter = rockmate.integrations.Meter("60%")
    meter.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(TensorDataset(torch.randn(2048, 64), torch.randint(10, (2048,))), batch_size=512)
    call, optimizer, data = accelerator.prepare(model, optimizer, data)
    for x, target in data:
        with accelerator.accumulate(call):
            meter.begin()
            loss = F.cross_entropy(call(x), target)
            accelerator.backward(loss)
            meter.end()
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(call.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.log(meter.figures())  # to the trackers that ``log_with`` names
        print("loss", loss.item())
    print(rockmate.attached(model).plan)


if __name__ == "__main__":
    main()
