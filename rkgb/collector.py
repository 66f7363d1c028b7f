"""Python's garbage collector while much is made that stays: graphs, plans, and what TorchDynamo captures.

The collector runs after every 700 objects that are more than before, and looks at all objects of the process once their
number has grown by a quarter. Of these torch alone has hundreds of thousands. So it takes a tenth of the time of
planning, and finds little.
"""

from __future__ import annotations

import gc
import threading

_OBJECTS = 50_000
"""More objects than before, after which young ones are looked at."""


class CollectingRarely:
    """A context in which the garbage collector runs rarely. Several threads may enter, each several times.

    A collector that is off stays off, and thresholds that somebody sets inside stay as they are set.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entered = 0
        self._before = self._inside = gc.get_threshold()

    def __enter__(self) -> None:
        with self._lock:
            self._entered += 1
            if self._entered == 1:
                self._before = gc.get_threshold()
                young, middle, old = self._before
                self._inside = max(young, _OBJECTS) if young else 0, middle, old  # 0: it is off
                gc.set_threshold(*self._inside)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._entered -= 1
            if self._entered == 0 and gc.get_threshold() == self._inside:
                gc.set_threshold(*self._before)


COLLECTING_RARELY = CollectingRarely()
