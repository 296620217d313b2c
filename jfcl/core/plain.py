"""Plain files: what is no regular file, in a folder that may come from elsewhere, is neither followed nor read.

All files of runs, sweeps, experiments and stores are opened here. A symbolic link could lead out of the folder, a FIFO
would be waited for without end, and what is written to a file with a second name would change another folder.
"""

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

FLAGS = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC"))  # those of this system
KINDS = {stat.S_IFREG: "a file", stat.S_IFDIR: "a folder", stat.S_IFLNK: "a symbolic link", stat.S_IFIFO: "a FIFO"}
KINDS |= {stat.S_IFSOCK: "a socket"}
FOLDERS = ("cells", "checkpoints", "client_rows", "plots", "store", "test", "train")
FILES = re.compile(r"lock|.+\.(csv|html|json|jsonl|lock|npy|npz|png|toml|txt)")
NAMES = re.compile(rf"{'|'.join(FOLDERS)}|{FILES.pattern}|.+\.tmp")  # of jfcl


def _check_kind(path: str | os.PathLike, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} must be a file, but it is {KINDS.get(stat.S_IFMT(mode), 'a device')}: move it away")


def open_plain(path: str | os.PathLike, flags: int = os.O_RDONLY) -> int:
    """Returns a descriptor of a regular file; `ValueError` for anything else, and for writing to a hard link."""
    with contextlib.suppress(FileNotFoundError):
        _check_kind(path, os.lstat(path).st_mode)  # first, since a device may notice that it is opened
    descriptor = os.open(path, flags | FLAGS, 0o666)
    try:
        status = os.fstat(descriptor)
        _check_kind(path, status.st_mode)
        if flags & (os.O_WRONLY | os.O_RDWR) and status.st_nlink > 1:
            raise ValueError(f"{path} must have one name, but is a hard link: copy the folder, and work on the copy")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def reader(path: str | os.PathLike) -> BinaryIO:
    """Returns a regular file, opened for reading bytes; errors as of `open_plain`."""
    return os.fdopen(open_plain(path), "rb")


def read_bytes(path: str | os.PathLike) -> bytes:
    """Returns the content of a regular file; errors as of `open_plain`."""
    with reader(path) as file:
        return file.read()


def check_path(argument: str, path: Any) -> None:
    """Raises `ValueError` unless `path` names a file or folder: an empty text would be the current folder."""
    named = isinstance(path, (str, os.PathLike)) and os.fspath(path).strip() and "\0" not in os.fspath(path)
    if not named:
        raise ValueError(f"{argument} must name a file or folder ('.' is the current one), got {path!r:.100}")


def check_plain(folder: str | os.PathLike) -> None:
    """Raises `ValueError` unless each name of jfcl in `folder` is that of a file or a folder, as it should be.

    `folder` itself may be a symbolic link: its name is the user's own.
    """
    _check_entries(Path(folder), NAMES)


def _check_entries(folder: Path, names: re.Pattern | None) -> None:
    with contextlib.suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if names is not None and not names.fullmatch(entry.name):
                continue
            is_file, is_folder = (test(follow_symlinks=False) for test in (entry.is_file, entry.is_dir))
            wanted = "" if is_file or is_folder else "a file or a folder"
            if is_folder and FILES.fullmatch(entry.name):
                wanted = "a file"
            elif is_file and names is not None and entry.name in FOLDERS:
                wanted = "a folder"
            if wanted:
                kind = KINDS.get(stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode), "a device")
                raise ValueError(f"{folder / entry.name} must be {wanted}, but it is {kind}: move it away")
            if is_folder and (names is None or entry.name in FOLDERS):
                _check_entries(folder / entry.name, None)
