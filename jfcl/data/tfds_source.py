"""tensorflow-datasets (TFDS) as a source: reads prepared sets without TensorFlow, prepares others with it.

The extraction cache of TFDS names unpacked files by their file name alone, and would silently mix MNIST and
Fashion-MNIST, which have the same file names; so each data set has its own download directory.
"""

import contextlib
import importlib.util
import io
import os
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jfcl.core import check
from jfcl.core.names import value_hint
from jfcl.data.dataset import Dataset
from jfcl.data.readers import SPLITS, from_frame
from jfcl.data.tables import Table

_TEXTS = ("title", "text", "description")  # features that are joined
_OFFICIAL = "Or set data_dir (or JFCL_DATA_DIR) to a folder with the official files"


def load_tfds(name: str, data_dir, *, choices: Iterable[str] = (), official: str = "") -> Dataset:
    """Reads a TFDS data set with "image" (or text) and "label" features, and prepares it if needed.

    `choices` are further names to suggest for an unknown one; `official` says where jfcl finds official files.
    """
    folder = _folder(name, data_dir, choices, official)
    with _readable(folder) as builder:
        info = builder.info
    x = ["image"] if "image" in info.features else [key for key in _TEXTS if key in info.features]
    dataset = _read(name, folder, x=x or None, y="label")
    return dataset._replace(description=f"tensorflow-datasets {info.full_name}", table=None)


def from_tfds(name: str, *, data_dir: str | os.PathLike | None = None, **options: Any) -> Dataset:
    """Returns any data set of tensorflow-datasets, grouped by the feature `by`, which names the client of an example.

    `jfcl.data.build(dataset, partition="writer")` then makes a client of each name.

    Args:
      name: its name in TFDS, with its config if it has one.
      data_dir: a TFDS directory to search first; default: the environment variable `JFCL_DATA_DIR`.
      options: as in `jfcl.data.from_huggingface`, with features in place of columns.

    Example:
      >>> from_tfds("shakespeare", by="character")  # doctest: +SKIP
    """
    return _read(name, _folder(name, data_dir or os.environ.get("JFCL_DATA_DIR")), **options)


def _read(name: str, folder: Path, **options: Any) -> Dataset:
    """Returns the data set of a prepared folder; `options` are those of `from_tfds`."""
    with _readable(folder) as builder:
        features, splits = dict(builder.info.features.items()), builder.info.splits
    check("train" in splits, "name", name, f"a data set with a split 'train'; its splits are {sorted(splits)}")

    def read(split: str, wanted: list[str]) -> dict[str, list[Any]]:
        with _readable(folder) as builder:
            rows = _rows(builder, split)
        return {c: [v.decode() if isinstance(v, bytes) else v for v in (row[c] for row in rows)] for c in wanted}

    tables = {split: Table(sorted(features), partial(read, split), features) for split in SPLITS if split in splits}
    return from_frame(tables["train"], test=tables.get("test"), name=name, **options)


def _rows(builder: Any, split: str) -> list[dict[str, Any]]:
    """Returns the rows of a split, images as PIL has them: TFDS would decode a palette to its numbers."""
    import tensorflow_datasets as tfds
    from PIL import Image

    kinds = {name: kind for name, kind in builder.info.features.items() if isinstance(kind, tfds.features.Image)}
    channels = {name: kind.shape[-1] for name, kind in kinds.items() if kind.np_dtype != np.float32}
    skipped = {name: tfds.decode.SkipDecoding() for name in channels}

    def shown(name, content):
        image = Image.open(io.BytesIO(content))
        image.load()
        wanted = {3: "RGB", 4: "RGBA"}.get(channels[name])  # as TensorFlow decodes them
        plain = image.mode.startswith("I") or "A" in image.mode or wanted in (None, image.mode)
        return image if plain else image.convert(wanted)

    source = builder.as_data_source(split, decoders=skipped)
    rows = [source[i] for i in range(len(source))]
    return [row | {name: shown(name, row[name]) for name in channels} for row in rows]


@contextlib.contextmanager
def _readable(folder: Path, builder: Any = None, otherwise: str = "") -> Iterator[Any]:
    """Yields the builder of a folder; raises `ValueError` for the errors of its readers, which are several libraries.

    `builder` prepares the folder; the default reads a prepared one. `otherwise` is another way to get the data.
    """
    import tensorflow_datasets as tfds

    try:
        yield builder or tfds.builder_from_directory(str(folder))
    except (MemoryError, ImportError):
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise ValueError(f"{folder} cannot be prepared or read by tensorflow-datasets ({why}).{otherwise}") from error


def _folder(name: str, data_dir, choices: Iterable[str] = (), official: str = "") -> Path:
    """Returns the folder of a prepared data set; prepares it if needed."""
    otherwise = f" {_OFFICIAL}{official}" if official else ""
    root = Path(os.environ.get("TFDS_DATA_DIR") or os.path.expanduser("~/tensorflow_datasets"))  # as TFDS chooses it
    roots = [Path(data_dir), root] if data_dir else [root]
    for folder in filter(None, (prepared_folder(place, name) for place in roots)):
        return folder
    import tensorflow_datasets as tfds

    builders = tfds.list_builders(with_community_datasets=False)
    if name.split("/")[0] not in builders:
        hint = value_hint("dataset", name, [*choices, *builders])
        accepted = ", ".join([*choices, "or an image data set of tensorflow-datasets"])
        raise ValueError(f"unknown dataset {name!r}{hint} Accepted: {accepted}")
    # TFDS imports importlib_resources to find its builders' files, but does not declare it.
    missing = [module for module in ("tensorflow", "importlib_resources") if importlib.util.find_spec(module) is None]
    if missing:
        searched = f"looked for array_record files under {', '.join(str(place / name) for place in roots)}"
        needs = f"preparing it needs {' and '.join(missing)}: pip install 'jfcl[tfds]'"
        raise ValueError(f"data set {name!r} is not prepared ({searched}), and {needs}.{otherwise}")
    downloads = root / "downloads" / name.replace("/", "_")
    builder = tfds.builder(name, data_dir=str(root), file_format="array_record")
    with _readable(root / name, builder, otherwise):
        builder.download_and_prepare(download_dir=str(downloads), file_format="array_record")
    folder = prepared_folder(root, name)
    check(folder is not None, str(root / name), "none", "a folder with array_record files, prepared by TFDS")
    return folder


def prepared_folder(root: Path, name: str) -> Path | None:
    """Returns `root/name[/config]/version` of the newest version with array_record files, or `None`."""
    top = root / name
    infos = list(top.glob("*/dataset_info.json")) or list(top.glob("*/*/dataset_info.json"))
    folders = [info.parent for info in infos if info.parent.name.replace(".", "").isdigit()]
    folders = [folder for folder in folders if any(folder.glob("*.array_record*"))]
    configs = sorted({f"{name}/{folder.parent.name}" for folder in folders})
    if len(configs) > 1:
        raise ValueError(f"data set {name!r} is prepared in several configs: name one, {configs}")
    return max(folders, key=lambda folder: list(map(int, folder.name.split("."))), default=None)
