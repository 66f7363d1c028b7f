"""FSDP2: attach the sharded model. Each block is a graph of its own, and one plan is made for all.

Two processes over gloo.

python examples/with_fsdp2.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import rockmate

RANKS = 2


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x + mlp(norm(x))."""
        return x + self.down(F.gelu(self.up(self.norm(x))))


def work(rank: int, folder: str) -> None:
    """One process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 10))
    for block in model:
        fully_shard(block)
    fully_shard(model)
    rockmate.attach(model, "60%")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for _ in range(4):
        x, target = torch.randn(1024, 64), torch.randint(10, (1024,))
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print("loss", loss.item(), flush=True)
    if rank == 0:
        print(rockmate.attached(model).plan)
    dist.destroy_process_group()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (folder,), nprocs=RANKS)


if __name__ == "__main__":
    main()
