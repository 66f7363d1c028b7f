"""A folder of small JSON files that processes share: what one has found, the next need not look for.

A file's name is a digest of all that its content depends on. Files are written beside and moved into place, so that a
reader meets a whole one, however many processes write at once. A file has a digest of its own content, so that nothing
is taken that was changed. A file that cannot be used is ignored, with a line of the logger, and written anew.

The ranks of a distributed job share the same contents under the same names. What is measured differs from process to
process, and so would plans. The first rank that has costs or a schedule offers them in the store in which the ranks
have met (``torch.distributed``); all others take these in place of their own. No rank waits for another, since the
others may have batches of other sizes, and plan nothing.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import torch

from rockmate.errors import InputError
from solvers.files.values import to_json

VARIABLE = "ROCKMATE_CACHE"
"""The environment variable for all who do not say otherwise: the path of a folder, or "off"."""

MOST_FILES, MOST_BYTES = 400, 100 * 2**20
"""Of a folder. Beyond these the files that were not used for longest go."""

LEFT_BEHIND = 3600.0
"""Seconds after which a file that was not moved into place is that of a process that has ended."""

LOG = logging.getLogger("rockmate")

REFUSED = (ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""What is raised for content that cannot be what it should be."""

T = TypeVar("T")

_OURS = re.compile(r"[a-z]+-[0-9a-f]{64}\.(json|[0-9a-f]{16}\.tmp)")
_OFF = frozenset({"", "0", "off", "no", "none", "false"})
_ON = frozenset({"1", "on", "yes", "true"})
_said: set[Path] = set()  # folders that cannot be used, of which this process has told


@dataclass(frozen=True)
class Disk:
    """Reads and writes the files of ``folder``; it need not exist. Nothing here raises what the file system does."""

    folder: Path

    def read(self, name: str, checked: Callable[[dict[str, Any]], T]) -> T | None:
        """What ``checked`` makes of the content of a file; None if there is no such file, or ``checked`` refuses it."""
        path = self._path(name)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("name") != name or found.pop("digest") != _digest(found):
                raise ValueError("it is another file's content, or was changed")
            result = checked(found)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._unusable(error)
            return None
        except REFUSED as error:
            LOG.info("%s is ignored, and will be written anew: %s: %s", path, type(error).__name__, error)
            return None
        with suppress(OSError):
            os.utime(path)  # it was used
        return result

    def write(self, name: str, content: dict[str, Any]) -> None:
        """Keep ``content``, and no more files than there may be."""
        path = self._path(name)
        temporary = path.with_suffix(f".{secrets.token_hex(8)}.tmp")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            try:
                content = json.loads(to_json(content))
                text = json.dumps({"name": name, "digest": _digest(content), **content}, separators=(",", ":"))
                temporary.write_text(f"{text}\n", encoding="utf-8")
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            self._tidy()
        except OSError as error:
            self._unusable(error)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.json"

    def _tidy(self) -> None:
        """Remove the oldest files beyond the limits. Others' files stay: the folder may be anybody's."""
        found, now = [], time.time()
        for path in self.folder.iterdir():
            if _OURS.fullmatch(path.name):
                with suppress(FileNotFoundError):  # another process tidies, too
                    status = path.stat()
                    if path.suffix == ".json":
                        found.append((status.st_mtime, status.st_size, path))
                    elif now - status.st_mtime > LEFT_BEHIND:
                        path.unlink()
        taken = 0
        for count, (_, size, path) in enumerate(sorted(found, reverse=True), 1):
            taken += size
            if count > MOST_FILES or taken > MOST_BYTES:
                path.unlink(missing_ok=True)

    def _unusable(self, error: OSError) -> None:
        if self.folder not in _said:
            _said.add(self.folder)
            LOG.info(
                "plans are not kept in %s (%s), so each start plans anew: give another folder, or none, as cache=… or "
                "in the environment variable %s",
                self.folder, error, VARIABLE,
            )  # fmt: skip


def _digest(content: dict[str, Any]) -> str:
    """Of what JSON has of ``content``."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def named(kind: str, *depends: object) -> str:
    """The name of the file of this ``kind`` for what ``depends``, as text, on nothing but that."""
    digest = hashlib.sha256()
    for part in map(str, depends):
        digest.update(f"{len(part)}:{part}".encode())
    return f"{kind}-{digest.hexdigest()}"


def disk_of(cache: Any) -> Disk | None:
    """The folder that ``cache`` asks for, as for ``Rockmate``; None for none. Raises ``InputError`` for what is
    neither."""
    if cache is None or cache is False:
        return None
    if cache is True:
        wanted = os.environ.get(VARIABLE, "on").strip()
        if wanted.lower() in _OFF:
            return None
        if wanted.lower() not in _ON:
            return _disk_in(wanted, VARIABLE)
        from platformdirs import user_cache_path  # only where it is asked for: it takes as long as a small plan's load

        folder = user_cache_path("rockmate", appauthor=False)
        return Disk(folder) if folder.is_absolute() else None  # for a user without a home
    named = isinstance(cache, (str, os.PathLike)) and bool(os.fspath(cache))
    if not named or (isinstance(cache, str) and cache.strip().lower() in _ON | _OFF):
        raise InputError(
            f"cache={cache!r}: give the path of the folder where plans are kept, True for the usual one, or False"
        )
    return _disk_in(cache, "cache")


def _disk_in(folder: str | os.PathLike[str], what: str) -> Disk:
    """The folder of this path; raises ``InputError`` for a word that is misspelt."""
    path = Path(os.fsdecode(folder)).expanduser()
    if path.name == folder and not path.exists() and (meant := get_close_matches(folder.lower(), _ON | _OFF, 1)):
        word = meant[0] if what == VARIABLE else meant[0] in _ON
        raise InputError(f'{what}={folder!r}: was {what}={word} meant? If not, give the new folder as "./{folder}"')
    return Disk(path.absolute())


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
