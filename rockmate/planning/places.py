"""Where costs and schedules are kept once they are found: in files, and with the other ranks of a distributed job.

What is measured differs from process to process, and so would plans. The first rank that has costs or a schedule offers
them in the store in which the ranks have met (``torch.distributed``); all others take these in place of their own. No
rank waits for another, since the others may have batches of other sizes, and plan nothing.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from rockmate.planning.disk import LOG, REFUSED, Disk, T
from solvers.files.values import to_json


@dataclass(frozen=True)
class Ranks:
    """What the ranks of a job share: the first one that offers something under a name decides."""

    store: Any  # torch.distributed.Store, which a torch without distributed does not have

    def offered(self, name: str, content: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """What a rank has offered; None if none has, which then ``content`` is from now on, if it is given."""
        key, text = f"rockmate/{name}", None if content is None else to_json(content)
        try:
            if text is not None:
                first = self.store.compare_set(key, "", text)
            else:
                first = self.store.get(key) if self.store.check([key]) else None
            return None if first is None or (text is not None and first == text.encode()) else json.loads(first)
        except (RuntimeError, ValueError) as error:
            _unusable(str(error))
            return None


@functools.cache  # said once
def _unusable(why: str) -> None:
    LOG.info("ranks may have different plans, as the store in which they met cannot be used: %s", why)


@dataclass(frozen=True)
class Places:
    """Files, if any, and the other ranks, if there are any."""

    disk: Disk | None
    ranks: Ranks | None

    def read(self, name: str, checked: Callable[[dict[str, Any]], T]) -> T | None:
        """What ``checked`` makes of what is kept; None if nothing is, or ``checked`` refuses it."""
        taken = self._taken(name, None, checked)
        if taken is not None:
            return taken
        found = None if self.disk is None else self.disk.read(name, lambda content: (content, checked(content)))
        return None if found is None else self._agreed(name, found[0], checked, found[1])

    def keep(self, name: str, content: dict[str, Any], checked: Callable[[dict[str, Any]], T], made: T) -> T:
        """Keep ``content``, of which ``checked`` makes what was ``made``; that, or what another rank has made."""
        if self.disk is not None:
            self.disk.write(name, content)
        return self._agreed(name, content, checked, made)

    def _agreed(self, name: str, content: dict[str, Any], checked: Callable[[dict[str, Any]], T], made: T) -> T:
        taken = self._taken(name, content, checked)
        return made if taken is None else taken

    def _taken(self, name: str, content: dict[str, Any] | None, checked: Callable[[dict[str, Any]], T]) -> T | None:
        """What ``checked`` makes of what another rank has offered; None if that is nothing, or refused."""
        offered = None if self.ranks is None else self.ranks.offered(name, content)
        try:
            return None if offered is None else checked(offered)
        except REFUSED as error:
            LOG.info("what another rank has found is ignored: %s", error)
            return None


def places_of(disk: Disk | None) -> Places | None:
    """``disk``, and the ranks of the job that this process is part of; None if there is neither."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if several and torch.distributed.get_world_size() > 1:
        return Places(disk, Ranks(torch.distributed.distributed_c10d._get_default_store()))
    return None if disk is None else Places(disk, None)
