"""Data sets against readers written from the formats' definitions; what is missing or corrupted is named."""

import csv
import gzip
import hashlib
import io
import json
import lzma
import re
import shutil
import sys
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from PIL import Image
from sklearn.datasets import load_digits

import jfcl
from jfcl.data import DATASETS, Dataset, build, from_tfds, load, tokenize
from jfcl.data import tfds_source as source
from jfcl.data.concepts import CONCEPTS


def idx(path):
    """The idx format, read as its definition says; shares nothing with the package."""
    content = gzip.decompress(path.read_bytes())
    rank = content[3]
    shape = [int.from_bytes(content[4 + 4 * i : 8 + 4 * i], "big") for i in range(rank)]
    return np.frombuffer(content, {8: "u1", 12: ">i4"}[content[2]], offset=4 + 4 * rank).reshape(shape)


def integers(images):
    """Pixels back as the integers they were; any deviation from k / 255 in float32 is an error."""
    raw = np.rint(images.astype(np.float64) * 255)
    assert images.dtype == np.float32 and images.min() >= 0 and images.max() <= 1
    np.testing.assert_array_equal(images, (raw / 255).astype(np.float32))
    return raw.astype(np.uint8)


def test_digits_are_scikit_learns():
    digits, bunch = load("digits"), load_digits()
    np.testing.assert_array_equal(digits.train["x"][..., 0] * 16, bunch.images)
    np.testing.assert_array_equal(digits.train["y"], bunch.target)
    assert digits.train["x"].dtype == np.float32 and digits.train["y"].dtype == np.int32
    assert digits.test is None and digits.writer is None and digits.num_classes == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pixel_sums"),
    [
        # Sums of all raw pixels of the official files (train, test), taken once with the reader above.
        ("mnist", (1567298545, 264923200)),
        ("fashion_mnist", (3431114169, 573469082)),
    ],
)
def test_idx_data_sets(data_dir, name, pixel_sums):
    data = load(name, data_dir)
    splits = [("train", "train", 60_000), ("t10k", "test", 10_000)]
    for (prefix, split, n), pixel_sum in zip(splits, pixel_sums, strict=True):
        part = getattr(data, split)
        images = idx(data_dir / name / f"{prefix}-images-idx3-ubyte.gz")
        labels = idx(data_dir / name / f"{prefix}-labels-idx1-ubyte.gz")
        assert part["x"].shape == (n, 28, 28, 1) and part["y"].dtype == np.int32
        raw = integers(part["x"])
        np.testing.assert_array_equal(raw[..., 0], images)
        np.testing.assert_array_equal(part["y"], labels)
        assert int(raw.sum(dtype=np.int64)) == pixel_sum
    histogram = np.bincount(data.train["y"]).tolist()
    if name == "mnist":
        assert histogram == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    else:
        assert histogram == [6000] * 10


@pytest.mark.slow
def test_writers_of_mnist(data_dir):
    data = load("mnist_writers", data_dir)
    assert data.name == "mnist_writers"
    count = np.bincount(data.writer["train"])
    count = count[count > 0]
    assert (len(count), count.min(), int(np.median(count)), count.max()) == (539, 19, 116, 131)
    assert (count >= 100).sum() == 440
    assert not set(data.writer["train"]) & set(data.writer["test"])
    # The label file's own class column says that its rows are MNIST's images.
    for split, rows in [("train", 60_000), ("test", 10_000)]:
        table = idx(data_dir / "qmnist_writers" / f"qmnist-{split}-labels-idx2-int.gz")[:rows]
        np.testing.assert_array_equal(table[:, 0], getattr(data, split)["y"])
        np.testing.assert_array_equal(table[:, 2], data.writer[split])
    fed = build(data, partition="writer", num_clusters=2, heterogeneity="rotation", newcomer_examples=20)
    assert len(fed.train.size) == 539
    total = np.sort(fed.train.size + fed.test.size)
    np.testing.assert_array_equal(total, np.sort(count))
    assert len(fed.newcomers.size) == len(np.unique(data.writer["test"]))


@pytest.mark.slow
def test_emnist_letters(data_dir):
    data = load("emnist_letters", data_dir)
    for split, n in [("train", 124_800), ("test", 20_800)]:
        images = idx(data_dir / "emnist_letters" / f"emnist-letters-{split}-images-idx3-ubyte.gz")
        labels = idx(data_dir / "emnist_letters" / f"emnist-letters-{split}-labels-idx1-ubyte.gz")
        part = getattr(data, split)
        assert part["x"].shape == (n, 28, 28, 1)
        for i in range(0, n, 997):
            np.testing.assert_array_equal(integers(part["x"][i])[..., 0], images[i].T)
        np.testing.assert_array_equal(part["y"], labels.astype(int) - 1)
    assert data.num_classes == 26 and set(data.train["y"].tolist()) == set(range(26))


@pytest.mark.slow
def test_cifar10(data_dir):
    data = load("cifar10", data_dir)
    assert data.train["x"].shape == (50_000, 32, 32, 3) and data.test["x"].shape == (10_000, 32, 32, 3)
    assert np.bincount(data.train["y"]).tolist() == [5000] * 10
    assert np.bincount(data.test["y"]).tolist() == [1000] * 10
    content = lzma.decompress((data_dir / "cifar10" / "data_batch_3.bin.xz").read_bytes())
    for i in (0, 1, 4_321, 9_999):
        record = content[3073 * i : 3073 * (i + 1)]
        assert data.train["y"][20_000 + i] == record[0]
        image = integers(data.train["x"][20_000 + i])
        for channel in range(3):
            plane = record[1 + 1024 * channel : 1 + 1024 * (channel + 1)]
            assert image[..., channel].ravel().tolist() == list(plane)


def test_ag_news(data_dir):
    data = load("ag_news", data_dir)
    with open(data_dir / "ag_news_csv" / "test.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert len(rows) == len(data.test["y"]) == 7600
    assert data.test["y"].tolist() == [int(row[0]) - 1 for row in rows]
    assert data.test["x"].tolist() == [row[1] + " " + row[2] for row in rows]
    assert np.bincount(data.test["y"]).tolist() == [1900] * 4
    if not (data_dir / "ag_news_csv" / "train.csv").exists():
        assert np.bincount(data.train["y"]).tolist() == [2514, 2504, 2519, 2463]
        for split in (data.train, data.test):  # titles end without a full stop of their own
            assert np.mean([" . " in text for text in split["x"]]) < 0.01
    tokens, words = tokenize(data, vocab_size=2000, length=20)
    assert tokens.test["x"].shape == (7600, 20) and tokens.test["x"].max() < 2000 == len(words)
    fed = build(tokens, num_clients=20, num_clusters=4, heterogeneity="topic", examples_per_client=100)
    assert all(set(fed.train.examples["y"][i].tolist()) == {i % 4} for i in range(20))


@pytest.fixture
def plays(data_dir, tmp_path):
    """A folder with the smallest of the official files, and its content."""
    (tmp_path / "tiny_shakespeare").mkdir()
    shutil.copy(data_dir / "tiny_shakespeare" / "input.txt", tmp_path / "tiny_shakespeare")
    return tmp_path / "tiny_shakespeare" / "input.txt"


@pytest.mark.slow_cases("gz-compress")
@pytest.mark.parametrize(("ending", "pack"), [("gz", gzip.compress), ("xz", lambda b: lzma.compress(b, preset=0))])
def test_compressed_or_not_it_is_the_same_file(data_dir, plays, ending, pack, monkeypatch):
    monkeypatch.setattr("jfcl.data.sources._LARGEST", 2**21)
    content = plays.read_bytes()
    plays.unlink()
    packed = plays.with_name(f"input.txt.{ending}")
    packed.write_bytes(pack(content))
    ours, official = (load("tiny_shakespeare", folder) for folder in (plays.parents[1], data_dir))
    assert ours.train["x"].tolist() == official.train["x"].tolist()
    for damage in (content[:1] * 2**22, content[:-1] + b"?"):  # unpacked no further than the largest file
        packed.write_bytes(pack(damage))
        with pytest.raises(ValueError, match=rf"input\.txt\.{ending} is corrupted") as error:
            load("tiny_shakespeare", plays.parents[1])
        found = hashlib.sha256(damage[: 2**21]).hexdigest()
        assert source_digest("tiny_shakespeare/input.txt") in str(error.value) and found in str(error.value)
    for damage in (pack(content)[:-100], b"not packed", b""):
        packed.write_bytes(damage)
        with pytest.raises(ValueError, match=rf"input\.txt\.{ending} is corrupted"):
            load("tiny_shakespeare", plays.parents[1])


def source_digest(name):
    lines = (Path(jfcl.data.__file__).parent / "SHA256SUMS").read_text().splitlines()
    return next(line.split()[0] for line in lines if line.split()[1] == name)


@pytest.mark.slow
def test_the_official_cifar_folder(data_dir, tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name in [*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"]:
        content = lzma.decompress((data_dir / "cifar10" / f"{name}.xz").read_bytes())
        (tmp_path / "cifar-10-batches-bin" / name).write_bytes(content)
    data = load("cifar10", tmp_path)
    assert integers(data.test["x"])[0].ravel()[:3].tolist() == [158, 112, 49]


def test_environment_names_the_folder(data_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("JFCL_DATA_DIR", str(data_dir))
    assert len(load("tiny_shakespeare").writer_names) == 299
    monkeypatch.setenv("JFCL_DATA_DIR", str(tmp_path))
    with pytest.raises(ValueError, match=str(tmp_path)):
        load("tiny_shakespeare")
    assert load("tiny_shakespeare", data_dir).name == "tiny_shakespeare"  # the argument goes first


@pytest.mark.parametrize("name", [name for name in DATASETS if name not in ("digits", *CONCEPTS)])
def test_missing_files_are_named(name, tmp_path):
    with pytest.raises(ValueError, match=r"does not hold .*(?:https?://|\.com|\.gov)") as error:
        load(name, tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_half_copied_folder(data_dir, tmp_path):
    (tmp_path / "ag_news_csv").mkdir()
    shutil.copy(data_dir / "ag_news_csv" / "test.csv", tmp_path / "ag_news_csv")
    with pytest.raises(ValueError, match=r"does not hold ag_news_csv/train\.csv"):
        load("ag_news", tmp_path)


def test_a_training_file_of_ag_news_is_verified_too(data_dir, tmp_path):
    shutil.copytree(data_dir / "ag_news_csv", tmp_path / "ag_news_csv")
    (tmp_path / "ag_news_csv" / "train.csv").write_text('"1","a","b"\n')
    with pytest.raises(ValueError, match="git blob id 694aa19971315410e000404523796b76349d3c1d"):
        load("ag_news", tmp_path)


# ---------------------------------------------------------------------------------------------------------
# Text


def test_tokenize_by_hand():
    train = {"x": np.array(["Shares rise: oil, oil!", "Oil falls"], object), "y": np.int32([0, 1])}
    test = {"x": np.array(["UNSEEN oil_price"], object), "y": np.int32([1])}
    data, words = tokenize(Dataset("t", train, test, 2, None, ""), vocab_size=6, length=4)
    # oil 3 times; every other word once, so alphabetical: "!", ",", ":" come before letters.
    assert words == ["<pad>", "<unknown>", "oil", "!", ",", ":"]
    assert data.train["x"].tolist() == [[1, 1, 5, 2], [2, 1, 0, 0]]
    assert data.test["x"].tolist() == [[1, 2, 1, 0]] and data.test["x"].dtype == np.int32
    with pytest.raises(ValueError, match="vocab_size must be an integer, at least 3"):
        tokenize(Dataset("t", train, test, 2, None, ""), vocab_size=2)
    with pytest.raises(ValueError, match="a data set of strings"):
        tokenize(load("digits"))
    with pytest.raises(ValueError, match="must be a dict with arrays 'x' and 'y'"):
        tokenize(Dataset("t", {"x": ["a"], "y": [0]}, None, 2, None, ""))
    with pytest.raises(ValueError, match="must be a dict with the writer ids of each split"):
        tokenize(Dataset("t", train, test, 2, {"train": np.int32([0, 0])}, ""))


def of_characters(train, test=None):
    parts = [{"x": np.array(x, object), "y": np.arange(len(x), dtype=np.int32)} for x in (train, test or ["x"])]
    writer = {"train": 5 + np.arange(len(train)), "test": np.arange(len(parts[1]["x"]))}
    return Dataset("t", parts[0], parts[1] if test else None, None, writer, "", None, "characters")


def test_characters_by_hand():
    data, vocabulary = tokenize(of_characters(["abcab", "a", "", "ba", "Abc"], ["cz"]), vocab_size=5, length=3)
    assert vocabulary == ["<pad>", "<unknown>", "a", "b", "c"]  # a and b 4 times, c 2 times; A once, so unknown
    assert data.train["x"].tolist() == [[2, 3, 4], [4, 2, 3], [3, 2, 0], [1, 3, 4]]
    assert data.train["x"].dtype == np.int32
    assert data.train["y"].tolist() == [0, 0, 3, 4] and data.writer["train"].tolist() == [5, 5, 8, 9]
    assert data.test["x"].tolist() == [[4, 1, 0]] and data.writer["test"].tolist() == [0]
    assert tokenize(of_characters([""], ["cz"]), length=3)[0].test["x"].tolist() == [[1, 1, 0]]
    with pytest.raises(ValueError, match="length must be an integer, at least 2, got 1"):
        tokenize(of_characters(["ab"]), length=1)
    with pytest.raises(ValueError, match=r"unknown dataset\.tokens 'character': did you mean 'characters'"):
        tokenize(of_characters(["ab"])._replace(tokens="character"))


@settings(max_examples=5)
@given(texts=st.lists(st.text("ab c\né漢🙂", max_size=12), min_size=1, max_size=6), length=st.integers(2, 9))
def test_every_character_but_the_first_is_a_target_once(texts, length):
    data, vocabulary = tokenize(of_characters(texts), length=length)
    found = [""] * len(texts)
    for row, y in zip(data.train["x"].tolist(), data.train["y"], strict=True):
        characters = [vocabulary[i] for i in row if i]
        assert len(characters) >= 2 and (not found[y] or found[y][-1] == characters[0])
        found[y] += "".join(characters[bool(found[y]) :])
    assert found == [text if len(text) > 1 else "" for text in texts]


def test_tiny_shakespeare(data_dir):
    text = (data_dir / "tiny_shakespeare" / "input.txt").read_text()
    lines, speaker, previous = {}, None, ""
    for line in text.split("\n"):  # a name follows an empty line, and ends with a colon
        if line.endswith(":") and not previous:
            speaker = line[:-1]
        elif line:
            lines.setdefault(speaker, []).append(line)
        previous = line
    data = load("tiny_shakespeare", data_dir)
    assert data.writer_names == sorted(lines) and data.writer["train"].tolist() == list(range(len(lines)))
    assert data.train["x"].tolist() == ["\n".join(lines[name]) for name in data.writer_names]
    data, words = tokenize(data, length=40)
    fed = build(data, num_clients=20, partition="writer")
    for i in range(20):
        spoken = "\n".join(lines[data.writer_names[fed.writer[i]]])
        for part in (fed.train, fed.test):
            for row in part.examples["x"][i, : part.size[i]]:
                assert "".join(words[c] for c in row if c) in spoken


# ---------------------------------------------------------------------------------------------------------
# tensorflow-datasets. Preparing needs TensorFlow, so the sets here are written as TFDS writes them:
# array_record shards of tf.train.Example messages, and TFDS's own metadata files.


def prepare(root, name, splits, num_classes, *, version="1.0.0", text=False, key="label"):
    tfds = pytest.importorskip("tensorflow_datasets")
    array_record = pytest.importorskip("array_record.python.array_record_module")
    from tensorflow_datasets.proto import tf_example_generated_pb2

    folder = root / name / version
    folder.mkdir(parents=True)
    first = next(iter(splits.values()))[0][0]
    channels = 3 if isinstance(first, Image.Image) else first.shape[-1] if not text else 0
    content = tfds.features.Text() if text else tfds.features.Image(shape=(None, None, channels))
    label = tfds.features.ClassLabel(num_classes=num_classes) if num_classes else tfds.features.Scalar(np.int64)
    features = {"text" if text else "image": content, key: label}
    short, infos = name.split("/")[0], []
    for split, (inputs, labels) in splits.items():
        template = tfds.core.ShardedFileTemplate(
            data_dir=folder, dataset_name=short, split=split, filetype_suffix="array_record"
        )
        path = folder / f"{short}-{split}.array_record-00000-of-00001"
        writer = array_record.ArrayRecordWriter(str(path), "group_size:1")
        for value, label in zip(inputs, labels, strict=True):
            if not text:
                png = io.BytesIO()
                if not isinstance(value, Image.Image):
                    value = Image.fromarray(value[..., 0] if value.shape[-1] == 1 else value)
                value.save(png, "PNG")
                value = png.getvalue()
            example = tf_example_generated_pb2.Example()
            example.features.feature["text" if text else "image"].bytes_list.value.append(value)
            example.features.feature[key].int64_list.value.append(int(label))
            writer.write(example.SerializeToString())
        writer.close()
        infos.append(
            tfds.core.SplitInfo(name=split, shard_lengths=[len(labels)], num_bytes=1, filename_template=template)
        )
    identity = tfds.core.dataset_info.DatasetIdentity(
        name=short, version=tfds.core.Version(version), data_dir=str(folder), module_name=""
    )
    info = tfds.core.DatasetInfo(builder=identity, features=tfds.features.FeaturesDict(features))
    info.set_file_format("array_record")
    info.set_splits(tfds.core.splits.SplitDict(infos))
    info.write_to_directory(str(folder))


def pictures(n, seed, shape=(8, 8, 3)):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (n, *shape)).astype(np.uint8), rng.integers(0, 3, n)


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """TFDS's directory is a temporary one, and every address fails at once."""

    def refuse(*args, **kwargs):
        raise urllib.error.URLError("no network in this test")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.delenv("JFCL_DATA_DIR", raising=False)
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path / "tfds"))
    return tmp_path / "tfds"


def test_images_of_tfds_are_what_they_show(no_network):
    """A file with a palette beside one of colours, as TFDS stores both: TensorFlow decodes them to colours."""
    colours = np.random.default_rng(0).integers(0, 256, (3, 5, 6, 3)).astype(np.uint8)
    palette = Image.fromarray(colours[0]).quantize(7)
    grey = Image.fromarray(colours[1, ..., 0])
    prepare(no_network, "palettes", {"train": ([palette, grey, colours[2]], [0, 1, 2])}, 3)
    wanted = [palette.convert("RGB"), np.repeat(colours[1, ..., :1], 3, axis=-1), colours[2]]
    for data in (load("palettes"), from_tfds("palettes")):
        np.testing.assert_array_equal(integers(data.train["x"]), np.stack([np.asarray(image) for image in wanted]))


@pytest.mark.parametrize("channels", [1, 3])
def test_a_prepared_tfds_set_is_read_without_tensorflow(no_network, channels):
    train, test = pictures(20, 0, (8, 8, channels)), pictures(7, 1, (8, 8, channels))
    prepare(no_network, "tiny_pictures", {"train": train, "test": test}, 3)
    data = load("tiny_pictures")
    for part, (images, labels) in [(data.train, train), (data.test, test)]:
        np.testing.assert_array_equal(integers(part["x"]), images)
        np.testing.assert_array_equal(part["y"], labels)
        assert part["y"].dtype == np.int32
    assert data.num_classes == 3 and data.name == "tiny_pictures"
    assert "tensorflow" not in sys.modules


def test_known_names_come_from_tfds_without_a_data_dir(no_network):
    train = pictures(20, 0, (28, 28, 1))
    prepare(no_network, "mnist", {"train": train}, 10, version="3.0.0")
    newer = pictures(5, 1, (28, 28, 1))
    prepare(no_network, "mnist", {"train": newer}, 10, version="3.0.10")
    data = load("mnist")
    np.testing.assert_array_equal(integers(data.train["x"]), newer[0])  # 3.0.10 is newer than 3.0.9
    assert data.test is None


def test_configs_and_other_tfds_directories(no_network, tmp_path):
    prepare(tmp_path / "mine", "letters/big", {"train": pictures(4, 0)}, 3)
    prepare(tmp_path / "mine", "letters/small", {"train": pictures(3, 1)}, 3)
    assert len(load("letters/big", tmp_path / "mine").train["y"]) == 4
    assert len(load("letters/small", tmp_path / "mine").train["y"]) == 3
    with pytest.raises(ValueError, match=r"several configs: name one, .'letters/big', 'letters/small'"):
        load("letters", tmp_path / "mine")


@pytest.mark.parametrize("name", ["dataset_info.json", "tiny_pictures-train.array_record-00000-of-00001"])
def test_a_damaged_tfds_set_is_named(no_network, name):
    prepare(no_network, "tiny_pictures", {"train": pictures(4, 0)}, 3)
    (file,) = no_network.rglob(name)
    file.write_bytes(b"{")
    for read in (load, lambda name: from_tfds(name, y="label")):
        with pytest.raises(ValueError, match=r"tiny_pictures/.* cannot be prepared or read"):
            read("tiny_pictures")


def test_text_from_tfds(no_network):
    prepare(no_network, "ag_news_subset", {"train": ([b"one two", "drei \u00e4".encode()], [0, 3])}, 4, text=True)
    data = load("ag_news")
    assert data.train["x"].tolist() == ["one two", "drei \u00e4"] and data.train["y"].tolist() == [0, 3]


def test_a_tfds_set_by_a_feature(no_network, tmp_path):
    (images, kinds), (others, _) = pictures(20, 0), pictures(7, 1)
    prepare(tmp_path, "animals", {"train": (images, kinds), "test": (others, [2] * 7)}, 3, key="breed")
    data = from_tfds("animals", y="breed", data_dir=tmp_path)
    for part, wanted in [(data.train, images), (data.test, others)]:
        np.testing.assert_array_equal(integers(part["x"]), wanted)
    np.testing.assert_array_equal(data.train["y"], kinds)
    assert data.test["y"].tolist() == [2] * 7 and data.num_classes == 3
    with pytest.raises(ValueError, match=r"unknown column for by 'bred': did you mean 'breed'. Accepted: breed, image"):
        from_tfds("animals", by="bred", data_dir=tmp_path)
    with pytest.raises(ValueError, match="y must be given: no other column has a usual name"):
        from_tfds("animals", by="breed", data_dir=tmp_path)
    prepare(tmp_path, "talk", {"train": ([b"one two", b"drei"], [0, 3])}, 4, text=True, key="speaker")
    talk = from_tfds("talk", by="speaker", data_dir=tmp_path)
    assert talk.train["x"].tolist() == ["one two", "drei"] and talk.writer["train"].tolist() == [0, 1]
    prepare(tmp_path, "only_test", {"test": (images, kinds)}, 3)
    with pytest.raises(ValueError, match=r"with a split 'train'; its splits are \['test'\]"):
        from_tfds("only_test", data_dir=tmp_path)


def test_tfds_sets_that_do_not_fit(no_network):
    mixed = ([np.zeros((4, 4, 1), np.uint8), np.zeros((4, 5, 1), np.uint8)], [0, 1])
    prepare(no_network, "mixed_sizes", {"train": mixed}, 2)
    with pytest.raises(ValueError, match=r"column 'image': the size of row 1 must be .4, 4., .* got .4, 5."):
        load("mixed_sizes")
    prepare(no_network, "no_labels", {"train": pictures(2, 0)}, 3, key="breed")
    with pytest.raises(ValueError, match=r"unknown column for y 'label'.* Accepted: breed, image"):
        load("no_labels")
    prepare(no_network, "no_classes", {"train": pictures(9, 0)}, None)
    assert load("no_classes").num_classes == 3


def test_what_cannot_be_prepared_is_said_at_once(no_network, monkeypatch):
    real = source.importlib.util.find_spec
    hidden = {"tensorflow", "importlib_resources"}
    extras = tomllib.loads((Path(jfcl.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    extra = {re.match(r"\w+", needed)[0] for needed in extras["optional-dependencies"]["tfds"]}
    assert extra == hidden  # what the message says to install has all that it misses
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: None if name in hidden else real(name))
    official = r" Or set data_dir \(or JFCL_DATA_DIR\) to a folder with the official files in %s/: .*%s"
    places = {
        "mnist": official % ("mnist", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
        "ag_news": official % ("ag_news_csv", "github.com/"),
        "kmnist": "$",  # jfcl reads no official files of it
    }
    for name, place in places.items():
        with pytest.raises(ValueError, match=rf"is not prepared .*needs tensorflow.*jfcl\[tfds\]'\.{place}"):
            load(name)
    with pytest.raises(ValueError, match="unknown dataset 'fashion_mnst': did you mean 'fashion_mnist'"):
        load("fashion_mnst")
    for name in ("mnist_writers", "emnist_letters"):
        with pytest.raises(ValueError, match="official files only"):
            load(name)


class FakeBuilder:
    """The boundary to TFDS: what its builder is asked for, without TensorFlow."""

    def __init__(self, name, root, calls):
        self.url_infos = dict.fromkeys(["https://host.example/a.gz", "https://host.example/b.gz"])
        self.name, self.root, self.calls = name, root, calls

    def download_and_prepare(self, **arguments):
        self.calls.append((self.name, arguments))
        prepare(self.root, self.name, {"train": pictures(3, 0)}, 3)


@pytest.fixture
def fake_tfds(no_network, monkeypatch):
    tfds = pytest.importorskip("tensorflow_datasets")
    calls = []
    monkeypatch.setattr(source.importlib.util, "find_spec", lambda name: object())

    def builder(name, *, data_dir, file_format):
        assert (data_dir, file_format) == (str(no_network), "array_record")
        return FakeBuilder(name, no_network, calls)

    monkeypatch.setattr(tfds, "builder", builder)
    return calls


def test_each_data_set_has_its_own_download_directory(fake_tfds, no_network):
    for name in ("mnist", "fashion_mnist"):
        assert load(name).train["x"].shape == (3, 8, 8, 3)
        load(name)  # prepared by now: not prepared again
    assert fake_tfds == [
        (name, {"download_dir": str(no_network / "downloads" / name), "file_format": "array_record"})
        for name in ("mnist", "fashion_mnist")
    ]


def test_femnist_is_read_as_leaf_writes_it(tmp_path):
    rng = np.random.default_rng(0)
    images = {name: rng.random((n, 784)).round(3) for name, n in (("ann", 3), ("bob", 2), ("cy", 4))}
    for split, groups in (("train", [["ann", "bob"], ["cy"]]), ("test", [["cy", "ann", "bob"]])):
        (tmp_path / "femnist" / split).mkdir(parents=True)
        for i, names in enumerate(groups):
            people = {name: {"x": images[name].tolist(), "y": list(range(len(images[name])))} for name in names}
            file = tmp_path / "femnist" / split / f"all_data_{i}_niid_0_keep_0_{split}_9.json"
            file.write_text(json.dumps({"users": names, "num_samples": [], "user_data": people}))
    found = load("femnist", tmp_path)
    assert found.train["x"].shape == (9, 28, 28, 1) and found.num_classes == 62
    assert found.writer["train"].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert found.writer["test"].tolist() == [2, 2, 2, 2, 0, 0, 0, 1, 1]  # the same numbers for the same people
    np.testing.assert_allclose(found.test["x"][4:7].reshape(3, 784), images["ann"], atol=1e-6)
    assert found.train["y"].tolist() == [0, 1, 2, 0, 1, 0, 1, 2, 3]
    fed = build("femnist", num_clients=2, partition="writer", data_dir=tmp_path)
    assert fed.train.size.max() == fed.test.size.max() == 4 and fed.num_classes == 62  # cy's, by LEAF's own split
    file.write_text('{"user_data": {"ann": {"x": [[1, 2]], "y": [0]}}}')
    with pytest.raises(ValueError, match="is not as LEAF writes it"):
        load("femnist", tmp_path)
    for pixel in (255, -0.1, 1e300, None):
        file.write_text(json.dumps({"user_data": {"ann": {"x": [[pixel] * 784], "y": [0]}}}))
        with pytest.raises(ValueError, match="pixels of writer ann must be lists of numbers from 0 to 1"):
            load("femnist", tmp_path)
    for labels in ([0.5], [[0]], [62], [-1], [2**40], ["1"], [None]):
        file.write_text(json.dumps({"user_data": {"ann": {"x": [[0.0] * 784], "y": labels}}}))
        with pytest.raises(ValueError, match=r"labels of writer ann must be (in 0\.\.61|a vector of 1 integers)"):
            load("femnist", tmp_path)
    file.write_text('{"user_data": {}}')
    with pytest.raises(ValueError, match=r"does not hold writers in .*femnist/test"):
        load("femnist", tmp_path)
    with pytest.raises(ValueError, match=r"does not hold writers in .*femnist/train/\*.json: run LEAF's data/femnist"):
        load("femnist", tmp_path / "nowhere")
