"""The simulated allocator of the benchmarks, which tests import from here: rkgb's, with all that recordings have."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from gpu_run.allocator import Allocator

__all__ = ["Allocator"]
