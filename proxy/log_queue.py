"""A queue in front of standard error, so that a reader that does not read stops the log and not the requests.

Why not the standard library's QueueListener: its lines are records that are formatted and written one by one, its queue
counts no bytes, and a lock that is not reentrant guards each put, so that a log line out of a finalizer, which may run
within any put, would wait for itself for ever. Here whoever logs waits for nothing, and one thread writes.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import NamedTuple

GATHER_SECONDS = 0.01
"""For so long the lines of a busy moment are gathered, to be written together."""
RETRY_SECONDS = 0.5


class Room(NamedTuple):
    """What may wait to be written."""

    lines: int
    bytes: int


WHOLE = Room(lines=10_000, bytes=8_000_000)
"""Two seconds of a very busy gateway, or a minute of a usual one."""


class LogQueue:
    """Takes whole lines and writes them to the file descriptor ``sink``, in a thread of its own.

    When there is no room the newest lines are dropped and counted, and ``notice``, with their number, makes the line
    that is written as soon as the sink takes lines again. The last tenth of the room is for urgent lines alone.

    To be made after a fork: a thread does not come along.
    """

    def __init__(self, sink: int, notice: Callable[[int], bytes], room: Room = WHOLE) -> None:
        self._sink = sink
        self._notice = notice
        self._urgent_room = room
        self._room = Room(room.lines * 9 // 10, room.bytes * 9 // 10)
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        # Each of these numbers is written on one side only. So the thread needs no lock, and can't take one with it
        # when the interpreter ends it.
        self._lock = threading.RLock()
        self._taken, self._taken_bytes, self._refused = 0, 0, 0
        self._done, self._done_bytes, self._lost, self._told = 0, 0, 0, 0
        self._closing = threading.Event()
        self._given_up = False
        self._thread = threading.Thread(target=self._write_all, name="log", daemon=True)
        self._thread.start()

    @property
    def dropped(self) -> int:
        """How many lines were not written, for want of room or because the sink failed until the end."""
        return self._refused + self._lost

    def put(self, line: bytes) -> None:
        """Take a line, with its line break, or drop it. Never waits."""
        self._put(line, self._room)

    def put_urgent(self, line: bytes) -> None:
        """The same for a line for which there is more room."""
        self._put(line, self._urgent_room)

    def close(self, seconds: float) -> None:
        """Write what is left, for so many seconds at most; what the sink doesn't take by then is given up.

        Lines that are put later are still written, as long as the process lasts.
        """
        self._closing.set()
        end = time.monotonic() + (0 if self._given_up else seconds)
        while self._waiting and time.monotonic() < end:
            time.sleep(GATHER_SECONDS / 5)
        self._given_up = self._waiting

    def _put(self, line: bytes, room: Room) -> None:
        with self._lock:
            if self._taken - self._done >= room.lines or self._taken_bytes - self._done_bytes + len(line) > room.bytes:
                self._refused += 1
                return
            self._taken += 1
            self._taken_bytes += len(line)
            self._lines.put(line)

    @property
    def _waiting(self) -> bool:
        """Whether a line is still to be written, by a thread that runs: in a fork it doesn't."""
        return self._taken > self._done and self._thread.is_alive()

    def _write_all(self) -> None:
        while True:
            lines = [self._lines.get()]
            self._closing.wait(GATHER_SECONDS)
            lines += [self._lines.get() for _ in range(self._lines.qsize())]
            for batch in _batches(lines):
                written = self._write(b"".join(batch))
                if written:
                    self._tell()
                else:
                    self._lost += len(batch)
                self._done_bytes += sum(map(len, batch))
                self._done += len(batch)

    def _tell(self) -> None:
        dropped = self.dropped
        if dropped > self._told and self._write(self._notice(dropped - self._told)):
            self._told = dropped

    def _write(self, batch: bytes) -> bool:
        """Write all of it, however often the sink fails; at the end it has one more chance."""
        rest, last = memoryview(batch), False
        while rest:
            try:
                rest = rest[os.write(self._sink, rest) :]
            except BlockingIOError:
                self._wait_for_room()
            except OSError:  # nobody reads any more, the disk is full, the sink was closed
                if last:
                    return False
                last = self._closing.wait(RETRY_SECONDS)
        return True

    def _wait_for_room(self) -> None:
        """Another process that shares the sink has made it non-blocking."""
        poll = select.poll()
        poll.register(self._sink, select.POLLOUT)
        poll.poll(RETRY_SECONDS * 1000)


def _batches(lines: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Whole lines for one write each: as many as a pipe takes in one piece, though other processes write to it, too.

    A longer line goes alone. Where the pipe is full, another process's line may get into it.
    """
    batch: list[bytes] = []
    size = 0
    for line in lines:
        if batch and size + len(line) > select.PIPE_BUF:
            yield batch
            batch, size = [], 0
        batch.append(line)
        size += len(line)
    if batch:
        yield batch
