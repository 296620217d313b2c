"""A run's folder: configuration, metrics line by line, checkpoints. It gives the guarantees of a small database.

    config.json     the options, jfcl's and jax's versions      metrics.jsonl   a line per seed and evaluated round
    summary.json    the result, digests of the files beside it  clients.csv     final results of every client
    checkpoints/    the last two states                         plots/*.png     report.html
    store/          a population's data                         client_rows/    per-client state, if it is large
    lock            the process that writes, or wrote last

Every read is verified: a checkpoint by the SHA-256 of every array, the lines of `metrics.jsonl` before it by their
number and SHA-256, results by the digests in `summary.json`. Every file becomes visible whole (`jfcl.core.files`), and
only the process that holds the lock writes. A command that is refused changes nothing: of a run that is resumed, `open`
and `restore` only read, and `begin` makes the first change but that of a population's rows, which are verified before.
The results of a finished run that is extended stay until a checkpoint of a later round is written. No link or FIFO in a
folder is followed (`jfcl.core.plain`).
"""

import contextlib
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax

from jfcl._version import __version__
from jfcl.core import PyTree, check, default_device, files, plain
from jfcl.core.files import read_json, write_json
from jfcl.simulation.client_rows import ClientRows
from jfcl.simulation.leaves import UnusableError, read_leaves, write_leaves
from jfcl.simulation.records import finite_or_none, from_line, to_line
from jfcl.simulation.versions import UNCHANGED, VERSIONS, check_version, saved_config, warn_of_versions

# Options that may differ between a run and its resumption.
ENDS = ("num_rounds", "patience", "monitor", "eval_every", "given")  # when the run ends, and what follows from it
FREE = (*ENDS, "out", "resume", "progress", "data_dir", "mapping", "chunk", "devices", "versions")
MAPPED = ("mapping", "chunk", "devices")  # the ones that change the order of sums
ARRAYS = ("params.npz", "personal.npz", "mixture.npz", "tree.npz")
RESULTS = ("summary.json", "clients.csv", "clients_by_round.csv", *ARRAYS)
# The file that marks a folder as one of a kind, and the others that are in it.
KINDS = {
    "run": ("config.json", ("metrics.jsonl", *RESULTS, "checkpoints", "plots", "report.html")),
    "sweep": ("setting.json", ("cells", "sweep.json", "heatmap.png", "best.toml")),
    "ranking": ("settings.json", ()),  # whose cells may have been copied into the folder
}


class Restored(NamedTuple):
    """A verified checkpoint, or the start of a run: `state`, running `totals` and `records` after `round` rounds."""

    round: int
    state: PyTree
    totals: dict[str, Any]
    records: list[dict[str, Any]]


def check_folder(path: str | Path, resume: bool, kind: str) -> None:
    """Raises `ValueError` unless a new folder of a kind can begin in `path`, or with `resume` one continue."""
    plain.check_path("out", path)
    path, remedy = Path(path), "choose a new or empty folder"
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is a file; {remedy}")
    plain.check_plain(path)
    kinds = [name for name, (file, _) in KINDS.items() if (path / file).exists()]
    if resume and kind in kinds:
        return
    if kind in kinds:
        resuming = "resume it (--resume on the command line, resume=True in Python)"
        raise ValueError(f"{path} already holds a {kind}: {resuming}, or {remedy}")
    files_there = [name for name in KINDS[kind][1] if _holds_something(path / name)]
    if kinds or files_there:
        raise ValueError(f"{path} holds {f'a {kinds[0]}' if kinds else ', '.join(files_there)} already; {remedy}")


def check_same(path: Path, config: dict[str, Any], unknown: Sequence[str] = ()) -> dict[str, Any]:
    """Returns the configuration of the run in `path`; `ValueError` unless it is `config`, apart from `unknown`.

    A store may have moved: its content is compared, as a part of `cohorts`.
    """
    old, new = saved_config(path), _as_read(config)
    if changed := differences(old, new, {*old, *new} - {*FREE, *unknown, "store"}):
        raise ValueError(f"{path} holds a run of another configuration ({changed}); {UNCHANGED}")
    return old


class RunFolder:
    """The files of one run, for the process that writes them, which `open` gives the folder's lock."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metrics_path, self.lock_path = self.path / "metrics.jsonl", self.path / "lock"
        self._checkpoints = self.path / "checkpoints"
        self._chain, self._count, self._bytes = hashlib.sha256(), 0, 0  # of the lines of `metrics.jsonl`
        self._config: dict[str, Any] | None = None  # to be written by `begin`
        self._run = ""  # the identity of the run, see `identity`
        self._ended = False  # there is a summary, of a run that is resumed
        self._waiting: list[bytes] = []  # lines that follow it, until a checkpoint after them is written
        self._restored = False

    @classmethod
    @contextlib.contextmanager
    def open(cls, path: str | Path, config: dict[str, Any], resume: bool = False) -> Iterator[Self]:
        """Yields the folder of a new run, or of the run to resume, if there is one; only `begin` changes that one.

        Raises:
          ValueError: `path` holds another run, or one of another configuration; a finished run without checkpoints; a
            run that another process writes.
        """
        folder, saved = cls(path), _as_read(config)
        file = folder.path / "config.json"
        resume = resume and file.exists()
        check_folder(path, resume, "run")
        folder.path.mkdir(parents=True, exist_ok=True)
        with files.lock(folder.lock_path):
            if resume:
                folder._check_config(saved)
                folder._check_checkpoints()
            else:
                check_folder(path, False, "run")
                folder._remove_leftovers()
                files.sign(folder.lock_path)
                folder._checkpoints.mkdir(exist_ok=True)
                folder.metrics_path.unlink(missing_ok=True)  # an empty one
                # Last: a folder without config.json holds no run, and remains usable.
                saved |= {"versions": VERSIONS}
                folder._run = identity(saved)
                write_json(file, saved)
                files.sync(folder.path.parent)
            yield folder

    def _check_config(self, new: dict[str, Any]) -> None:
        old = check_same(self.path, new)
        self._run = identity(old)
        warn_of_versions(self.path, old["versions"])
        if moved := differences(old, new, {n for n in MAPPED if n in old and n in new}):
            what = "the rest of the run may differ in the last bits from one that was not interrupted"
            warnings.warn(f"{self.path} is resumed with another mapping ({moved}): {what}", stacklevel=4)
        more = new.get("num_rounds", 0) > old.get("num_rounds", 0)
        ends = {n: new[n] for n in ENDS if n in new and new[n] != old.get(n) and (n != "num_rounds" or more)}
        if ends:  # the configuration in the folder then still resumes the run
            self._config = old | ends

    def _check_checkpoints(self) -> None:
        self._ended = (self.path / "summary.json").exists()
        if self._ended and not self.rounds():
            raise ValueError(
                f"{self.path} holds a finished run, but its checkpoints are missing: put the folder checkpoints/ back,"
                f" or run again in another folder; {UNCHANGED}"
            )

    def _remove_leftovers(self) -> None:
        for folder in (self.path, self._checkpoints, self.path / "plots"):
            files.remove_leftovers(folder)

    def rounds(self) -> list[int]:
        """Returns the rounds with a checkpoint, damaged or not, latest first."""
        names = [p.name for p in self._checkpoints.glob("*") if p.name.isascii() and p.name.isdecimal()]
        return sorted((int(name) for name in names if name == str(int(name))), reverse=True)

    def records(self) -> list[dict[str, Any]]:
        """Returns the records in `metrics.jsonl`, which must exist, without a last line that a kill cut short."""
        if not self.metrics_path.is_file():
            raise ValueError(f"{self.metrics_path} is missing")
        return self._lines(plain.read_bytes(self.metrics_path))

    def _lines(self, data: bytes) -> list[dict[str, Any]]:
        lines = data.splitlines(keepends=True)
        records = []
        for i, line in enumerate(lines, 1):
            record = from_line(line)
            if record is not None:
                records.append(record)
            elif i < len(lines) or line.endswith(b"\n"):
                raise ValueError(f"{self.metrics_path} is damaged: line {i} is no record; {UNCHANGED}")
        return records

    # ---- Writing ---------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Makes the first change of a resumed run: removes all that follows the checkpoint of `restore`."""
        files.sign(self.lock_path)
        cut = self._restored and self.metrics_path.exists() and self.metrics_path.stat().st_size != self._bytes
        if self._ended and cut:  # stopped while it went on, or its last checkpoint was removed: these rounds run again
            (self.path / "summary.json").unlink()
            self._ended = False
        if not self._ended:
            self._write_config()
        self._remove_leftovers()
        self._checkpoints.mkdir(exist_ok=True)
        if cut:
            with files.opened(self.metrics_path, os.O_WRONLY) as descriptor:
                os.ftruncate(descriptor, self._bytes)  # in place: a full disk has room for it
                os.fsync(descriptor)

    def _write_config(self) -> None:
        if self._config is not None:
            write_json(self.path / "config.json", self._config)
            self._config = None

    def _go_on(self) -> None:
        """Turns a finished run into one that goes on: its summary gives way to the lines that follow it."""
        self._write_config()
        self._add(b"".join(self._waiting))  # on a full disk the run stays finished
        os.unlink(self.path / "summary.json")
        self._ended, self._waiting = False, []

    def append(self, records: list[dict[str, Any]]) -> None:
        """Adds lines to `metrics.jsonl`, all or none of them; after the end of a finished run, with a checkpoint."""
        data = b"".join(to_line(record) for record in records)
        if self._ended:
            self._waiting.append(data)
        else:
            self._add(data)
        self._chain.update(data)
        self._count, self._bytes = self._count + len(records), self._bytes + len(data)

    def _add(self, data: bytes) -> None:
        with files.opened(self.metrics_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND) as descriptor:
            before = os.fstat(descriptor).st_size
            try:
                files.write_all(descriptor, data)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, before)
                raise

    def save(self, round_: int, state: PyTree, totals: dict[str, Any], client_rows: ClientRows | None = None) -> None:
        """Writes a checkpoint of `state` after `round_` rounds, whole or not at all; the two latest are kept.

        An existing checkpoint of `round_` stays. `client_rows` are those of a population, which `state` describes.
        """
        rounds = self.rounds()
        if rounds[:1] == [round_]:
            return
        if client_rows is not None:
            client_rows.checkpointing()
        place = self._checkpoints / str(round_)
        scratch = place.with_name(place.name + files.SUFFIX)
        try:
            scratch.mkdir(parents=True)
            leaves = write_leaves(scratch / "state.bin", state)
            metadata = {"run": self._run, "round": round_, "leaves": leaves, "totals": totals, "versions": VERSIONS}
            metadata["records"] = {"count": self._count, "bytes": self._bytes, "sha256": self._chain.hexdigest()}
            with files.new_file(scratch / "about.json") as descriptor:
                files.write_all(descriptor, files.json_bytes(files.seal(metadata), allow_nan=True))
            files.sync(scratch)
            if self._ended:  # now that the checkpoint has found room
                self._go_on()
            if self._count:
                files.sync(self.metrics_path)  # the checkpoint holds the digest of these lines
                files.sync(self.path)
        except BaseException:
            files.remove_leftovers(place.parent)
            raise
        os.rename(scratch, place)
        files.sync(place.parent)
        for old in rounds[1:]:
            files.remove_folder(place.with_name(str(old)))
        if client_rows is not None:
            client_rows.checkpointed()

    # ---- Reading ---------------------------------------------------------------------------------------------------

    def restore(self, like: PyTree) -> Restored | None:
        """Returns the latest checkpoint, with a state of the structure of `like`; `None` if there is none.

        Raises:
          ValueError: a damaged checkpoint, or one of another model, number of clients or run; lines of `metrics.jsonl`
            that differ from those before the checkpoint.
        """
        self._restored = True
        if not (rounds := self.rounds()):
            return None
        round_ = rounds[0]
        place = self._checkpoints / str(round_)
        try:
            metadata = read_json(place / "about.json")
            if metadata["run"] != (self._run or identity(saved_config(self.path))):
                raise UnusableError("belongs to a run of another configuration, or config.json was changed since")
            state = read_leaves(place / "state.bin", metadata["leaves"], like)
        except UnusableError as error:
            raise ValueError(f"the checkpoint of round {round_} in {self.path} {error}; {UNCHANGED}") from None
        except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:  # of odd content
            raise ValueError(
                f"{place} is damaged ({type(error).__name__}: {str(error)[:200]}): remove it, and the run continues"
                f" from the checkpoint before it, or from the beginning; {UNCHANGED}"
            ) from None
        return Restored(round_, state, metadata["totals"], self.verified(round_, metadata["records"]))

    def verified(self, round_: int, expected: dict[str, Any]) -> list[dict[str, Any]]:
        """Returns the records before a checkpoint; `ValueError` if their lines differ from its digest."""
        data = plain.read_bytes(self.metrics_path)[: expected["bytes"]] if self.metrics_path.exists() else b""
        chain = hashlib.sha256(data)
        if len(data) != expected["bytes"] or chain.hexdigest() != expected["sha256"]:
            raise ValueError(
                f"{self.metrics_path} is damaged: its first {expected['count']} lines are not those that preceded the"
                f" checkpoint of round {round_}; {UNCHANGED}"
            )
        self._chain, self._count, self._bytes = chain, expected["count"], expected["bytes"]
        return self._lines(data)


def _as_read(config: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration as it is read back from `config.json`; `ValueError` for what JSON does not hold."""
    try:
        return json.loads(json.dumps(finite_or_none(config)))
    except TypeError as error:
        raise ValueError(f"config must hold names, numbers, texts, lists and dicts, as JSON does: {error}") from None


def identity(config: dict[str, Any]) -> str:
    """Returns a digest of a saved configuration, the same for a run and its resumption.

    It leaves out `FREE` names, and the folder of a warm start, which may be moved once the run has begun.
    """
    fixed = {name: v for name, v in config.items() if name not in (*FREE, "init_from") and v is not None}
    return hashlib.sha256(json.dumps(fixed, sort_keys=True).encode()).hexdigest()


def _holds_something(path: Path) -> bool:
    if path.is_dir():
        return any(not p.name.endswith(files.SUFFIX) for p in path.iterdir())
    return path.exists() and path.stat().st_size > 0


def differences(old: dict[str, Any], new: dict[str, Any], names: Iterable[str]) -> str:
    """Returns the differences under `names` in words; of dicts, only the parts that differ."""
    saved, wanted = (_flat({name: config[name] for name in names if name in config}) for config in (old, new))
    changed = [name for name in sorted({*saved, *wanted}) if saved.get(name) != wanted.get(name)]
    return "; ".join(f"{name}: it has {saved.get(name)!r}, asked for {wanted.get(name)!r}" for name in changed)


def check_setting(file: Path, setting: dict[str, Any], kind: str, number: int) -> dict[str, Any]:
    """Returns the versions that began a folder of cells; `ValueError` unless `file` in it holds their `setting`."""
    saved, folder = read_json(file, check_format=number), file.parent
    check_version(folder, saved.get("versions"))
    old = saved.get("setting")
    check(isinstance(old, dict), str(file), old, f"the setting of a {kind}")
    if changed := differences(old, setting, {*old, *setting}):
        raise ValueError(f"{folder} holds another {kind} ({changed}); choose another folder (--out); {UNCHANGED}")
    return saved["versions"]


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Returns the entries of nested dicts by dotted names."""
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {n: v for part, x in value.items() for n, v in _flat(x, f"{name}.{part}" if name else part).items()}


# Results.


def write_results(folder: Path, contents: dict[str, bytes], summary: dict[str, Any]) -> None:
    """Writes the result files of a run, and `summary.json` with their digests; on a full disk nothing changes."""
    metrics, config = folder / "metrics.jsonl", folder / "config.json"
    with files.lock(folder / "lock"):
        results = contents | ({"metrics.jsonl": plain.read_bytes(metrics)} if metrics.exists() else {})
        digests = {name: hashlib.sha256(data).hexdigest() for name, data in results.items()}
        run = identity(read_json(config, sealed=False)) if config.exists() else None
        sealed = files.seal(finite_or_none(summary) | {"files": digests, "run": run})
        files.replace_together(folder, contents | {"summary.json": files.json_bytes(sealed)})


def verify_results(folder: Path, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Returns `summary.json`; `ValueError` if `config.json` or one of the results `names` differs from it.

    Default: all but the pictures, which can be drawn again.
    """
    summary = read_json(folder / "summary.json")
    digests = summary.get("files")
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise ValueError(f"{folder / 'summary.json'} is damaged: it has no digests of files")
    run = summary.get("run")
    if run is not None and run != identity(read_json(folder / "config.json", sealed=False)):
        raise ValueError(f"{folder / 'config.json'} is damaged: it differs from the one that the run ended with")
    if names is None:
        names = {"metrics.jsonl", *(name for name in summary["files"] if "/" not in name)}
    for name in names:
        read_verified(folder, summary, name)
    return summary


def read_verified(folder: Path, summary: dict[str, Any], name: str) -> bytes:
    """Returns the content of a result; `ValueError` if it is missing, or differs from its digest in `summary`."""
    file = folder / name
    if name not in summary["files"] or ".." in Path(name).parts or Path(name).is_absolute():
        raise ValueError(f"{file} is none of the results of this run")
    if not file.is_file():
        raise ValueError(f"{file} is missing")
    content = plain.read_bytes(file)
    if hashlib.sha256(content).hexdigest() != summary["files"][name]:
        raise ValueError(f"{file} is damaged: it differs from the digest in summary.json")
    return content


def environment() -> dict[str, Any]:
    """Returns the device and the versions of a measurement: `{"device": ..., "versions": {...}}`."""
    import platform
    from importlib.metadata import version

    device = default_device()
    kind = device.device_kind if device.platform != "cpu" else f"CPU, {os.cpu_count()} cores"
    versions = {"jfcl": __version__}  # of this code; the metadata of an editable installation may be older
    versions |= {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")}
    versions |= {"python": platform.python_version()}
    return {"device": f"{len(jax.devices(device.platform))} x {kind}", "versions": versions}
