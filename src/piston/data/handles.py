"""Open files, a few per thread: least recently used closed first, none shared between threads or across a fork."""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

LIMIT = 32  # open files per thread: a decoder of 480×640 video holds some 3 MB, of long GOPs with B-frames up to 10


@runtime_checkable
class Closable(Protocol):
    """Anything that holds a file open."""

    def close(self) -> None:
        """Gives the file back."""
        ...


T = TypeVar("T", bound=Closable)


class _Table(threading.local):
    """The open files of this thread, and the process that opened them."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.files: OrderedDict[Hashable, Any] = OrderedDict()


_table = _Table()


def opened(key: Hashable, open_file: Callable[[], T]) -> T:
    """The file known as `key`, opened by this thread of this process; opens it (and closes the stalest) if need be."""
    if _table.pid != os.getpid():  # a forked child: the inherited files' offsets and decoders belong to the parent
        _table.pid, _table.files = os.getpid(), OrderedDict()
    files = _table.files
    if key in files:
        files.move_to_end(key)
    else:
        while len(files) >= LIMIT:
            files.popitem(last=False)[1].close()
        files[key] = open_file()
    return cast("T", files[key])


def discard(key: Hashable) -> None:
    """Closes the file known as `key` if this thread has it open (after an error its state is not to be trusted)."""
    file = _table.files.pop(key, None) if _table.pid == os.getpid() else None
    if file is not None:
        file.close()


def open_count() -> int:
    """Files this thread holds open."""
    return len(_table.files) if _table.pid == os.getpid() else 0


def close_all() -> None:
    """Closes every file this thread holds open."""
    if _table.pid == os.getpid():
        while _table.files:
            _table.files.popitem()[1].close()
