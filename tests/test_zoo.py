"""The zoo's benchmark on small models, each with something that real ones contain; and on real ones where they are."""

from __future__ import annotations

import itertools

import pytest
from programs import ROOT, load

BENCHMARKS = ROOT / "benchmarks"


zoo, features = load(BENCHMARKS / "zoo.py"), load(BENCHMARKS / "features.py")


@pytest.mark.filterwarnings("ignore:dropout option adds dropout after all but last:UserWarning")
@pytest.mark.parametrize("name", features.names())
def test_features(name: str) -> None:
    row = zoo.run(BENCHMARKS / "features.py", name)
    assert not row["miss"], row.get("traceback", row["miss"])


def test_a_miss_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = itertools.cycle([1.0, 0.0])  # ours against eager mode, eager mode against itself
    monkeypatch.setattr(zoo, "difference", lambda a, b: next(answers))
    row = zoo.run(BENCHMARKS / "features.py", "straight_through")
    assert "outputs" in row["miss"] or "gradients" in row["miss"]
    assert "MISS" in zoo.show(row)
