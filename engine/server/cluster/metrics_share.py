"""Metrics of several frontends over one core, so that a scrape of any of them has them all.

Each frontend writes its snapshot to a file of its own in the core's private folder, once a second;
a scrape adds the others' files to what the scraped frontend knows at that moment. The file of a
frontend that has died stays, so totals never go down, and what it had in flight counts as failed.
What cannot be written down is not shown either: the next scrape, of another frontend, would not
have it. Knows files; knows no format of a scrape.
"""

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from engine.log import get_logger
from instrumentation import Metric
from instrumentation.metrics.merge import (
    decode_snapshot,
    encode_snapshot,
    end_in_flight,
    merge_snapshots,
)

logger = get_logger(__name__)

INTERVAL_S = 1.0
"""How old the others' numbers may be."""


class MetricsShare:
    """One frontend's part in it.

    Args:
        directory: the private folder that all frontends of the core share.
        index: which frontend this is; the lowest one's gauges count.
        own: this frontend's snapshot.
    """

    def __init__(self, directory: str, index: int, own: Callable[[], Sequence[Metric]]) -> None:
        self._own = own
        self._path = Path(directory) / f"metrics.{index:03}.{os.getpid()}"
        self._lock = threading.Lock()
        self._written: list[Metric] = []
        self._is_failing = False
        self._seen: dict[str, list[Metric]] = {}
        """What each other frontend's file has said last."""
        self._unreadable: set[str] = set()
        self._dead: set[str] = set()
        self._ended: list[Metric] = []
        """What all the dead had said together: their files do not change any more."""

    def snapshot(self) -> list[Metric]:
        """All frontends' metrics as one, this one's as of now.

        What it shows of this frontend is written down first: should the process die before it does
        so again, or another one answer the next scrape, no total must be seen to fall.
        """
        living = {self._path.name: self.write()}
        names = {path.name for path in self._path.parent.glob("metrics.*[0-9]")} | self._seen.keys()
        for name in sorted(names - self._dead - {self._path.name}):
            is_running = _is_running(int(name.rpartition(".")[2]))  # before its last words are read
            snapshot = self._read(name)
            if is_running:
                living[name] = snapshot
            elif snapshot:
                self._dead.add(name)
                self._seen.pop(name, None)
                self._ended = merge_snapshots([self._ended, end_in_flight(snapshot)])
        return merge_snapshots([*(living[name] for name in sorted(living)), self._ended])

    async def publish(self) -> None:
        """Write this frontend's snapshot, again and again, and once more when cancelled."""
        try:
            while True:
                await asyncio.to_thread(self.write)
                await asyncio.sleep(INTERVAL_S)
        finally:
            self.write()

    def write(self) -> list[Metric]:
        """Write this frontend's snapshot, whole or not at all; returns the last written one."""
        new = self._path.with_name(f"{self._path.name}.new")
        with self._lock:  # by the loop's timer and by scrapes
            snapshot = list(self._own())
            try:
                new.write_bytes(encode_snapshot(snapshot))
                new.replace(self._path)
            except OSError as error:
                if not self._is_failing:  # once, and not when the owner has removed the folder
                    is_over = isinstance(error, FileNotFoundError)
                    logger.log(
                        logging.DEBUG if is_over else logging.WARNING,
                        "this frontend's metrics cannot be written to %s; /metrics shows its last "
                        "ones until they can: %s",
                        self._path.parent,
                        error,
                    )
                self._is_failing = True
            else:
                self._written, self._is_failing = snapshot, False
            return self._written

    def _read(self, name: str) -> list[Metric]:
        """What a frontend has said; where its file cannot be read, what it had said before."""
        try:
            self._seen[name] = decode_snapshot((self._path.parent / name).read_bytes())
            self._unreadable.discard(name)
        except (OSError, msgspec.DecodeError) as error:
            if name not in self._unreadable:  # once, however often somebody scrapes
                self._unreadable.add(name)
                logger.warning("the metrics of another frontend cannot be read: %s", error)
        return self._seen.get(name, [])


def _is_running(pid: int) -> bool:
    """Whether a frontend of ours has that number; another user's process has taken it over."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True
