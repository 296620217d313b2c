"""Data sets by name: embedded in scikit-learn, official files in a data directory, or tensorflow-datasets."""

import csv
import functools
import gzip
import hashlib
import importlib.util
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jfcl.core import check, check_integers
from jfcl.data.concepts import CONCEPTS, points
from jfcl.data.dataset import Dataset
from jfcl.data.images import unit
from jfcl.data.tfds_source import load_tfds


def load(name: str, data_dir: str | os.PathLike | None = None) -> Dataset:
    """Loads a whole data set into host memory.

    Args:
      name: a name in `DATASETS`, or any image data set of tensorflow-datasets ("kmnist", "emnist/balanced", ...).
      data_dir: the folder of official files (a sub-folder per data set); default: the environment variable
        `JFCL_DATA_DIR`. Without either, tensorflow-datasets (TFDS) is the source. For a name that is not in `DATASETS`,
        `data_dir` may also be a TFDS directory with prepared array_record data sets.

    Returns:
      A `Dataset`. Official files may be gzipped, xz-compressed or plain; their content's SHA-256 is verified.

    Raises:
      ValueError: an unknown name; files that are missing (with the places searched, and how to get them) or corrupted;
        a TFDS data set that is neither prepared nor can be prepared here.

    Example:
      >>> digits = load("digits")
      >>> digits.train["x"].shape, digits.train["y"][:5].tolist(), digits.test
      ((1797, 8, 8, 1), [0, 1, 2, 3, 4], None)
    """
    data_dir = data_dir or os.environ.get("JFCL_DATA_DIR") or None
    folders = _FOLDERS.get(name, [name])
    places = "; ".join(f"{folder}/: {_INSTRUCTIONS[folder]}" for folder in folders if folder in _INSTRUCTIONS)
    if name not in DATASETS or (data_dir is None and name in _IN_TFDS):
        official = f" in {places}" if places else ""
        return load_tfds(_IN_TFDS.get(name, name), data_dir, choices=DATASETS, official=official)._replace(name=name)
    accepted = f"a folder (or JFCL_DATA_DIR), since {name!r} is read from official files only, in {places}"
    check(data_dir is not None or name in _NO_FILES, "data_dir", data_dir, accepted)
    loader, description = DATASETS[name]
    return loader(None if data_dir is None else Path(data_dir))._replace(name=name, description=description)


def _dataset(train: dict, test: dict | None, num_classes: int, writer: dict | None = None) -> Dataset:
    return Dataset("", train, test, num_classes, writer, "")  # `load` adds the name and the description


def _digits(data_dir) -> Dataset:
    images, labels = _digits_file()
    x = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    return _dataset({"x": x, "y": labels.astype(np.int32)}, None, 10)


def _points(data_dir, name: str) -> Dataset:
    return _dataset(points(name, 50_000, 0), points(name, 10_000, 1), 2)


@functools.cache
def _digits_file() -> tuple[np.ndarray, np.ndarray]:
    """Reads the file of scikit-learn, since an import of `sklearn.datasets` takes over a second."""
    file = Path(importlib.util.find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not file.exists():
        from sklearn.datasets import load_digits

        return load_digits(return_X_y=True)
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)


def _idx_images(data_dir, folder: str, prefixes: tuple[str, str] = ("train", "t10k"), num_classes: int = 10) -> Dataset:
    """Loads the four idx files of an MNIST-like data set."""
    splits = []
    for prefix in prefixes:
        images = _idx(_read(data_dir, [folder], f"{prefix}-images-idx3-ubyte"))
        labels = _idx(_read(data_dir, [folder], f"{prefix}-labels-idx1-ubyte"))
        splits.append({"x": unit(images[..., None]), "y": labels.astype(np.int32)})
    return _dataset(*splits, num_classes)


_mnist, _fashion_mnist = (functools.partial(_idx_images, folder=folder) for folder in ("mnist", "fashion_mnist"))


def _mnist_writers(data_dir) -> Dataset:
    mnist, writer = _mnist(data_dir), {}
    for split, images in [("train", mnist.train), ("test", mnist.test)]:
        rows = _idx(_read(data_dir, ["qmnist_writers"], f"qmnist-{split}-labels-idx2-int"))
        # Rows 0 .. n-1 describe MNIST's images in order; QMNIST's test file continues with images not in MNIST.
        writer[split] = rows[: len(images["y"]), 2].astype(np.int32)
    return mnist._replace(writer=writer)


def _emnist_letters(data_dir) -> Dataset:
    data = _idx_images(data_dir, "emnist_letters", ("emnist-letters-train", "emnist-letters-test"), 26)
    # Official files store images transposed and count letters from 1.
    train, test = ({"x": s["x"].swapaxes(1, 2), "y": s["y"] - 1} for s in (data.train, data.test))
    return data._replace(train=train, test=test)


def _cifar10(data_dir) -> Dataset:
    folders = ["cifar10", "cifar-10-batches-bin", "cifar10/cifar-10-batches-bin"]

    def batches(names):
        raw = [_read(data_dir, folders, name) for name in names]
        rows = np.concatenate([np.frombuffer(b, np.uint8).reshape(-1, 3073) for b in raw])
        # A record is a label, then the red, the green and the blue plane.
        images = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        return {"x": unit(np.ascontiguousarray(images)), "y": rows[:, 0].astype(np.int32)}

    return _dataset(batches([f"data_batch_{i}.bin" for i in range(1, 6)]), batches(["test_batch.bin"]), 10)


def _ag_news(data_dir) -> Dataset:
    folder = ["ag_news_csv"]

    def read(name, reader, text, label):
        rows = list(reader(io.StringIO(_read(data_dir, folder, name).decode(), newline="")))
        x, y = [text(row) for row in rows], [label(row) for row in rows]
        return {"x": np.array(x, object), "y": np.array(y, np.int32)}

    def official(name):
        return read(name, csv.reader, lambda row: f"{row[1]} {row[2]}", lambda row: int(row[0]) - 1)

    if _find(data_dir, folder, "train.csv")[0] is None and _find(data_dir, folder, _AG_SUBSET)[0] is not None:
        # "title . description" there, "title description" in the official files.
        whole = lambda row: row["text"].replace(" . ", " ", 1)  # noqa: E731
        train = read(_AG_SUBSET, csv.DictReader, whole, lambda row: int(row["gt"]))
    else:
        train = official("train.csv")
    return _dataset(train, official("test.csv"), 4)


def _femnist(data_dir) -> Dataset:
    """Loads the output of LEAF's `preprocess.sh`: `femnist/train/*.json` and `femnist/test/*.json`, by writer."""
    splits, writers, numbers = {}, {}, {}
    for split in ("train", "test"):
        files = data_dir / "femnist" / split / "*.json"
        people = [p for path in sorted(files.parent.glob("*.json")) if path.is_file() for p in _leaf_writers(path)]
        if not people:
            raise ValueError(f"data_dir {str(data_dir)!r} does not hold writers in {files}: {_INSTRUCTIONS['femnist']}")
        names, x, y = zip(*people, strict=True)
        ids = [numbers.setdefault(name, len(numbers)) for name in names]
        splits[split] = {"x": np.concatenate(x), "y": np.concatenate(y)}
        writers[split] = np.repeat(np.array(ids, np.int32), [len(labels) for labels in y])
    return _dataset(splits["train"], splits["test"], 62, writers)


def _leaf_writers(path: Path) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yields the name, the images and the labels of every writer in a file of LEAF."""
    try:
        for name, examples in json.loads(path.read_text())["user_data"].items():
            images = np.asarray(examples["x"], np.float64).reshape(-1, 28, 28, 1)
            in_range = ((images >= 0) & (images <= 1)).all()
            check(in_range, f"pixels of writer {name}", examples["x"], "lists of numbers from 0 to 1")
            labels = check_integers(f"labels of writer {name}", examples["y"], len(images), within=(0, 61))
            yield name, images.astype(np.float32), labels.astype(np.int32)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{path} is not as LEAF writes it ({type(error).__name__}: {error})") from None


def _tiny_shakespeare(data_dir) -> Dataset:
    """Loads a text per speaking role: its speeches in order. Roles of one name in several plays are one speaker."""
    speeches: dict[str, list[str]] = {}
    for block in _read(data_dir, ["tiny_shakespeare"], "input.txt").decode().strip().split("\n\n"):
        speaker, _, speech = block.strip().partition(":\n")
        if speech:  # some names stand alone
            speeches.setdefault(speaker, []).append(speech)
    names = sorted(speeches)
    x = np.array(["\n".join(speeches[name]) for name in names], object)
    train = {"x": x, "y": np.zeros(len(x), np.int32)}
    writer = {"train": np.arange(len(x), dtype=np.int32)}
    return _dataset(train, None, None, writer)._replace(writer_names=names, tokens="characters")


_SYNTHETIC = {
    "sea": "60,000 points of the cube [0, 10]^3, x1 + x2 at most 9, 8, 7 or 9.5, 10 % of the labels wrong",
    "sine": "60,000 points of the unit square, below a sine or above it",
    "circle": "60,000 points of the unit square, outside one circle or another",
}
DATASETS = {
    "digits": (_digits, "1,797 handwritten digits, 8x8, embedded in scikit-learn"),
    "mnist": (_mnist, "70,000 handwritten digits, 28x28"),
    "mnist_writers": (_mnist_writers, "MNIST with the writer of every digit (QMNIST's label files)"),
    "fashion_mnist": (_fashion_mnist, "70,000 pieces of clothing, 28x28, 10 kinds"),
    "emnist_letters": (_emnist_letters, "145,600 handwritten letters, 28x28, upper and lower case merged"),
    "femnist": (_femnist, "805,263 handwritten letters and digits, 28x28, by writer (LEAF's files)"),
    "cifar10": (_cifar10, "60,000 colour photographs, 32x32, 10 kinds"),
    "ag_news": (_ag_news, "news of 4 topics, as text (see jfcl.data.tokenize)"),
    "tiny_shakespeare": (_tiny_shakespeare, "40,000 lines of plays, by speaker, as characters (char-rnn's file)"),
    **{name: (functools.partial(_points, name=name), description) for name, description in _SYNTHETIC.items()},
}
_NO_FILES = ("digits", *CONCEPTS)
# Without a data directory: names in TFDS, and the folders of data sets that are not in it.
_IN_TFDS = {"mnist": "mnist", "fashion_mnist": "fashion_mnist", "cifar10": "cifar10", "ag_news": "ag_news_subset"}
_FOLDERS = {"ag_news": ["ag_news_csv"], "mnist_writers": ["mnist", "qmnist_writers"]}  # where it is not the name


# Official files.

_AG_SUBSET = "samples10000valMed.csv"
_LARGEST = 2**28  # bytes of a file's content; the official ones have fewer than 2**27
_IDX_TYPES = {0x08: "u1", 0x0C: ">i4"}
_OPENERS = {".gz": gzip.open, ".xz": lzma.open, "": open}

_INSTRUCTIONS = {
    "mnist": "the four files are at https://storage.googleapis.com/cvdf-datasets/mnist/",
    "fashion_mnist": "the four files are at https://github.com/zalandoresearch/fashion-mnist",
    "femnist": "run LEAF's data/femnist/preprocess.sh -s niid -t sample (github.com/TalwalkarLab/leaf), and put its"
    " data/train and data/test there",
    "cifar10": "unpack https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz there",
    "qmnist_writers": "the label files are at https://github.com/facebookresearch/qmnist",
    "emnist_letters": "the files are in gzip.zip, see nist.gov/itl/products-and-services/emnist-dataset",
    "tiny_shakespeare": "input.txt is at https://github.com/karpathy/char-rnn, in data/tinyshakespeare",
    "ag_news_csv": "the csv files of Zhang, Zhao, LeCun (2015), e.g. at github.com/mhjabreel/CharCnn_Keras",
}

# SHA-256 of each file's content, unpacked. Of AG News' training file only the git blob id is known.
_SUMS = Path(__file__).with_name("SHA256SUMS").read_text().splitlines()
_DIGESTS = {"ag_news_csv/train.csv": "694aa19971315410e000404523796b76349d3c1d"}
_DIGESTS |= {name: digest for digest, name in map(str.split, _SUMS)}


def _find(data_dir: Path, folders: list[str], name: str) -> tuple[Path | None, list[Path]]:
    """Returns the first existing file of that name, packed or not, and all places searched."""
    places = [data_dir / folder / (name + ending) for folder in folders for ending in _OPENERS]
    return next((place for place in places if place.is_file()), None), places


def _read(data_dir: Path, folders: list[str], name: str) -> bytes:
    """Returns the verified content of an official file, of which no more than `_LARGEST` bytes are unpacked."""
    path, places = _find(data_dir, folders, name)
    if path is None:
        searched = f"looked for {', '.join(map(str, places))}. To get it: {_INSTRUCTIONS[folders[0]]}"
        otherwise = "or leave data_dir (and JFCL_DATA_DIR) unset to use tensorflow-datasets"
        raise ValueError(f"data_dir {str(data_dir)!r} does not hold {folders[0]}/{name}: {searched}; {otherwise}")
    try:
        with _OPENERS[path.name.removeprefix(name)](path, "rb") as file:
            content = file.read(_LARGEST)
    except (OSError, EOFError, MemoryError, lzma.LZMAError, zlib.error) as error:
        raise ValueError(f"{path} is corrupted: it cannot be unpacked ({error}); fetch it again") from error
    kind, expected = "SHA-256", _DIGESTS[f"{folders[0]}/{name}"]
    digest = hashlib.sha256(content)
    if len(expected) == 40:
        kind, digest = "git blob id", hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False)
    if digest.hexdigest() != expected:
        what = f"expected content with {kind} {expected}, found {digest.hexdigest()} ({len(content)} bytes)"
        raise ValueError(f"{path} is corrupted, or another version: {what}; fetch it again")
    return content


def _idx(content: bytes) -> np.ndarray:
    """Returns the array of an idx file: 2 zero bytes, type, rank, big-endian sizes, then the numbers."""
    kind, rank = content[2], content[3]
    shape = np.frombuffer(content, ">i4", rank, 4)
    return np.frombuffer(content, _IDX_TYPES[kind], offset=4 + 4 * rank).reshape(shape)
