"""What a section works with: the device, the time it has, and the file that its rows go to."""

from __future__ import annotations

import gc
import importlib.util
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from gpu_run.records import write
from rkgb.device import kind_of

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Context:
    """``part``: of the section, where it has several processes. ``end``: of its time, by ``time.time``.

    ``dry``: at toy sizes, on the CPU.
    """

    section: str
    part: str
    device: torch.device
    dry: bool
    out: Path
    end: float

    @property
    def kind(self) -> Any:
        """The product's own view of the device."""
        return kind_of(self.device)

    @property
    def api(self) -> ModuleType:
        """torch's module for the device."""
        return torch.get_device_module(self.device)

    @property
    def scale(self) -> str:
        """Of the models in which time counts."""
        return "toy" if self.dry else "full"

    @property
    def costs(self) -> str:
        """How plans are made where time counts."""
        return "flops" if self.dry else "measured"

    def left(self) -> float:
        """Seconds."""
        return self.end - time.time()

    def emit(self, **row: Any) -> None:
        """Append a row to the results, at once."""
        write(self.out, {"section": self.section, "part": self.part, "row": row})

    def run_each(self, cases: Mapping[str, Callable[[], None]], seconds: float) -> None:
        """Call all of them; what raises becomes a row, and so does what is left when fewer than ``seconds`` are."""
        names = list(cases)
        for k, name in enumerate(names):
            if self.left() < (0 if self.dry else seconds):
                self.emit(case=name, error=f"out of time: not run, nor {', '.join(names[k + 1 :]) or 'any other'}")
                return
            try:
                cases[name]()
            except Exception as error:  # noqa: BLE001 - whatever fails is a row, and the next case runs
                last = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(last.filename).name}:{last.lineno}"
                self.emit(case=name, error=f"{type(error).__name__} at {where}: {error}"[:600])
            self.clear()

    def clear(self) -> None:
        """Give back what nobody refers to."""
        gc.collect()
        empty = getattr(self.api, "empty_cache", None)
        if empty is not None:
            empty()

    def times(self, steps: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, int]:
        """The median of ``rounds`` interleaved runs of each, in nanoseconds of the device."""
        kind, found = self.kind, {name: [] for name in steps}
        for _ in range(rounds):
            for name, run in steps.items():
                kind.synchronize(self.device)
                start = kind.mark(self.device)
                run()
                found[name].append(kind.between(start, kind.mark(self.device)))
        return {name: int(statistics.median(values)) for name, values in found.items()}


def load(path: Path) -> ModuleType:
    """The program or module in a file, whatever else has its name."""
    name = f"{path.stem}_of_{path.parent.name}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def portion(names: Iterable[str], part: str) -> list[str]:
    """Every n-th of ``names`` from the k-th on, for a part "k/n"."""
    k, n = map(int, part.split("/"))
    return list(names)[k::n]
