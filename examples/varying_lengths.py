"""Batches of many lengths: give the longest one as ``sample=``, and its plan serves the others.

python examples/varying_lengths.py
"""

import torch
from torch import nn
from torch.nn import functional as F

import rockmate


class Encoder(nn.Module):
    """Words to a class, of texts of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, 64)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Logits."""
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def main() -> None:
    torch.manual_seed(0)
    model = Encoder()
    longest = torch.zeros(16, 96, dtype=torch.int64)
    rockmate.attach(model, "50%", sample=longest)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for length in (96, 40, 73, 96, 57, 40):
        words, target = torch.randint(512, (16, length)), torch.randint(10, (16,))
        loss = F.cross_entropy(model(words), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item())
    print(*(f"{kind.name}\n{kind.plan}\n" for kind in rockmate.attached(model).plans), sep="\n")


if __name__ == "__main__":
    main()
