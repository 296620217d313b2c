"""A user's own data: arrays, frames, data sets of other packages. What does not fit is named before anything runs."""

from types import SimpleNamespace

import jax
import numpy as np
import optax
import pandas as pd
import pytest
from PIL import Image

import jfcl
from jfcl.core import check_clients, check_examples
from jfcl.data import ClientStore, build, from_arrays, from_frame, from_huggingface, from_torch, tokenize
from jfcl.data.readers import _read, _typed
from jfcl.data.values import array_beside, as_type, stacked

rng = np.random.default_rng(0)


# ---------------------------------------------------------------------------------------------------------
# Arrays and data sets of single clients


def test_pairs_and_dictionaries_become_clients():
    a, b = rng.normal(size=(3, 4)), rng.normal(size=(2, 4))
    clients = from_arrays([(a, [0, 1, 2]), {"image": b, "label": np.int64([5, 6])}, [b[:1].tolist(), [True]]])
    check_clients(clients)
    x, y = clients.examples["x"], clients.examples["y"]
    assert x.dtype == np.float32 and y.dtype == np.int32 and clients.size.tolist() == [3, 2, 1]
    np.testing.assert_array_equal(x[1], np.concatenate([b, np.zeros((1, 4))]).astype(np.float32))
    assert y.tolist() == [[0, 1, 2], [5, 6, 0], [1, 0, 0]]
    assert from_arrays([(a, [0.5, 1, 2])]).examples["y"].tolist() == [[0.5, 1, 2]]
    assert from_arrays([([1, 2], [0, 1])]).examples["x"].tolist() == [[[1.0], [2.0]]]
    tokens = from_arrays([(np.arange(6).reshape(2, 3), [0, 1])]).examples["x"]
    assert tokens.dtype == np.int32 and tokens.tolist() == [[[0, 1, 2], [3, 4, 5]]]
    grey = np.uint8([[[0, 255], [51, 102]]])
    np.testing.assert_allclose(from_arrays([(grey, [0])]).examples["x"][0, 0, :, :, 0], [[0, 1], [0.2, 0.4]], rtol=1e-6)


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([], "at least one client"),
        ((np.ones((2, 3)), np.zeros(2, int)), "client 0 must be a pair .*got 'ndarray'"),
        ({"x": np.ones((2, 3)), "y": np.zeros(2, int)}, "client 0 must be a pair .*got 'str'"),
        ([np.ones((2, 3))], "client 0 must be a pair .*got 'ndarray'"),
        ([(np.ones((2, 3)), [0, 1], [1, 1])], "client 0 must be a pair .*got 'tuple of 3'"),
        ([{"x": np.ones((2, 3))}], "client 0: the names must be of one of x, image.* got .'x'."),
        ([{"x": [1], "image": [1], "y": [1]}], "client 0: the names must be of one of x, image"),
        ([([[1.0]], [0]), ([[1.0], [2.0]], [0])], "client 1: its arrays must have one length, got .1, 2."),
        ([(np.ones((2, 3)), [0, 1]), (np.ones((2, 4)), [0, 1])], r"client 1: .*shape \(4,\), those of client 0 \(3,\)"),
        ([([[1.0, 2.0], [1.0]], [0, 1])], r"client 0: x: row 1 has shape \(1,\), row 0 has \(2,\)"),
        ([(np.array([[1.0], [np.nan]]), [0, 1])], "client 0: x: 1 rows with NaN or infinity, first row 1"),
        ([([[1.0]], [np.inf])], "client 0: y: 1 rows with NaN or infinity, first row 0"),
        ([(np.array([[1.0], [1e39]]), [0, 1])], "client 0: x: 1 rows with numbers beyond float32, first row 1"),
        ([(np.array([[2**31]]), [0])], "client 0: x: 1 rows with numbers beyond int32, first row 0"),
        ([([[1.0]], np.array([2**32 + 1]))], "client 0: y: 1 rows with numbers beyond int32, first row 0"),
        ([(["a text"], [0])], "client 0: x must be numbers; texts become numbers by jfcl.data.tokenize"),
        ([([None], [0])], "client 0: x: 1 missing values, first in row 0"),
        (([[1.0], [2.0]], [0, 1]), "client 1: x must be an array or a list .*, got 0$"),
        ([(np.float32(3), [0])], "client 0: x must be an array or a list with an entry for each example"),
        ([([{}], [0])], "client 0: x: must hold numbers, arrays, images or texts, got {} in row 0"),
        ([([[1.0]], None)], "client 0: y must be an array or a list .*, got None"),
        ([([[1.0]], 3)], "client 0: y must be an array or a list .*, got 3"),
        ([([[], []], [0, 1])], "client 0: x: an input is empty, of shape"),
        ([(np.ma.array([[1.0], [2.0]], mask=[[0], [1]]), [0, 1])], "client 0: x: a masked array has missing values"),
        ([(np.full((2, 2), [1e39, -1e39]), [0, 1])], "client 0: x: 2 rows with numbers beyond float32"),
        ([([[1.0]], ["a"])], "client 0: y must be numbers; jfcl.data.from_frame numbers texts, .*, got 'texts'"),
        ([([[1.0]], [0]), (np.ones((0, 1)), np.ones(0, int))], "client 1: x has no example"),
        ([([], [])], "client 0: x has no example; leave out clients without any"),
    ],
)
def test_from_arrays_refuses(clients, words):
    with pytest.raises(ValueError, match=words):
        from_arrays(clients)


def test_clients_of_integers_and_of_floats_have_one_type():
    clients = [(np.ones((2, 3), int), [0, 1]), (np.full((1, 3), 0.1), [0.5])]
    for made in (from_arrays(clients), from_torch([list(zip(x, y, strict=True)) for x, y in clients])):
        assert {name: x.dtype for name, x in made.examples.items()} == {"x": np.float32, "y": np.float32}
        assert made.examples["x"][1, 0, 0] == np.float32(0.1) and made.examples["y"].tolist() == [[0, 1], [0.5, 0]]


class Tensor:
    """The part of a tensor of PyTorch that leads to NumPy."""

    def __init__(self, values):
        self.values = np.asarray(values)

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return self.values


class Rows:
    """A map-style data set of PyTorch."""

    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        if not 0 <= i < len(self.rows):
            raise IndexError(i)
        return self.rows[i]


def test_data_sets_of_pytorch():
    images = rng.random((5, 3, 4, 6)).astype(np.float32)
    tensors = Rows([(Tensor(image), Tensor(np.int64(i))) for i, image in enumerate(images)])
    clients = from_torch([tensors, Rows([(images[0], 7)])], channels_first=True)
    check_clients(clients)
    assert clients.size.tolist() == [5, 1] and clients.examples["y"][:, 0].tolist() == [0, 7]
    for i, image in enumerate(images):
        np.testing.assert_array_equal(clients.examples["x"][0, i], image.transpose(1, 2, 0))
    named = from_torch([Rows([{"image": Image.new("L", (2, 3), 51), "label": 1}])]).examples["x"]
    assert named.shape == (1, 1, 3, 2, 1) and np.unique(named).tolist() == [np.float32(0.2)]


@pytest.mark.parametrize(
    ("datasets", "options", "words"),
    [
        ([Rows([])], {}, "client 0 has no rows"),
        ([np.ones((2, 2))], {}, "client 0, row 0 must be a pair"),
        ([iter([])], {}, "client 0 must be a data set with len and rows"),
        (Rows([(np.ones(2), 0)]), {}, "client 0, row 0 must be a pair"),
        ([Rows([np.ones(2)])], {}, "client 0, row 0 must be a pair"),
        ([Rows([(np.ones((5, 6), np.uint8), 0)])], {"channels_first": True}, "channels_first must be left out"),
        ([Rows([(np.ones(2), 0), (np.ones(3), 0)])], {}, r"client 0: x: row 1 has shape \(3,\), row 0 has \(2,\)"),
    ],
)
def test_from_torch_refuses(datasets, options, words):
    with pytest.raises(ValueError, match=words):
        from_torch(datasets, **options)


# ---------------------------------------------------------------------------------------------------------
# Mistakes that reach a simulation


def simulation(clients, kind="classification", **options):
    make = {
        "classification": lambda: jfcl.models.classification(jfcl.models.Linear(2), (3,), 2),
        "pair": lambda: jfcl.models.task(lambda key: np.ones(3, np.float32), lambda p, x: x @ p, kind="regression"),
    }
    algorithm = jfcl.fedavg(make[kind](), jfcl.local_training(optax.sgd(0.1), num_steps=1))
    run = jfcl.simulate
    return run(algorithm, clients, key=jax.random.key(0), num_rounds=1, **options)


X, Y = np.zeros((4, 3), np.float32), np.zeros(4, np.int32)
GOOD = jfcl.stack_clients([{"x": X, "y": Y}])


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ([(X, Y)], r"clients must be Clients, as from jfcl.stack_clients .*from_arrays .*got <class 'list'>"),
        ({"x": X[None], "y": Y[None]}, "clients must be Clients"),
        (jfcl.stack_clients([(X, Y)]), "must be a dict with 'x' and 'y', got tuple of 2 .*jfcl.data.from_arrays makes"),
        (jfcl.stack_clients([[X, Y]]), "must be a dict with 'x' and 'y', got list of 2"),
        (jfcl.stack_clients([{"image": X, "label": Y}]), "rename 'image' to 'x' and 'label' to 'y'"),
        (jfcl.stack_clients([{"x": X, "label": Y}]), "got .'label', 'x'.; rename 'label' to 'y'"),
        (jfcl.stack_clients([{"x": X}]), r"must be a dict with 'x' and 'y', got \['x'\]$"),
        (jfcl.stack_clients([{"x": X[:, :2], "y": Y}]), r"inputs have shape \(2,\), but the model is made for \(3,\)"),
    ],
)
@pytest.mark.parametrize("kind", ["classification", "pair"])
def test_a_simulation_names_what_it_cannot_read(clients, words, kind):
    if "made for" in words and kind == "pair":
        pytest.skip("the shape of the inputs of such a task is not known")
    with pytest.raises(ValueError, match=words):
        simulation(clients, kind)
    for part in ("test_clients", "newcomers"):
        with pytest.raises(ValueError, match=words.replace("clients must", f"{part} must")):
            simulation(GOOD, kind, **{part: clients})


@pytest.mark.parametrize("examples", [{"x": X, "label": Y}, (X, Y)])
def test_labels_of_a_known_number_of_classes_are_y(examples):
    task = jfcl.Task(
        lambda key: np.ones(3, np.float32), lambda w, x: x @ w, lambda outputs, batch: outputs, num_classes=2
    )
    with pytest.raises(ValueError, match="examples must be a dict with labels 'y', for a task with num_classes, got"):
        jfcl.evaluate(task, np.ones((1, 3), np.float32), jfcl.stack_clients([examples]))


def test_a_task_may_read_arrays_of_other_names():
    line = jfcl.models.task(lambda key: np.ones(3, np.float32), lambda w, left: left @ w, kind="regression")
    task = line._replace(inputs=lambda batch: batch["left"], reads=("left", "y"))
    check_examples(jfcl.stack_clients([{"left": X, "y": Y}]), task)
    with pytest.raises(ValueError, match=r"must be a dict with 'left' and 'y', got .*rename 'x' to 'left'"):
        check_examples(GOOD, task)


@pytest.mark.parametrize("shape", [(3,), (2, 2, 1)])
def test_bytes_are_no_tests_of_a_model_of_floats(shape):
    """The models would read numbers that are 255 times as large."""
    x = np.full((4, *shape), 255, np.uint8)
    floats, whole = (jfcl.stack_clients([{"x": images, "y": Y}]) for images in (x.astype(np.float32) / 255, x))
    for part in ("test_clients", "newcomers"):
        with pytest.raises(ValueError, match=rf"{part}.examples\['x'\] must be floats, as in .* / 255, got 'uint8'"):
            simulation(floats, **{part: whole})


def test_a_population_names_what_it_cannot_read():
    with pytest.raises(ValueError, match=r"clients must be a Population of it: jfcl\.Population"):
        simulation(ClientStore.from_clients(GOOD))
    store = ClientStore.from_clients(jfcl.stack_clients([{"image": X, "label": Y}]))
    with pytest.raises(ValueError, match=r"examples must be .*rename 'image' to 'x' and 'label' to 'y'"):
        simulation(jfcl.Population(store, cohort=1))
    store = ClientStore.from_clients(jfcl.stack_clients([{"x": X[:, :2], "y": Y}]))
    with pytest.raises(ValueError, match=r"inputs have shape \(2,\), but the model is made for \(3,\)"):
        simulation(jfcl.Population(store, cohort=1))


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ({"x": X, "y": Y}, "clients must be a list with a dict per client, got one dict with .'x', 'y'."),
        ([{"x": X.tolist(), "y": Y.tolist()}], "client 0: give an array .*single numbers; jfcl.data.from_arrays"),
        ([[(X[0], 0), (X[1], 1)]], "client 0: give an array of all its examples"),
        ([{"x": X, "y": Y}, {"X": X, "y": Y}], "client 1: its arrays are .'X', 'y'., those of client 0 .'x', 'y'."),
    ],
)
def test_stack_clients_names_what_is_no_array(clients, words):
    with pytest.raises(ValueError, match=words):
        jfcl.stack_clients(clients)


# ---------------------------------------------------------------------------------------------------------
# Frames


def frame(n=60):
    kinds = {"user": rng.choice(["ann", "bob", "cid"], n), "day": rng.integers(0, 365, n), "height": rng.normal(size=n)}
    return pd.DataFrame(kinds | {"label": rng.choice(["no", "yes", "maybe"], n)})


def test_a_frame_by_a_column():
    table, of_test = frame(), frame(10).assign(user=["ann", "bob", "cid", "ann", "bob"] * 2)
    data = from_frame(table, by="user", test=of_test)
    assert data.num_classes == 3 and data.writer_names == ["ann", "bob", "cid"] and len(data.test["y"]) == 10
    fed = build(data, partition="writer")
    check_clients(fed.train)
    assert [data.writer_names[i] for i in fed.writer] == ["ann", "bob", "cid"]
    for part, of_part in [(fed.train, table), (fed.test, of_test)]:  # the official test rows, and all of training
        for i, (_, rows) in enumerate(of_part.groupby("user")):
            x, y = (part.examples[name][i, : part.size[i]] for name in "xy")
            found = sorted((*row, data.table["labels"][label]) for row, label in zip(x.tolist(), y, strict=True))
            assert found == sorted(zip(rows["day"], np.float32(rows["height"]).tolist(), rows["label"], strict=True))


def test_values_of_a_frame():
    table = frame()
    line = from_frame(table, x=["day"], y="height", test=table.assign(height=2))
    by_index = from_frame(table, x=table[["day"]].columns, y=np.array(["height"]))
    np.testing.assert_array_equal(by_index.train["x"], line.train["x"])
    assert line.test["y"].dtype == np.float32 and (line.test["y"] == 2).all()
    assert line.num_classes is None and line.writer is None and line.train["x"].shape == (60, 1)
    np.testing.assert_array_equal(line.train["y"], table["height"].to_numpy().astype(np.float32))
    nullable = from_frame(
        table.assign(day=table["day"].astype("Int64"), label=table["height"] > 0), by="day", x="height"
    )
    assert nullable.num_classes == 2 and nullable.writer_names == sorted(set(table["day"].tolist()))
    texts = from_frame(table, by="day", x=["user", "label"])
    assert texts.train["x"][7] == f"{table['user'][7]} {table['label'][7]}"
    assert texts.num_classes is None and not texts.train["y"].any()
    assert (
        from_frame(table.assign(user=table["user"].astype("category")), by="user", x="height").writer_names[0] == "ann"
    )


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        ({}, {"by": "usr"}, "unknown column for by 'usr': did you mean 'user'. Accepted: user, day, height, label"),
        ({}, {"y": "lable"}, "unknown column for y 'lable': did you mean 'label'"),
        ({}, {"x": ["day", "hight"]}, "unknown column for x 'hight': did you mean 'height'"),
        ({}, {"x": "day", "y": "day"}, "x names the columns .'day'., which by and y name too"),
        ({}, {"x": []}, "x must be one column at least"),
        ({"user": None}, {"by": "user"}, "column 'user': 60 missing values, first in row 0"),
        ({"height": np.where(np.arange(60) == 7, np.nan, 1)}, {"by": "user"}, "column 'height': 1 rows .* first row 7"),
        ({"label": np.where(np.arange(60) == 8, None, "a")}, {"by": "user"}, "column 'label': 1 missing .* in row 8"),
        (
            {"label": np.where(np.arange(60) == 8, np.nan, 1)},
            {"by": "user"},
            "column 'label': 1 rows .* row 8",
        ),
        ({"user": [1.0, None] * 30}, {"by": "user"}, "column 'user' has missing values"),
        ({"user": [[i] for i in range(60)]}, {"by": "user"}, "column 'user': must be of strings.* got list"),
        (
            {"user": [1, "a"] * 30},
            {"by": "user"},
            "column 'user': must be of .* one type; .* got int and str",
        ),
        ({"label": 2**32}, {"by": "user"}, "column 'label': 60 rows with numbers beyond int32, first row 0"),
        (
            {"day": pd.Timestamp("2024-01-01")},
            {"by": "user"},
            "column 'day' must be numbers in the place of dates",
        ),
        ({"day": [[1, 2]] * 59 + [[1]]}, {"x": "day"}, r"column 'day': row 59 has shape \(1,\), row 0 has \(2,\)"),
        ({}, {"by": "user", "test": pd.DataFrame({"user": ["a"]})}, "unknown column of the split 'test' 'day'"),
        ({}, {"by": "user", "test": 3}, "test must be a frame with columns"),
        ({}, {"x": "day", "tokens": "word"}, "unknown tokens 'word': did you mean 'words'"),
    ],
)
def test_from_frame_refuses(change, options, words):
    with pytest.raises(ValueError, match=words):
        from_frame(frame().assign(**change), **options)


def test_a_frame_with_numbers_for_columns():
    table = pd.DataFrame([[0, 5, 1.5], [1, 6, 2.5]])
    data = from_frame(table, y=0, x=2, by=1)
    assert data.train["y"].tolist() == [0, 1] and data.train["x"].tolist() == [[1.5], [2.5]]
    assert data.description == "frame, by 1; inputs 2; target 0"
    with pytest.raises(ValueError, match="unknown column for y 7"):
        from_frame(table, y=7)


def test_from_frame_refuses_other_tables():
    with pytest.raises(ValueError, match="frame must be a frame with columns"):
        from_frame([1, 2])
    with pytest.raises(ValueError, match="column 'day' has no example"):
        from_frame(frame().iloc[:0], by="user")
    with pytest.raises(ValueError, match="y must be given: no other column has a usual name"):
        from_frame(frame()[["user", "day"]], by="user")


# ---------------------------------------------------------------------------------------------------------
# Hugging Face


@pytest.fixture(scope="module")
def hub():
    """The package `datasets`, with a data set in FEMNIST's columns."""
    datasets = pytest.importorskip("datasets", reason="needs datasets")
    pixels = rng.integers(0, 256, (12, 6, 6)).astype(np.uint8)
    rows = {"image": [Image.fromarray(p) for p in pixels], "writer_id": [f"f{i % 3}" for i in range(12)]}
    rows |= {"hsf_id": [0] * 12, "character": [i % 5 for i in range(12)]}
    classes = datasets.ClassLabel(num_classes=62)
    kinds = {"image": datasets.Image(), "character": classes, "writer_id": datasets.Value("string")}
    made = datasets.Dataset.from_dict(rows, datasets.Features(kinds | {"hsf_id": datasets.Value("int64")}))
    return datasets, made, pixels


def assert_femnist(data, pixels):
    np.testing.assert_array_equal(np.rint(data.train["x"][..., 0] * 255).astype(np.uint8), pixels)
    assert data.train["x"].dtype == np.float32 and data.train["x"].shape == (12, 6, 6, 1) and data.num_classes == 62
    assert data.train["y"].tolist() == [i % 5 for i in range(12)] and data.writer_names == ["f0", "f1", "f2"]
    assert data.writer["train"].tolist() == [i % 3 for i in range(12)]


def test_femnist_by_its_columns(hub):
    datasets, made, pixels = hub
    data = from_huggingface(made, by="writer_id")
    assert_femnist(data, pixels)
    assert len(build(data, partition="writer").train.size) == 3
    both = datasets.DatasetDict({"train": made, "test": made.select([4, 8]), "other": made})
    data = from_huggingface(both, by="writer_id")
    assert_femnist(data, pixels)
    assert data.test["y"].tolist() == [4, 3] and data.writer["test"].tolist() == [1, 2]
    stream = from_huggingface(made.to_iterable_dataset(), by="writer_id")
    assert_femnist(stream, pixels)


def test_shakespeare_by_its_columns(hub):
    datasets = hub[0]
    play = "".join(rng.choice(list("abcd \n"), 200))
    rows = [(f"ROLE{i % 2}", play[i : i + 80], play[i + 80]) for i in range(100)]
    made = datasets.Dataset.from_list([{"character_id": c, "x": x, "y": y} for c, x, y in rows])
    data = from_huggingface(made, by="character_id", x=["x", "y"], tokens="characters")
    texts, vocabulary = tokenize(data, length=81)
    assert texts.train["x"].shape == (100, 81) and texts.num_classes is None
    fed = build(texts, partition="writer", test_fraction=0.5)
    for i, name in enumerate(data.writer_names):
        own = {x + y for c, x, y in rows if c == name}
        found = fed.train.examples["x"][i, : fed.train.size[i]]
        assert {"".join(vocabulary[c] for c in row) for row in found} <= own and len(found) == 25
    module = jfcl.models.LSTMLanguageModel(len(vocabulary), 2, 2)
    jfcl.models.check_tokens(fed.train, len(vocabulary))
    assert jfcl.models.language_model(module, 81, len(vocabulary)).reads == ("x",)


def test_from_huggingface_refuses(hub):
    datasets, made, _ = hub
    for dataset, options, words in [
        (
            made,
            {"by": "writer"},
            "unknown column for by 'writer': did you mean 'writer_id'. Accepted: image, writer_id",
        ),
        (made.rename_column("image", "photo"), {}, r"x must be given: none of the columns .'photo', 'writer_id'"),
        (datasets.DatasetDict({"all": made}), {}, "dataset must be one split, or a dictionary of splits with 'train'"),
        ([1, 2], {}, "dataset must be of Hugging Face's datasets"),
        ("my_folder", {}, "dataset must be of Hugging Face's datasets .*load_from_disk"),
        (
            datasets.Dataset.from_dict({"x": [[1.0], [1.0, 2.0]], "y": [0, 1]}),
            {},
            r"column 'x': row 1 has shape \(2,\)",
        ),
        (datasets.Dataset.from_dict({"x": ["a", None], "y": [0, 1]}), {}, "column 'x': 1 missing values, .* in row 1"),
        (
            datasets.Dataset.from_dict({"x": [1.0, 2.0], "y": [0, None]}),
            {},
            "column 'y': 1 (missing values|rows with NaN).* row 1",
        ),
        (datasets.Dataset.from_dict({"x": [1.0], "y": [0], "u": [[1]]}), {"by": "u"}, "column 'u': must be of strings"),
    ]:
        with pytest.raises(ValueError, match=words):
            from_huggingface(dataset, **options)


def test_numbers_of_hugging_face_are_kept_or_refused(hub):
    """Its format for NumPy has float32 and int64; in a stream, numbers are those of Python, or None."""
    datasets, near = hub[0], "column 'x'.*float32 tells apart"
    seconds = [[1.7e9 + i, 0.5] for i in range(4)]
    missing = r"column 'x': (1 rows with NaN|must hold numbers.*None.*in row 1)"
    for rows, kind, words in [
        (seconds, "float64", near),
        ([row[0] for row in seconds], "float64", near),
        ([[1, 2], [3, None]], "int16", missing),
        ([[True, False], [True, None]], "bool", missing),
    ]:
        value = datasets.Value(kind)
        kinds = {"x": datasets.Sequence(value) if isinstance(rows[0], list) else value, "y": datasets.Value("int64")}
        made = datasets.Dataset.from_dict({"x": rows, "y": [0, 1] * (len(rows) // 2)}, datasets.Features(kinds))
        for table in (made, made.to_iterable_dataset()):
            with pytest.raises(ValueError, match=words):
                from_huggingface(table)


BYTE, DOUBLE = SimpleNamespace(dtype="uint8"), SimpleNamespace(dtype="float64")


@pytest.mark.parametrize(
    ("values", "feature", "types"),
    [
        (np.ones((3, 2, 2), np.int64), SimpleNamespace(dtype="uint8", shape=(2, 2)), ["uint8"]),
        ([[1, 2], [3]], SimpleNamespace(feature=SimpleNamespace(feature=BYTE)), ["uint8", "uint8"]),
        ([[1, 2], [3, None]], [BYTE], ["uint8", "object"]),
        (np.ones((3, 2), np.int64), SimpleNamespace(dtype="int64", shape=(2,)), ["int64"]),
        (np.ones(3, np.int64), BYTE, ["int64"]),  # single numbers are labels, of any type
        (np.ones(3, np.int64), None, ["int64"]),
    ],
)
def test_arrays_of_hugging_face_have_the_type_of_their_feature(values, feature, types):
    typed = _typed(values, feature)
    assert [row.dtype.name for row in ([typed] if isinstance(values, np.ndarray) else typed)] == types


def test_numbers_of_hugging_face_are_read_in_float64_where_they_are():
    class Image:
        pass

    class Table:
        features = {"x": [DOUBLE], "y": BYTE, "picture": Image()}  # noqa: RUF012

        def __len__(self):
            return 2

        def select_columns(self, names):
            self.names = names
            return self

        def with_format(self, type, dtype=None):
            forms.append((type, dtype))
            return self

        def __getitem__(self, rows):
            return {name: [0, 1][rows] for name in self.names}

    forms = []
    assert _read(Table(), ["x", "y", "picture"])["y"] == [0, 1]
    assert forms == [("numpy", np.float64), ("numpy", None), (None, None)]


def test_rows_of_one_column_have_one_type():
    def square(dtype):
        return np.ones((2, 2), dtype)

    for rows in ([square(np.uint8), square(np.float32)], [square(np.uint8), square(np.uint16)]):
        with pytest.raises(ValueError, match=r"row 1 is of .*, row 0 of uint8; give one type"):
            stacked(rows, "x")
    assert stacked([square(np.float16), square(np.float64)], "x").dtype == np.float64
    assert stacked([[1, 2], [1.5, 2.0]], "x").tolist() == [[1, 2], [1.5, 2]]  # Python's numbers


def test_numbers_of_large_columns_are_told_apart_and_those_of_images_rounded():
    seconds = 1.7e9 + np.arange(20.0)
    with pytest.raises(ValueError, match=r"x \(column 1\) must be of numbers that float32 tells apart"):
        as_type(np.float32, np.stack([np.arange(20.0), seconds], axis=1), "x")
    assert as_type(np.float32, seconds[:, None, None], "x").dtype == np.float32


@pytest.mark.parametrize(("dtype", "wanted"), [("uint8", "uint8"), ("uint32", "uint32"), ("int64", "int32")])
def test_integers_beside_inputs_keep_their_type_if_jax_has_it(dtype, wanted):
    assert array_beside(np.full(3, 7, dtype), "w").dtype == wanted
