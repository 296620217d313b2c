import hashlib
import json
import shutil
import tempfile
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jfcl
from jfcl.core.files import seal
from jfcl.data import ClientStore, generate_store, open_stores


def loop_gather(people, ids, length):
    """What `gather` should give, client by client and example by example."""
    x = np.zeros((len(ids), length, 2, 1), np.float32)
    y = np.zeros((len(ids), length), np.int32)
    for row, i in enumerate(ids):
        for j in range(len(people[i]["y"])):
            x[row, j], y[row, j] = people[i]["x"][j], people[i]["y"][j]
    return x, y, [len(people[i]["y"]) for i in ids]


def some_people(sizes, seed):
    """Clients whose inputs are 255ths, so that bytes hold them."""
    rng = np.random.default_rng(seed)
    for m in sizes:
        x = rng.integers(0, 256, (m, 2, 1)) / np.float32(255)
        yield {"x": x.astype(np.float32), "y": rng.integers(0, 300, m).astype(np.int32)}


def check_gather(store, people, ids):
    x, y, size = loop_gather(people, ids, max(len(p["y"]) for p in people))
    found = store.gather(np.array(ids))
    np.testing.assert_array_equal(found.examples["x"], x)
    np.testing.assert_array_equal(found.examples["y"], y)
    assert found.examples["x"].dtype == np.float32 and found.examples["y"].dtype == np.int32
    assert found.size.tolist() == size and found.id.tolist() == list(ids)
    assert found.size.dtype == found.id.dtype == np.int32
    assert found.examples["x"].ctypes.data % 64 == 0


@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=7).filter(any),
    st.integers(0, 99),
    st.data(),
)
def test_gather_is_a_loop(sizes, seed, data):
    people = list(some_people(sizes, seed))
    ids = data.draw(st.lists(st.integers(0, len(sizes) - 1), min_size=1, max_size=9))
    whole = {name: np.concatenate([p[name] for p in people]) for name in ("x", "y")}
    order = np.random.default_rng(seed).permutation(len(whole["y"]))
    rows = np.split(np.argsort(order), np.cumsum(sizes)[:-1])
    base = {name: values[order] for name, values in whole.items()}
    compact = {"x": ("uint8", 255.0), "y": ("uint16",)}
    with tempfile.TemporaryDirectory() as folder:
        stores = [
            ClientStore.create(f"{folder}/plain", people),
            ClientStore.create_indexed(f"{folder}/index", [base], iter(rows), stored=compact),
        ]
        padded = jfcl.stack_clients(people)
        stores.append(ClientStore.from_clients(padded))
        for store in stores:
            assert len(store) == len(sizes) and store.sizes().tolist() == sizes
            check_gather(store, people, ids)
        if len(whole["y"]) > 0:
            assert stores[1].arrays["x"].dtype == np.uint8 and stores[1].arrays["y"].dtype == np.uint16


@pytest.fixture()
def folder(tmp_path):
    ClientStore.create(tmp_path / "s", some_people([3, 1, 2], 0), cluster=[0, 1, 0], description="three")
    return tmp_path / "s"


def test_it_opens_again(folder):
    store = ClientStore.open(folder)
    store.verify()
    assert store.cluster.tolist() == [0, 1, 0] and store.about["description"] == "three"
    again = ClientStore.create(folder.with_name("t"), some_people([3, 1, 2], 0), cluster=[0, 1, 0])
    other = ClientStore.create(folder.with_name("u"), some_people([3, 1, 2], 1), cluster=[0, 1, 0])
    assert store.hash == again.hash != other.hash
    assert np.load(folder / "x.npy").shape == (6, 2, 1)  # any program can read the files


def test_a_path_that_is_taken_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for name, words in (("link", "does not exist yet"), ("file", "does not exist yet"), ("file/s", "below a file")):
        with pytest.raises(ValueError, match=f"path must be .*{words}"):
            ClientStore.create(tmp_path / name, some_people([1], 0))

    def meanwhile():
        yield {"x": X}
        (tmp_path / "late").mkdir()
        (tmp_path / "late" / "mine").write_text("kept")

    with pytest.raises(ValueError, match="path must be a folder that does not exist yet"):
        ClientStore.create(tmp_path / "late", meanwhile())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "late", "link"]
    assert (tmp_path / "late" / "mine").read_text() == "kept"


@pytest.mark.parametrize("name", ["x", "y", "offsets", "cluster"])
def test_files_cut_short_are_noticed(folder, name):
    file = folder / f"{name}.npy"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    with pytest.raises(ValueError, match=rf"{name}.npy was cut .* expected {len(whole)} bytes, found {len(whole) - 1}"):
        ClientStore.open(folder)
    file.unlink()
    with pytest.raises(ValueError, match=rf"{name}.npy is missing: expected {len(whole)} bytes, found 0"):
        ClientStore.open(folder)


def test_examples_that_are_nowhere_are_noticed(folder, tmp_path):
    def change(file, place, value):
        array = np.load(file)
        array[place] = value
        np.save(file, array)

    change(folder / "offsets.npy", 1, 7)  # behind the next client's
    with pytest.raises(ValueError, match=r"offsets.npy was changed: it does not divide 6 examples among clients"):
        ClientStore.open(folder)
    base = [{"x": np.zeros((4, 1), np.float32)}]
    ClientStore.create_indexed(tmp_path / "r", base, [np.array([0, 3]), np.array([1])])
    change(tmp_path / "r" / "rows.npy", 2, 200)
    with pytest.raises(ValueError, match=r"rows.npy was changed: row 200 of 4 examples"):
        ClientStore.open(tmp_path / "r")


def test_labels_that_are_fewer_than_the_inputs_are_noticed(folder):
    """A store from elsewhere, with files that are as `store.json` says."""
    labels = np.arange(2, dtype=np.int32)
    np.save(folder / "y.npy", labels)
    about = json.loads((folder / "store.json").read_text())
    digest = hashlib.sha256(labels.tobytes()).hexdigest()
    about["files"]["y"] = {"bytes": (folder / "y.npy").stat().st_size, "shape": [2], "sha256": digest}
    (folder / "store.json").write_text(json.dumps(seal(about)))
    with pytest.raises(ValueError, match=r"store.json is damaged: jfcl does not write such"):
        ClientStore.open(folder)


def test_changed_files_are_noticed_when_asked(folder):
    file = folder / "x.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    store = ClientStore.open(folder)
    with pytest.raises(ValueError, match=r"x.npy was changed: expected SHA-256"):
        store.verify()


def test_headers_are_verified_too(folder):
    """One bit of a header at a time: refused in words, or of no consequence."""
    file = folder / "cluster.npy"
    whole, store = file.read_bytes(), ClientStore.open(folder)
    wanted = np.asarray(store.cluster).copy()
    start = len(whole) - wanted.nbytes
    for bit in range(0, 8 * start, 5):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        try:
            found = ClientStore.open(folder)
            found.verify()
        except ValueError as error:
            assert "cluster.npy was changed" in str(error)
        else:
            np.testing.assert_array_equal(found.cluster, wanted)
    file.write_bytes(whole.replace(b"<i4", b">i4"))
    with pytest.raises(ValueError, match=r"cluster\.npy was changed: it holds >i4"):
        ClientStore.open(folder)


def test_what_is_no_store_is_refused(folder):
    with pytest.raises(ValueError, match="holds no store"):
        ClientStore.open(folder.parent)
    about = json.loads((folder / "store.json").read_text())
    (folder / "store.json").write_text(json.dumps(about | {"format": 99}))
    with pytest.raises(ValueError, match=r"format of .* must be 1, as jfcl writes it, got 99"):
        ClientStore.open(folder)
    for text, why in ('{"form', ""), ("[]", "it must hold names and values"), ('{"format": 1}', "it lacks its digest"):
        (folder / "store.json").write_text(text)
        with pytest.raises(ValueError, match=rf"store\.json is damaged: {why}"):
            ClientStore.open(folder)


X = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    "clients, options, said",
    [
        ([], {}, "none of the 0 clients has an example"),
        ([{"x": X[:0]}], {}, "clients has an example"),
        ([{"x": X, "y": X[:1]}], {}, "client 0 has arrays of different lengths"),
        ([{"x": X}, {"x": X[:, :2]}], {}, r"client 1: x: an example has the shape .* in the store \(3,\)"),
        ([{"x": X}, {"y": X}], {}, "client 1 has the arrays"),
        ([{"x": X}, {"x": X * np.nan}], {}, "client 1: x must be of numbers that float32 holds"),
        ([{"x": X}], {"cluster": [0, 1]}, r"cluster must be a vector of 1 integers"),
        ([{"x": X}], {"cluster": [2**32]}, "cluster must be in -2147483647..2147483647"),
        ([{"rows": X}], {}, "that the store does not use itself"),
        ([{"x": np.array(["a"])}], {}, "must be an array of numbers"),
        ([{"x": X}, {"x": np.array(["a"])}], {}, "client 1: x must be an array of numbers"),
        ([{"x": np.float32(1)}], {}, r"client 0: x must be an array of numbers \[m, ...\]"),
        ([{"x": X > 0}, {"x": X + 0.5}], {}, "client 1: x must be of numbers that bool holds"),
    ],
)
def test_bad_clients_leave_nothing(tmp_path, clients, options, said):
    with pytest.raises(ValueError, match=said):
        ClientStore.create(tmp_path / "s", iter(clients), **options)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_removed(tmp_path):
    here, killed = tmp_path / "here", tmp_path / "killed"

    def clients():
        yield {"x": X}
        with ThreadPoolExecutor(1) as other, pytest.raises(ValueError, match="in use by another process"):
            other.submit(ClientStore.create, here / "s", [{"x": X}]).result()
        shutil.copytree(here, killed)  # what is on the disk if the process ends now

    ClientStore.create(here / "s", clients())
    assert any(path.is_dir() for path in killed.iterdir())
    ClientStore.create(killed / "s", [{"x": X}])
    assert [path.name for folder in (here, killed) for path in folder.iterdir()] == ["s", "s"]


def test_the_hash_knows_the_clusters():
    clients = jfcl.Clients({"x": np.zeros((2, 1))}, np.ones(2, np.int32))
    hashes = {ClientStore.from_clients(clients, cluster=cluster).hash for cluster in (None, [0, 1], [1, 0])}
    assert len(hashes) == 3


def test_writing_and_gathering_hold_no_more_than_they_must(tmp_path):
    tracemalloc.start()
    clients = ({"x": np.full((100, 250), i, np.float32)} for i in range(400))  # 100 kB each
    store = ClientStore.create(tmp_path / "s", clients)
    store.gather([3, 300])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert store.arrays["x"].nbytes == 40_000_000 and peak < 4_000_000


def test_bad_rows_and_ids(tmp_path, folder):
    with pytest.raises(ValueError, match=r"rows of client 1 must be in 0..1"):
        ClientStore.create_indexed(tmp_path / "i", [{"x": X}], [np.array([0]), np.array([2])])
    assert ClientStore.create_indexed(tmp_path / "j", [{"x": X}], [[0, 1], []]).sizes().tolist() == [2, 0]
    with pytest.raises(ValueError, match="path must be a folder that does not exist yet"):
        ClientStore.create(folder, [{"x": X}])
    store = ClientStore.open(folder)
    for ids, said in ([[3], r"ids must be in 0..2"], [[-1], "ids"], [[], "ids"], [[0.5], "ids"], [[[0]], "ids"]):
        with pytest.raises(ValueError, match=said):
            store.gather(ids)
    with pytest.raises(ValueError, match=r"clients.id must be left out"):
        ClientStore.from_clients(jfcl.Clients({"x": X[None]}, np.int32([2]), np.int32([4])))
    with pytest.raises(ValueError, match=r"clients.size must be between 0 and M=2"):
        ClientStore.from_clients(jfcl.Clients({"x": X[None]}, np.int32([5])))
    many = ClientStore.from_clients(jfcl.Clients({"x": np.arange(600.0).reshape(300, 2)}, np.full(300, 2)))
    assert many.gather(np.uint8([255])).examples["x"].tolist() == [[510.0, 511.0]]


@pytest.mark.parametrize("heterogeneity", ["rotation", "private_label", "class"])
def test_one_deal_is_what_build_makes(tmp_path, heterogeneity):
    options = {"num_clients": 20, "num_clusters": 4, "heterogeneity": heterogeneity, "examples_per_client": 30}
    fed = jfcl.data.build("digits", reuse="cluster", seed=3, **options)
    train, test = generate_store(tmp_path / "p", "digits", seed=3, **options)
    assert train.arrays["x"].dtype == train.arrays["y"].dtype == np.uint8
    for store, wanted in ((train, fed.train), (test, fed.test)):
        found = store.gather(np.arange(20))
        np.testing.assert_array_equal(found.size, wanted.size)
        np.testing.assert_array_equal(found.examples["x"], wanted.examples["x"])
        np.testing.assert_array_equal(found.examples["y"], wanted.examples["y"])
        np.testing.assert_array_equal(store.cluster, fed.cluster)


def test_dealt_again_and_again(tmp_path):
    train, test = generate_store(
        tmp_path / "p", "digits", num_clients=500, examples_per_client=100, num_clusters=2, heterogeneity="label_swap"
    )
    assert len(train) == len(test) == 500 and train.sizes().tolist() == [100] * 500
    rows = np.asarray(train.rows).reshape(500, 100)
    half = len(train.arrays["y"]) // 2
    for i in range(500):
        assert len(set(rows[i].tolist())) == 100  # a client's examples are all different
        assert set((rows[i] // half).tolist()) == {i % 2}  # and its cluster's
    uses = np.bincount(rows[0::2].ravel(), minlength=half)
    assert uses.max() <= -(-250 // (half // 100)) and uses.min() >= 10  # 18 deals, each leaving out at most 99
    deals = [tuple(sorted(rows[i])) for i in range(500)]
    assert len(set(deals)) == 500
    assert test.sizes().min() >= 1
    again = generate_store(
        tmp_path / "q", "digits", num_clients=500, examples_per_client=100, num_clusters=2, heterogeneity="label_swap"
    )
    assert [s.hash for s in again] == [s.hash for s in (train, test)] == [s.hash for s in open_stores(tmp_path / "p")]


def test_ragged_partitions_and_turns_that_bytes_cannot_hold(tmp_path):
    train, _ = generate_store(
        tmp_path / "p", "digits", num_clients=90, examples_per_client=40, num_clusters=3, heterogeneity="rotation",
        partition="power_law",
    )  # fmt: skip
    assert train.arrays["x"].dtype == np.float32 and len(set(train.sizes().tolist())) > 5
    assert train.gather([0, 1]).examples["x"].shape[1] == train.max_size == train.sizes().max()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"num_clients": 0}, "num_clients must be an integer, at least 1, got 0"),
        (
            {"examples_per_client": 2000},
            "num_clients times examples_per_client must be at most 1438, the training examples",
        ),
        ({"num_clusters": 200}, "num_clusters must be at most the 100 clients there are"),
        ({"heterogeneity": "rotated"}, "did you mean 'rotation'"),
        ({"num_clusters": 2}, "heterogeneity must be given for num_clusters=2, one of rotation"),
        ({"partition": "writer"}, "unknown partition 'writer'"),
    ],
)
def test_bad_populations_leave_nothing(tmp_path, options, said):
    options = {"num_clients": 100, "examples_per_client": 10} | options
    with pytest.raises(ValueError, match=said):
        generate_store(Path(tmp_path / "p"), "digits", **options)
    assert list(tmp_path.iterdir()) == []


def test_later_clients_are_not_rounded_to_the_firsts_type(tmp_path):
    y = np.zeros(1, np.int32)
    for i, (first, later, words) in enumerate(
        [
            (np.int32([[1, 2]]), np.float32([[0.5, 1.7]]), "client 1: x must be of numbers that int32 holds"),
            (np.float32([[1, 2]]), np.float64([[1e300, 0]]), "client 1: x must be of numbers that float32 holds"),
            (np.float32([[1, 2]]), np.int64([[2**24 + 1, 0]]), "client 1: x must be of numbers that float32 holds"),
        ]
    ):
        with pytest.raises(ValueError, match=words):
            ClientStore.create(tmp_path / str(i), [{"x": first, "y": y}, {"x": later, "y": y}])
