"""Section ``tests``: those that need a device, and skip themselves where there is none."""

from __future__ import annotations

import os
from typing import Any

from gpu_run.context import ROOT, Context
from rkgb.device import KINDS


class Outcomes:
    """A plugin of pytest that writes a row for each test as it ends."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.count = ctx, 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.count += 1
            why = report.longrepr[-1] if isinstance(report.longrepr, tuple) else report.longreprtext[-600:]
            test = report.nodeid.rpartition("/")[2]
            self.ctx.emit(case=test, outcome=report.outcome, time_ns=round(1e9 * report.duration), why=why)


def run(ctx: Context) -> None:
    """In the folders of ``tests`` that are named after a kind of device, without the project's own settings."""
    try:
        import pytest
    except ImportError:
        ctx.emit(case="all", outcome="skipped", why="pytest is not installed")
        return
    folders = [str(ROOT / "tests" / name) for name in KINDS if (ROOT / "tests" / name).is_dir()]
    outcomes = Outcomes(ctx)
    options = ["-q", "-W", "error", "-p", "no:cacheprovider", "-c", os.devnull, f"--rootdir={ROOT}"]
    code = pytest.main([*folders, *options, "-o", f"pythonpath={ROOT / 'tests'}"], plugins=[outcomes])
    if not outcomes.count or code > 1:
        ctx.emit(case="all", outcome="failed", why=f"pytest ended with {code} after {outcomes.count} tests")
