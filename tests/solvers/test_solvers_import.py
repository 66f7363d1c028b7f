"""``solvers`` stands alone, and imports at first what every plan needs."""

from __future__ import annotations

import subprocess
import sys

import pytest

OTHERS = ("torch", "rkgb", "rockmate")
LATER = ("highspy", "pulp", "networkx", "solvers.milp.milp", "solvers.whole.stages", "solvers.rotor.costs")


@pytest.mark.parametrize("names", [OTHERS, LATER])
def test_solvers_import_neither_the_other_packages_nor_what_few_need(names: tuple[str, ...]) -> None:
    code = f"import sys, solvers; print([m for m in {names} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
