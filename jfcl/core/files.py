"""Files that are whole or absent, JSON that carries its own digest, arrays, and a lock with its owner.

Every write, rename and removal below a run's folder goes through this module, in the order that crash safety needs: a
temporary file, `fsync`, rename, `fsync` of the folder. A process or a machine that stops in between leaves the old file
or the new one, and at most a temporary file (`*.tmp`), which the next writer removes.
"""

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import socket
import threading
import time
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np

from jfcl.core.checks import check, require
from jfcl.core.plain import open_plain, reader

try:
    import fcntl
except ImportError:  # not on Windows, where folders are therefore not locked
    fcntl = None

SUFFIX = ".tmp"
LEFTOVER = re.compile(r"(.+\.(json|csv|npz|png|html)|\d+)\.tmp")  # of results, and of checkpoints
CHUNK = 2**24  # bytes in one call of the operating system
MOST_JSON = 2**28  # bytes; jfcl writes no larger JSON file
BAD_ARRAY = (ValueError, EOFError, OSError, TypeError, SyntaxError, tokenize.TokenError)  # of a damaged `.npy` file


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Adds the path to errors of the operating system, which omits it where a call takes a descriptor."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise type(error)(error.errno, error.strerror, str(path)) from None


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Yields a descriptor of a regular file, as of `open_plain`, and closes it at the end; errors name the path."""
    descriptor = open_plain(path, flags)
    try:
        with named(path):
            yield descriptor
    finally:
        os.close(descriptor)


def write_all(descriptor: int, data: Any, offset: int | None = None) -> None:
    """Writes all of `data` (bytes or an array of bytes) to an open file: at its position, or from `offset` on."""
    view = memoryview(data)
    while len(view):
        part = view[:CHUNK]
        count = os.write(descriptor, part) if offset is None else os.pwrite(descriptor, part, offset)
        view, offset = view[count:], None if offset is None else offset + count


def sync(path: Path) -> None:
    """Makes the content of a file durable, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with named(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def new_file(path: Path) -> Iterator[int]:
    """Yields a descriptor of a new file, which replaces one of its name; it ends durable, or removed."""
    if os.path.islink(path) or (os.path.lexists(path) and not os.path.isdir(path)):
        os.unlink(path)
    try:
        with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as descriptor:
            yield descriptor
            os.fsync(descriptor)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields an empty folder that is renamed to `path`, which must be new, at the end; an error removes it."""

    def check_new() -> None:
        check(not os.path.lexists(path), "path", str(path), "a folder that does not exist yet")

    check_new()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ValueError(f"path must be in a folder, got {str(path)!r}, which is below a file") from None
    scratch = path.with_name(f".{path.name}{SUFFIX}")
    with lock(path.with_name(f".{path.name}.lock")):
        check_new()  # another process may have made it meanwhile
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            yield scratch
            check_new()
            os.rename(scratch, path)
            sync(path.parent)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def replace_together(folder: Path, contents: dict[str, Any]) -> None:
    """Replaces several files of `folder` (name to bytes); the last one describes the others.

    All of them are first written as temporary files, so that a full disk changes nothing. Then the last one is removed,
    the others are renamed, and the last one is renamed as well.
    """
    *others, last = paths = [folder / name for name in contents]
    scratch = [path.with_name(path.name + SUFFIX) for path in paths]
    try:
        for path, data in zip(scratch, contents.values(), strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            with new_file(path) as descriptor:
                write_all(descriptor, data)
        if others and last.exists():
            os.unlink(last)
            sync(folder)
        for path, target in zip(scratch[:-1], others, strict=True):
            os.replace(path, target)
        for parent in {path.parent for path in others}:
            sync(parent)
        os.replace(scratch[-1], last)
    except BaseException:
        for path in scratch:
            with contextlib.suppress(OSError):
                os.unlink(path)
        raise
    sync(last.parent)


def write_whole(path: Path, data: Any) -> None:
    """Writes a file, whole or not at all; it is durable on return."""
    replace_together(path.parent, {path.name: data})


def remove_folder(path: Path) -> None:
    """Removes a folder such that no reader sees half of it."""
    aside = path.with_name(path.name + SUFFIX)
    _remove(aside)
    os.rename(path, aside)
    sync(path.parent)
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def remove_leftovers(folder: Path) -> None:
    """Removes the temporary files and folders of a process that was stopped, and no others."""
    for path in folder.glob("*" + SUFFIX):
        if LEFTOVER.fullmatch(path.name):
            _remove(path)


# ---------------------------------------------------------------------------------------------------------------
# JSON.


def _digest_of(value: dict[str, Any]) -> str:
    text = json.dumps({name: v for name, v in value.items() if name != "sha256"}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def seal(value: dict[str, Any]) -> dict[str, Any]:
    """Returns `value` with its digest, under `"sha256"`."""
    return value | {"sha256": _digest_of(value)}


def json_bytes(value: Any, *, allow_nan: bool = False) -> bytes:
    """Returns `value` as an indented JSON file."""
    return (json.dumps(value, indent=2, allow_nan=allow_nan) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON, whole or not at all."""
    write_whole(path, json_bytes(value))


def read_json(path: Path, *, sealed: bool = True, check_format: int | None = None) -> dict[str, Any]:
    """Reads a JSON object after a check of its `"format"` and, if `sealed`, of its digest; else `ValueError`."""
    try:
        file = reader(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    try:
        with file:
            size = os.fstat(file.fileno()).st_size
            if size > MOST_JSON:
                raise ValueError(f"it must have at most {MOST_JSON} bytes, got {size}")
            value = json.load(file)
        if not isinstance(value, dict):
            raise ValueError(f"it must hold names and values, got {type(value).__name__}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if check_format is not None:
        version = value.get("format")
        check(version == check_format, f"format of {path}", version, f"{check_format}, as jfcl writes it")
    if sealed and value.get("sha256") != _digest_of(value):
        why = "its content differs from its digest" if "sha256" in value else "it lacks its digest"
        raise ValueError(f"{path} is damaged: {why}")
    return value


# ---------------------------------------------------------------------------------------------------------------
# Arrays.


def npz_bytes(arrays: Mapping[str, Any]) -> bytes:
    """Returns arrays by their names as the content of an `.npz` file; bfloat16, which it does not know, as float32."""
    arrays = {name: np.asarray(x) for name, x in arrays.items()}
    wider = {name: x.astype(np.float32) for name, x in arrays.items() if x.dtype.kind == "V"}
    np.savez(content := io.BytesIO(), **arrays | wider)
    return content.getvalue()


def read_npz(path: Path, read: Callable[[dict[str, np.ndarray]], Any] = dict) -> Any:
    """Returns what `read` makes of the arrays of an `.npz` file, by default a dict.

    Raises:
      ValueError: a damaged file, one that unpacks to much more than its length, or one that `read` fails on.
    """
    try:
        with reader(path) as file, ZipFile(file) as packed, np.load(file) as arrays:
            unpacked, length = sum(part.file_size for part in packed.infolist()), path.stat().st_size
            require(unpacked <= 2 * length + 2**20, f"its arrays are compressed, {unpacked} bytes in {length}")
            return read({name: arrays[name] for name in arrays.files})
    # RuntimeError: of a damaged directory in the archive, among others. AttributeError: of a `.npy`.
    except (*BAD_ARRAY, BadZipFile, IndexError, AttributeError, MemoryError, RuntimeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None


# ---------------------------------------------------------------------------------------------------------------
# The lock.

_held: Counter[tuple[str, int]] = Counter()  # the number of holds by file and thread


@contextlib.contextmanager
def lock(path: Path) -> Iterator[None]:
    """Holds a lock against other processes and threads, or raises `ValueError`; the same thread may enter again.

    The operating system releases the lock when the process ends in any way. The file remains, with the process that
    held it last (`sign`).
    """
    name = (str(path.absolute()), threading.get_ident())
    is_free = fcntl is not None and not _held[name]
    with _taken(path) if is_free else contextlib.nullcontext():
        _held[name] += 1
        try:
            yield
        finally:
            _held[name] -= 1


@contextlib.contextmanager
def _taken(path: Path) -> Iterator[None]:
    descriptor = open_plain(path, os.O_RDWR | os.O_CREAT)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The last owner may have removed the file.
            is_same = os.path.lexists(path) and os.lstat(path).st_ino == os.fstat(descriptor).st_ino
            if not is_same:
                raise ValueError(f"{path.parent} is in use by another process; try again")
        except BlockingIOError:
            last = os.pread(descriptor, 200, 0).decode(errors="replace").strip()  # of `sign`
            use = f"in use by another process{f' ({last}, wrote to it last)' if last else ''}"
            raise ValueError(f"{path.parent} is {use}; wait for it to end, or stop it") from None
        except OSError:  # a file system without locks
            pass
        try:
            yield
        finally:
            if not os.fstat(descriptor).st_size:  # nothing was written, so nothing stays
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def sign(path: Path) -> None:
    """Writes this process's number, host and time into a lock that it holds."""
    owner = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
    data = f"{owner}\n".encode()
    with opened(path, os.O_WRONLY | os.O_CREAT) as descriptor:
        write_all(descriptor, data)
        os.ftruncate(descriptor, len(data))
