"""``solvers`` stands alone."""

from __future__ import annotations

import subprocess
import sys


def test_solvers_import_neither_torch_nor_the_other_packages() -> None:
    code = "import sys, solvers; print([m for m in ('torch', 'rkgb', 'rockmate') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
