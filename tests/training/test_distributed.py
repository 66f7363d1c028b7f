"""Two processes over gloo: DistributedDataParallel and fully_shard, with and without Rockmate."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch.distributed as dist
from torch import multiprocessing


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    "works",
    [
        ("ddp", "ddp_one_plan", "ddp_accumulation", "ddp_budget", "ddp_overlap"),
        ("fsdp", "fsdp_budget", "other_way_round"),
    ],
    ids="+".join,
)
def test_ranks(works: tuple[str, ...], tmp_path: Path) -> None:
    multiprocessing.spawn(ranks.start, (works, str(tmp_path)), nprocs=ranks.RANKS)
