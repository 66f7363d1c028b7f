"""Two processes over gloo: DistributedDataParallel and fully_shard, with Rockmate or attached models, and without."""

from __future__ import annotations

from pathlib import Path

import pytest
import ranks
import torch.distributed as dist
from torch import multiprocessing


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    ("module", "works"),
    [
        ("ranks", "ddp ddp_one_plan ddp_accumulation ddp_budget ddp_overlap fsdp fsdp_budget other_way_round"),
        ("attached_ranks", "equal_with_all_options measured_once overlap accumulation other_way_round compiled"),
        ("sharded_ranks", "one_budget"),
    ],
)
def test_ranks(module: str, works: str, tmp_path: Path) -> None:
    multiprocessing.spawn(ranks.start, (module, works.split(), str(tmp_path)), nprocs=ranks.RANKS)
