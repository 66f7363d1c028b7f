"""Starts the sections, each part in a process of its own, with the time that is left shared among them.

No torch here: what happens to it in a section must not reach the others.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from gpu_run.records import write

PROGRAM = Path(__file__).resolve().parents[1] / "gpu.py"
GRACE = 2.0
"""Seconds before its limit that a part is told as its end, to say itself what it leaves out."""


@dataclass(frozen=True)
class Section:
    """``share``: of the time. ``alone``: it measures time, so that nothing may run beside it.

    ``parts``: one process each, by name; ``dry``: those of a dry run.
    """

    name: str
    module: str
    share: int
    alone: bool = True
    parts: tuple[str, ...] = ("",)
    dry: tuple[str, ...] = ("",)


MODELS = ("gpt", "llama", "resnet50", "vit", "unet")
COMPILED = ("gpt compiled", "llama compiled")  # last: they may take minutes
SETTINGS = ("default", "expandable")
SCRIPTS = (
    *("gpt2", "llama", "transformer, 17", "resnet", "fcos", "retinanet"),
    *("experts", "opt", "bart", "whisper", "wav2vec2"),
)
BESIDE = ("GPT", "ResNet-50", "Llama", "GPT compiled", "ResNet-50 compiled", "Llama compiled")

SECTIONS = (
    Section("versions", "ceilings", 35),
    Section("tests", "suite", 60),
    Section("zoo", "cases", 50, False, tuple(f"{k}/5" for k in range(5))),
    Section(
        "bytes",
        "memory",
        70,
        False,
        tuple(f"{segments}/{k}/4" for segments in SETTINGS for k in range(4)),
        tuple(f"{segments}/0/1" for segments in SETTINGS),
    ),
    Section("scripts", "attached", 60, False, SCRIPTS, ("experts",)),
    Section("time", "peaks_and_times", 300, True, (*MODELS, *COMPILED), ("+".join((*MODELS, COMPILED[0])),)),
    Section("launch", "launches", 50),
    Section("fits", "batches", 50),
    Section("peers", "beside", 90, True, BESIDE, BESIDE[:1]),
)
"""The most valuable first: a run that is cut short has these."""


@dataclass
class Run:
    """One run of ``sections``. ``limits``: seconds for a section's parts, instead of their share."""

    sections: Sequence[Section]
    out: Path
    seconds: float
    dry: bool
    device: str
    jobs: int
    limits: Mapping[str, float] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)

    def __call__(self) -> None:
        """Run them all, one line of the results for the end of each part."""
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, self._cut_short)
        end = time.time() + self.seconds
        self._write({"begun": True, "dry": self.dry, "seconds": self.seconds})
        try:
            for group, jobs, share in self._groups():
                self._run_group(group, jobs, time.time() + share * max(0.0, end - time.time()))
        finally:
            self._kill()
        self._write({"finished": True})

    def _groups(self) -> Iterator[tuple[list[tuple[Section, str]], int, float]]:
        """What runs at the same time, in how many processes, and which share of the time that is left then it has."""
        ordered = [s for s in SECTIONS if s in self.sections]
        left = sum(s.share for s in ordered)
        for k, found in groupby(enumerate(ordered), lambda pair: -1 if self.dry or not pair[1].alone else pair[0]):
            sections = [s for _, s in found]
            tasks = [(s, part) for s in sections for part in (s.dry if self.dry else s.parts)]
            tasks.sort(key=lambda task: -task[0].share if self.dry else 0)  # then the longest runs beside all others
            share = sum(s.share for s in sections)
            yield tasks, self.jobs if k < 0 else 1, share / left
            left -= share

    def _run_group(self, tasks: list[tuple[Section, str]], jobs: int, end: float) -> None:
        waiting, lock = len(tasks), threading.Lock()

        def one(task: tuple[Section, str]) -> None:
            nonlocal waiting
            with lock:
                limit = (end - time.time()) / math.ceil(waiting / jobs)
                waiting -= 1
            self._run_part(*task, limit, jobs)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, tasks))

    def _run_part(self, section: Section, part: str, limit: float, jobs: int) -> None:
        limit = self.limits.get(section.name, limit)
        start, record = time.time(), {"section": section.name, "part": part, "limit": round(limit, 1)}
        if limit <= 0:
            self._write({**record, "ended": "no time left", "seconds": 0.0, "why": ""})
            return
        # kernels of a CPU take memory for each thread: with one, a dry run is the same on every machine
        settings = {"OMP_NUM_THREADS": str(1 if self.dry else max(1, (os.cpu_count() or 1) // jobs))}
        if part.startswith("expandable"):
            settings["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        command = [sys.executable, str(PROGRAM), "--child", section.name, "--part", part, "--out", str(self.out)]
        command += ["--end", str(start + max(limit - GRACE, limit / 2)), "--device", self.device]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                [*command, "--dry"] if self.dry else command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | settings,
                start_new_session=True,
            )
            self.running.add(process.pid)
            try:
                code = process.wait(limit)
                ended = "done" if code == 0 else f"ended with {code}"
            except subprocess.TimeoutExpired:
                ended = "timed out"
            self._kill_group(process.pid)
            process.wait()
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - 3000))
            said = log.read().decode(errors="replace")
        why = said if ended != "done" else ""
        self._write({**record, "ended": ended, "seconds": round(time.time() - start, 1), "why": why})

    def _kill_group(self, pid: int) -> None:
        """The process and what it started; it leads a group of its own."""
        self.running.discard(pid)
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    def _kill(self) -> None:
        for pid in [*self.running]:
            self._kill_group(pid)

    def _cut_short(self, number: int, _: Any) -> None:
        self._kill()
        self._write({"cut_short": True})
        os._exit(128 + number)

    def _write(self, record: dict[str, Any]) -> None:
        write(self.out, record)
        if "ended" in record:
            where = f"{record['section']} {record['part']}".strip()
            print(f"{where}: {record['ended']} after {record['seconds']} s of {record['limit']}", flush=True)


def end_with_parent() -> None:
    """A part whose starter is gone ends, too: a thread looks twice a second."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
