"""Ctrl-C that cannot be lost, nor what handlers of other signals raise, such as a time limit.

The handler of a signal may raise within a finalizer, or within a callback of a weak reference or of the garbage
collector. Python drops that exception. Native code may clear it, or turn it into another error. ``Heeded`` remembers
the exception, and ``check`` raises it again.

Ctrl-C while another context is entered or left would leave it half entered: a lock acquired for ever, torch's profiler
neither on nor off. Ctrl-C within an import would leave a package without its modules. Where TorchDynamo captures,
native code calls Python, and an exception may end the process. ``Heeded`` remembers the exception in these cases as
well, instead of raising it at once.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

_inside: list[Heeded] = []


def check() -> None:
    """Raise again what a handler of a signal raised within a ``Heeded`` that is still open, if it was lost."""
    if not _inside or threading.current_thread() is not threading.main_thread():
        return
    for heeded in _inside:
        if heeded.raised is not None:
            raise heeded.raised


class Heeded:
    """A context that raises at its end what the handler of a signal raised inside, if it was lost.

    A second one, as of another Ctrl-C, is raised at once. Handlers that raise nothing work as they do elsewhere, as do
    SIG_IGN, SIG_DFL and handlers that are not written in Python. Signals reach the main thread only; in other threads
    this does nothing.
    """

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        self._handler = self._handle  # one object, so that ``is`` recognises it
        self._before: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._frame: FrameType | None = None  # that entered this context

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            self._before[number](number, frame)
        except BaseException as error:
            waits = self._waits(frame)
            if waits or self in _inside:  # else code inside kept the handler beyond this context
                self.raised = error
            if not waits:
                raise

    def _waits(self, frame: FrameType | None) -> bool:
        """Whether the signal came while this context, or one inside it, is entered or left, or within an import or a
        capture."""
        others = self in _inside and self.raised is None
        while frame is not None and frame is not self._frame:
            if frame.f_code in _OWN and frame.f_locals["self"] is self:
                return True
            code = frame.f_code
            if others and (code.co_name in _CONTEXTS or _IMPORTS in code.co_filename or _CAPTURES in code.co_filename):
                return True
            frame = frame.f_back
        return False

    def __enter__(self) -> Heeded:
        if threading.current_thread() is threading.main_thread():
            self._frame = sys._getframe(1)
            for number in _SIGNALS:
                before = signal.getsignal(number)
                if callable(before):
                    self._before[number] = before
                    signal.signal(number, self._handler)
            _inside.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self not in _inside:
            return
        _inside.remove(self)
        for number, before in self._before.items():
            if signal.getsignal(number) is self._handler:  # else code inside replaced it
                signal.signal(number, before)
        raised, self.raised, self._frame = self.raised, None, None
        if raised is not None and (error is None or isinstance(error, Exception)) and error is not raised:
            try:
                raise raised from error
            finally:  # a cycle with its traceback would keep the tensors of all its frames
                del raised, error, trace


_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGUSR1", "SIGUSR2")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
"""Whose handlers raise: Ctrl-C, the end of a job or what announces it, a time limit, a DataLoader whose worker died."""

_CONTEXTS = ("__enter__", "__exit__")

_IMPORTS = "<frozen importlib"

_CAPTURES = os.path.join("torch", "_dynamo", "convert_frame.py")
"""On the stack while TorchDynamo captures; what it captured runs without it."""

_OWN = (Heeded.__enter__.__code__, Heeded.__exit__.__code__)
