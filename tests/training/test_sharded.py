"""A model that fully_shard has sharded, block by block, under one budget on each of two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharded_ranks
import torch.distributed as dist
from torch import multiprocessing


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_one_budget_for_a_sharded_model(tmp_path: Path) -> None:
    multiprocessing.spawn(sharded_ranks.start, (str(tmp_path),), nprocs=sharded_ranks.RANKS)
