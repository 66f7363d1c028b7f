"""DistributedDataParallel: attach the model that it wraps. Two processes over gloo.

python examples/with_ddp.py
"""

import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import rockmate

RANKS = 2


def work(rank: int, folder: str) -> None:
    """One process."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [m for _ in range(6) for m in (nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64))]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    rockmate.attach(model, "50%")
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    for _ in range(4):
        x, target = torch.randn(1024, 64), torch.randint(10, (1024,))
        loss = F.cross_entropy(parallel(x), target)
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
