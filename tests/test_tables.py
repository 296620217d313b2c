"""Tables against a plain reading by pandas and NumPy: columns, labels, splits, further rows, the command line."""

import dataclasses
import json
import tempfile
from decimal import Decimal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse

import jfcl
from jfcl.cli import main
from jfcl.core import check_clients
from jfcl.data import Dataset, build, from_arrays, from_frame, generate_store, read_rows
from jfcl.experiments import Config, load_run
from jfcl.experiments.population import open_population

pd = pytest.importorskip("pandas", reason="needs pandas")

HAZARDS = {  # what makes a table unreadable, and what the refusal names
    "missing": "column '(tag|user)': 1 (missing values|rows with NaN)",
    "dates": "column 'day' must be numbers in the place of dates",
    "identifiers": "column 'id' must be of numbers that float32 tells apart",
    "many names": "column 'name' must be of at most 100 names",
    "unknown name": "column 'shop' has names that training does not have",
    "floats as labels": "column 'target' holds whole numbers as floats",
    "numbers as texts": "column 'price' holds numbers or dates written as texts",
}
LABELS = ("texts", "truths", "integers", "negative", "numbers", "floats", "two columns")


def make_column(rng, kind, n):
    """Returns a column of `n` values as pandas holds them."""
    return {
        "integers": lambda: pd.Series(rng.integers(-50, 50, n) * 3),
        "floats": lambda: pd.Series(rng.normal(size=n)),
        "truths": lambda: pd.Series(rng.random(n) < 0.5),
        "names": lambda: pd.Series(rng.choice(["pc", "phone", "tv"], n)),
        "categories": lambda: pd.Series(pd.Categorical(rng.choice([3, 10, 2], n))),
        "nullable": lambda: pd.Series(pd.array(rng.integers(0, 9, n), dtype="Int64")),
        "decimals": lambda: pd.Series([Decimal(int(v)) / 4 for v in rng.integers(0, 90, n)]),
        "sparse": lambda: pd.Series(pd.arrays.SparseArray(rng.integers(0, 2, n).astype(float))),
        "small": lambda: pd.Series(rng.integers(0, 200, n).astype(np.uint8)),
        "large": lambda: pd.Series(rng.integers(0, 50, n) * 10.0**9),
    }[kind]()


def make_target(rng, kind, n):
    """Returns the columns of the targets."""
    made = {
        "texts": lambda: rng.choice(["yes", "no", "maybe"], n),
        "truths": lambda: rng.random(n) < 0.5,
        "integers": lambda: rng.choice([0, 2, 5], n),
        "negative": lambda: rng.choice([-1, 1], n),
        "numbers": lambda: rng.normal(size=n),
        "floats": lambda: rng.choice([0.0, 1.0], n),
        "two columns": lambda: rng.random((n, 2)) < 0.5,
    }[kind]()
    return {"t1": made[:, 0], "t2": made[:, 1]} if kind == "two columns" else {"target": made}


def make_table(rng):
    """Returns `(frame, test or None, options, kind of the labels, hazard or None)`."""
    n, n_test = int(rng.integers(12, 70)), int(rng.integers(0, 2)) * int(rng.integers(4, 20))
    count, kinds = n + n_test, ("integers", "floats", "truths", "names", "categories", "nullable", "decimals")
    chosen = rng.choice([*kinds, "sparse", "small", "large"], rng.integers(1, 5))
    columns = {"tag": pd.Series(rng.permutation(count) / 1024 + 0.25)}  # tells the rows apart
    columns |= {f"c{i}": make_column(rng, kind, count) for i, kind in enumerate(chosen)}
    kind, hazard = rng.choice(LABELS), rng.choice([*HAZARDS]) if rng.random() < 0.3 else None
    kind = "floats" if hazard == "floats as labels" else kind
    targets = make_target(rng, kind, count)
    frame = pd.DataFrame(columns | {"user": rng.choice(list("abcdefgh"), count)} | targets)
    if rng.random() < 0.5:
        frame.insert(0, "Unnamed: 0", rng.permutation(count))
    if rng.random() < 0.3:
        frame["number"] = np.arange(count) + 1
    options = {"by": "user", "y": [*targets]} | ({"kind": "classification"} if kind == "floats" else {})
    if hazard == "missing":
        frame.loc[int(rng.integers(n)), rng.choice(["tag", "user"])] = np.nan
    elif hazard == "dates":
        frame["day"] = pd.Timestamp("2024-01-01") + pd.to_timedelta(rng.integers(0, 99, count), unit="D")
    elif hazard == "identifiers":
        frame["id"] = rng.choice([1, 1.0]) * (10**9 + rng.permutation(count))
    elif hazard == "many names":
        frame["name"] = [f"n{v}" for v in rng.permutation(count)]
    elif hazard == "unknown name":
        n_test = n_test or 0
        frame["shop"] = ["x"] * n + ["z"] * n_test
        hazard = hazard if n_test else None
    elif hazard == "floats as labels":
        options.pop("kind")
    elif hazard == "numbers as texts":
        frame["price"] = [f"{v},5" for v in rng.integers(0, 9, count)]
    frame = frame[rng.permutation(frame.columns)]
    train, test = frame.iloc[:n].sample(frac=1, random_state=int(rng.integers(99))), frame.iloc[n:]
    return train, (test if n_test else None), options, kind, hazard


def plain_reading(frame, train, options, kind, names):
    """Returns `(x, y)` of a frame, whose rows are encoded by the columns of training."""
    left = ["user", *options["y"], "Unnamed: 0", "number"]
    columns = []
    for name in [c for c in train.columns if c not in left]:
        values = train[name]
        if values.dtype == "category" or isinstance(values.iloc[0], str):
            known = sorted(set(map(str, values)))
            columns += [np.float32(frame[name].astype(str).to_numpy() == one) for one in known]
        else:
            columns.append(np.array([float(v) for v in frame[name]]).astype(np.float32))
    targets = [frame[name].to_numpy() for name in options["y"]]
    if kind == "two columns":
        return np.stack(columns, 1), np.stack(targets, 1).astype(np.float32)
    if kind in ("texts", "truths", "negative"):
        return np.stack(columns, 1), np.array([names.index(v) for v in targets[0].tolist()])
    return np.stack(columns, 1), targets[0].astype(np.float32 if kind == "numbers" else np.int32)


def rows_of(x, y):
    return sorted(tuple(row) for row in np.column_stack([x, y]).tolist())


def check_case(seed, tmp_path):
    """Compares one random table and division with the plain reading; returns whether it was refused."""
    rng = np.random.default_rng(seed)
    train, test, options, kind, hazard = make_table(rng)
    if hazard is not None:
        with pytest.raises(ValueError, match=HAZARDS[hazard]):
            from_frame(train, test=test, **options)
        return True
    data = from_frame(train, test=test, **options)
    names = sorted({*train[options["y"][0]].tolist(), *([] if test is None else test[options["y"][0]].tolist())})
    assert data.table["left_out"] == [c for c in train.columns if c in ("Unnamed: 0", "number")]
    for split, frame in [("train", train)] + ([] if test is None else [("test", test)]):
        x, y = plain_reading(frame, train, options, kind, names)
        found = getattr(data, split)
        np.testing.assert_array_equal(found["x"], x)
        np.testing.assert_array_equal(found["y"], y)
        users = [data.writer_names[i] for i in data.writer[split]]
        assert users == frame["user"].tolist()
    again = train.iloc[:7][rng.permutation(train.columns)]  # a new row, from the table as the run's folder keeps it
    rows = read_rows(again, json.loads(json.dumps(data.table)))
    np.testing.assert_array_equal(rows["x"], data.train["x"][:7])
    np.testing.assert_array_equal(rows["y"], data.train["y"][:7])

    # Clients of users: all rows of those who can be tested, the official test rows where there are some.
    everything = {
        split: plain_reading(f, train, options, kind, names)
        for split, f in [("train", train), ("test", test)]
        if f is not None
    }
    able = [u for u, own in train.groupby("user") if len(own) > 1 or (test is not None and (test["user"] == u).any())]
    if not able:
        return True
    fed = build(data, partition="writer", seed=seed)
    assert fed.names == able and (f"left out: {train['user'].nunique() - len(able)} of" in fed.description) == (
        len(able) < train["user"].nunique()
    )
    for i, user in enumerate(fed.names):
        mine = {
            split: (frame["user"] == user).to_numpy()
            for split, frame in [("train", train), ("test", test)]
            if split in everything
        }
        wanted = {split: rows_of(*(part[mine[split]] for part in everything[split])) for split in mine}
        found = {
            split: rows_of(*(clients.examples[name][i, : clients.size[i]] for name in "xy"))
            for split, clients in [("train", fed.train), ("test", fed.test)]
        }
        if wanted.get("test"):
            assert found == wanted
        else:
            assert sorted(found["train"] + found["test"]) == wanted["train"] and found["test"]

    # Other partitions, in memory and in a store: rows of the table, none twice, none of training in a test.
    if data.num_classes is None and rng.random() < 0.5:
        with pytest.raises(ValueError, match="a classification data set for 'dirichlet'"):
            build(data, num_clients=2, partition="dirichlet")
    partition = rng.choice(["iid", "power_law", *(["dirichlet", "label"] if data.num_classes else [])])
    try:
        fed = build(data, num_clients=3, partition=str(partition), seed=seed)
    except ValueError as error:  # of a label that the test pool does not have
        assert "use partition='iid'" in str(error)
        fed = build(data, num_clients=3, partition="iid", seed=seed)
    stores = generate_store(tmp_path / str(seed), data, num_clients=3, examples_per_client=2, seed=seed)
    for clients in ((fed.train, fed.test), tuple(store.gather([0, 1, 2]) for store in stores)):
        check_clients(clients[0])
        both = []
        for part in clients:
            real = np.arange(part.examples["x"].shape[1]) < part.size[:, None]
            both.append(set(rows_of(part.examples["x"][real], part.examples["y"][real])))
        assert not both[0] & both[1]
        assert both[0] <= set(rows_of(*everything["train"]))
        assert both[1] <= set(rows_of(*everything["train" if test is None else "test"]))
    return False


def check_cases(seeds, tmp_path):
    refused = sum(check_case(seed, tmp_path) for seed in seeds)
    assert 0 < refused < len(seeds) / 2


def test_random_tables(tmp_path):
    check_cases(range(12), tmp_path)


@pytest.mark.slow
def test_300_random_tables(tmp_path):
    check_cases(range(1000, 1300), tmp_path)


# Arrays, frames and series, wherever arrays are accepted.


def people(rng, n=60):
    columns = {"user": rng.choice(["ann", "bob", "cid"], n), "age": rng.integers(18, 80, n), "tall": rng.normal(size=n)}
    return pd.DataFrame(columns | {"label": rng.integers(0, 2, n)}).sample(frac=1, random_state=1)


def test_frames_and_series_are_read_by_rows(tmp_path):
    frame = people(np.random.default_rng(0))
    groups = [group for _, group in frame.groupby("user")]
    for columns in (["age"], ["age", "tall"], "age"):
        clients = from_arrays([(group[columns], group["label"]) for group in groups])
        for i, group in enumerate(groups):
            wanted = group[[columns] if isinstance(columns, str) else columns].to_numpy(np.float32)
            np.testing.assert_array_equal(clients.examples["x"][i, : len(group)], wanted)
            assert clients.examples["y"][i, : len(group)].tolist() == group["label"].tolist()
    square = pd.DataFrame(np.eye(2), columns=["a", "b"])
    one = from_arrays([(square, pd.DataFrame({"y": [0, 1]}))])
    assert one.examples["x"][0].tolist() == [[1, 0], [0, 1]] and one.examples["y"][0].tolist() == [0, 1]
    sparse = scipy.sparse.csr_matrix(np.eye(4))
    assert from_arrays([(sparse, [0, 1, 0, 1])]).examples["x"][0].tolist() == np.eye(4).tolist()
    # A data set of one's own, by rows and not by the numbers of the index.
    writer = frame["user"].map({"ann": 0, "bob": 1, "cid": 2})
    split = {"x": frame[["age", "tall"]], "y": frame["label"]}
    arrays = {"x": split["x"].to_numpy(np.float32), "y": split["y"].to_numpy(np.int32)}
    feds = []
    for train, ids in [
        (split, writer),
        (arrays, writer.to_numpy()),
        ({n: jnp.asarray(v) for n, v in arrays.items()}, writer),
    ]:
        data = Dataset("mine", train, None, 2, {"train": ids}, "")
        feds.append(build(data, partition="writer"))
    for fed in feds[1:]:
        jax.tree.map(np.testing.assert_array_equal, fed.train, feds[0].train)
        assert fed.split_hash == feds[0].split_hash
    data = data._replace(train={"x": scipy.sparse.csr_matrix(arrays["x"]), "y": arrays["y"]})
    np.testing.assert_array_equal(build(data, partition="writer").train.examples["x"], feds[0].train.examples["x"])
    stores = generate_store(tmp_path / "s", data._replace(train=split), num_clients=3, examples_per_client=4)
    assert stores[0].gather([0]).examples["x"].shape == (1, 4, 2)


def store(clients):
    return jfcl.data.ClientStore.create(tempfile.mkdtemp() + "/s", clients)


SECONDS = 1.7e9 + np.arange(20.0)


@pytest.mark.parametrize("name", ["Unnamed: 0", "id"])
@pytest.mark.parametrize("of_test", [range(12), range(40, 52), range(60, 72)])
@pytest.mark.parametrize("first", [0, 1])
def test_numbers_of_rows_are_left_out_however_those_of_the_test_split_begin(name, of_test, first):
    numbers = (first + np.array(rows) for rows in (range(60), of_test))
    frames = [pd.DataFrame({name: rows, "age": np.arange(len(rows)) % 7, "label": 1}) for rows in numbers]
    data = from_frame(frames[0], test=frames[1])
    assert data.table["left_out"] == [name] and data.test["x"].shape == (12, 1)


def test_errors_of_rounding_are_no_different_numbers():
    x = np.stack([np.where(np.arange(20) % 2, 0.3, 0.1 + 0.2), np.arange(20) / 7], axis=1)
    clients = from_arrays([(x, np.arange(20) % 3)])
    np.testing.assert_array_equal(clients.examples["x"][0], x.astype(np.float32))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda f: from_arrays([(f[["age", "user"]], f["label"])]), "column 'user' must be one column of numbers"),
        (
            lambda f: from_arrays([(g[["n", "age"]], g.label) for _, g in f.assign(n=np.arange(60)).groupby("user")]),
            "number the rows of all clients",
        ),
        (lambda f: from_arrays([(f[["age"]], f["user"])]), "y must be numbers; jfcl.data.from_frame numbers texts"),
        (lambda f: from_arrays([(f[["age", "tall"]], f.label), (f[["tall", "age"]], f.label)]), "client 1: x: columns"),
        (lambda f: from_arrays([(SECONDS, np.zeros(20, int))]), "client 0: x must be of numbers that float32 tells"),
        (lambda f: from_arrays([(np.zeros(20), SECONDS)]), "client 0: y must be of numbers that float32 tells apart"),
        (lambda f: jfcl.stack_clients([{"x": f[["age"]], "y": f["label"]}]), "not frames; jfcl.data.from_arrays"),
        (lambda f: jfcl.stack_clients([{"x": f["user"], "y": f["label"]}]), "must be of arrays of numbers"),
        (
            lambda f: check_clients(jfcl.Clients({"x": f[["age"]], "y": f[["label"]]}, np.ones(60, int))),
            "an array of real numbers",
        ),
        (lambda f: check_clients(jfcl.Clients({"x": SECONDS[None, :, None]}, np.array([20]))), "float32 tells apart"),
        (
            lambda f: build(
                Dataset("m", {"x": SECONDS[:, None], "y": np.zeros(20, int)}, None, 1, None, ""), num_clients=2
            ),
            "float32",
        ),
        (
            lambda f: store([{"x": SECONDS[:, None], "y": np.zeros(20, int)}]),
            "client 0: x must be of numbers that float32",
        ),
        (
            lambda f: store([{"x": f[["age"]], "y": f["label"]}]),
            r"client 0: x must be an array of numbers \[m, ...\]; jfcl.data.from_arrays",
        ),
        (lambda f: from_frame(pd.concat([f, f[["age"]]], axis=1)), "names of columns must be different.*'age'"),
        (
            lambda f: from_frame(f.set_axis(pd.MultiIndex.from_product([["a"], f.columns]), axis=1)),
            "frame: columns must be of one level",
        ),
        (lambda f: from_frame(f.set_index("user"), by="user"), "by must be a column, not the index: frame.reset_index"),
        (
            lambda f: from_frame(f[["label"]].assign(n=np.arange(60)), y="label"),
            "the only inputs, .'n'., number the rows",
        ),
        (lambda f: from_frame(f.rename(columns={"age": "y"}), by="user"), "y must be given .*'y', 'label'. all have"),
        (lambda f: from_frame(f, y=["label", "user"], x="age"), "column 'user' must be one column of numbers"),
        (lambda f: from_frame(f.assign(y=2000 + np.arange(60) % 5), x="age", y="y"), "5 different whole numbers from"),
        (lambda f: from_frame(f.assign(y=18 + np.arange(60)), x="tall", y="y"), "numbers from 18 to 77: give kind="),
        (lambda f: from_frame(f.assign(y=np.arange(60) - 9), x="tall", y="y"), "numbers from -9 to 50: give kind="),
        (lambda f: from_frame(f, y="user", x="age", kind="regression"), "kind must be classification"),
        (lambda f: from_frame(f, y="tall", x="age", kind="classification"), "labels must be whole numbers"),
        (
            lambda f: jfcl.models.classification(jfcl.models.Linear(1), (1,), None),
            "num_classes .* jfcl.models.regression",
        ),
    ],
)
def test_what_would_be_read_wrongly_is_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make(people(np.random.default_rng(0)))


def test_numbers_are_scaled_by_the_deviation_of_all_rows_and_constant_ones_are_zero():
    frame = pd.DataFrame({"a": [3.0, 3.0, 3.0, 3.0], "b": [1.0, 2.0, 2.0, 3.0], "y": [0, 1, 0, 1]})
    x = from_frame(frame, scale=True).train["x"]
    np.testing.assert_allclose(x, np.stack([np.zeros(4), np.array([-1, 0, 0, 1]) / np.sqrt(0.5)], axis=1), rtol=1e-6)


def test_names_of_clients_in_a_file_keep_their_zeros(tmp_path):
    (tmp_path / "a.csv").write_text("user,age,label\n007,1.5,0\n7,2.5,1\n007,2.0,1\n")
    data = from_frame(tmp_path / "a.csv", by="user")
    assert data.writer_names == ["007", "7"] and data.writer["train"].tolist() == [0, 1, 0]


def test_a_column_that_is_named_twice_counts_once():
    frame = pd.DataFrame({"user": list("abab"), "age": [1.0, 2.5, 3, 4], "label": [0, 1, 0, 1]})
    once = from_frame(frame, by="user", x="age", y="label")
    twice = from_frame(frame, by="user", x=["age", "age"], y=["label", "label"])
    assert twice.table == once.table and twice.train["x"].tolist() == once.train["x"].tolist()


def test_remedies_for_tables_help():
    frame = people(np.random.default_rng(0))
    seconds = frame.assign(at=pd.Timestamp("2024-01-01") + pd.to_timedelta(np.arange(60), unit="h"))
    for bad in (seconds, seconds.assign(at=1.7e9 + np.arange(60))):
        with pytest.raises(ValueError, match="the days since the first one"):
            from_frame(bad, by="user")
    days = (seconds["at"] - seconds["at"].min()).dt.days
    assert from_frame(seconds.assign(at=days), by="user").train["x"].shape == (60, 3)
    assert from_frame(frame.assign(n=np.arange(60)), by="user", x=["age", "n"]).train["x"].shape == (60, 2)
    price = frame.assign(price=[f"{i % 7},5" for i in range(60)])
    with pytest.raises(ValueError, match=r"pandas\.to_numeric or .* or names with astype"):
        from_frame(price, by="user")
    numbers = pd.to_numeric(price["price"].str.replace(",", "."))
    assert from_frame(price.assign(price=numbers), by="user").train["x"].shape == (60, 3)
    assert from_frame(price.assign(price=price["price"].astype("category")), by="user").train["x"].shape == (60, 9)


@pytest.mark.slow
def test_a_table_on_the_command_line(tmp_path, capsys, monkeypatch):
    """csv to models per cluster to a new user, by the names of columns."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    frame = people(rng, 90).assign(device=rng.choice(["pc", "phone"], 90), label=rng.choice(["no", "yes"], 90))
    frame.loc[len(frame)] = ["solo", 40, 0.0, "no", "pc"]
    frame.to_csv("shop.csv")  # with its index, as everybody saves it
    command = [
        "run",
        "ifca",
        "--dataset",
        "shop.csv",
        "--by",
        "user",
        "--target",
        "label",
        "--clusters",
        "2",
        "--quiet",
    ]
    assert main([*command, "--rounds", "2", "--out", "run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "(solo)" in printed and "columns left out, as they number the rows: Unnamed: 0; those named" in printed
    table = json.loads((tmp_path / "run" / "summary.json").read_text())["table"]
    assert table["left_out"] == ["Unnamed: 0"] and table["labels"] == ["no", "yes"]
    assert [one["column"] for one in table["inputs"]] == ["age", "tall", "device"]
    found = load_run("run")
    assert [found.setup.federation.names[i] for i in range(3)] == ["ann", "bob", "cid"]
    new = pd.DataFrame({"device": ["phone"], "tall": [0.5], "label": ["yes"], "age": [33]})
    rows = found.read(new)
    scaled = [
        (33 - frame["age"].mean()) / frame["age"].std(ddof=0),
        (0.5 - frame["tall"].mean()) / frame["tall"].std(ddof=0),
    ]
    np.testing.assert_allclose(rows["x"], [[*scaled, 0, 1]], rtol=1e-5)
    assert rows["y"].tolist() == [1] and found.choose(rows) in (0, 1)
    assert found.predictor(found.client("bob"))(rows["x"]).shape == (1, 2)
    with pytest.raises(ValueError, match="unknown name 'dan'"):
        found.client("dan")
    with pytest.raises(ValueError, match=r"has names that training does not have, ..tv.."):
        found.read(new.assign(device="tv"))
    frame.assign(age=frame["age"] + 1).to_csv("shop.csv")
    with pytest.raises(ValueError, match=r"this split of shop\.csv is another"):
        load_run("run")


NEW_ROWS = {  # of each kind of column or target in training, further values that are read, and those that are not
    "number": ([1.5, 2.5], [[0.5, 4], [7, 8]], [["1.5", "2"], [None, 1], [[1, 2], [3, 4]], [1j, 2], ["a", "b"]]),
    "truth": ([True, False], [[False, True], [0, 1]], [["True", "False"], [np.nan, 1]]),
    "text": (["a", "b"], [["b", "a"]], [["c", "a"], [1, 2], [None, "a"], [True, False]]),
    "vector": ([[1.0, 2.0], [3.0, 4.0]], [[[5.0, 6.0], [7.0, 8.0]]], [[[1.0], [2.0]], [1.0, 2.0], ["a", "b"]]),
    "image": ([np.zeros((2, 2, 3), np.uint8)] * 2, [[np.ones((2, 2, 3), np.uint8)] * 2], [[np.ones((3, 3, 3))] * 2]),
    "label": ([0, 1], [[1, 0], [1.0, 0.0]], [[2, 0], [-1, 0], [0.5, 1], ["0", "1"], [None, 1], [[1], [0]], [1e300, 0]]),
    "name": (["n", "y"], [["y", "y"]], [["z", "y"], [0, 1], [None, "y"], [["y"], ["n"]], [{}, "y"]]),
    "quantity": ([0.5, 1.5], [[2.5, 3], [1, 2]], [["2.5", "3"], [np.nan, 1], [1j, 0], [1e39, 0]]),
    "map": ([np.eye(2, dtype=int)] * 2, [[np.zeros((2, 2), int)] * 2], [[0, 1], [np.zeros((2, 2)) + 0.5] * 2]),
}


@pytest.mark.parametrize("kind", NEW_ROWS)
def test_new_rows_are_read_as_those_of_training_or_refused(kind):
    values, good, bad = NEW_ROWS[kind]
    is_target = kind in ("label", "name", "quantity", "map")
    train = pd.DataFrame({"c": values, "y": values if is_target else [0, 1]})
    train["c"] = train["c"] if not is_target else [0.5, 1.5]
    train = train.assign(d=[1.0, 2.0]) if kind in ("number", "truth", "text") else train
    given = {"channels_first": False} if kind == "image" else {}
    table = from_frame(train, y="y", x=[c for c in train if c != "y"], **given).table
    changed = "y" if is_target else "c"
    for new in good:  # those of a table with these values in the place of the others
        rows = train.assign(**{changed: new})
        kept = {"quantity": {"kind": "regression"}, "label": {"kind": "classification"}}.get(kind, {})
        both = pd.concat([train, rows], ignore_index=True)
        wanted = from_frame(both, y="y", x=[c for c in train if c != "y"], **given, **kept).train
        found = read_rows(rows, json.loads(json.dumps(table)))
        for name in "xy":
            np.testing.assert_array_equal(found[name], wanted[name][2:])
            assert found[name].dtype == wanted[name].dtype
    for new in bad:
        rows = train.copy()
        rows[changed] = pd.Series(new, dtype=object)
        with pytest.raises(ValueError, match=f"column '{changed}'"):
            read_rows(rows, table)


def test_new_rows_without_what_training_had_are_refused():
    train = pd.DataFrame({"a": [0.0, 1e-6], "s": [0, 1], "t": [1, 0]})
    table = from_frame(train, x="a", y=["s", "t"], scale=True).table
    assert list(read_rows(train[["a"]], table)) == ["x"]
    for rows, how, words in [
        (train[["s", "t"]], table, r"a frame with the column 'a', one of the inputs in training, got \['s', 't'\]"),
        (train[["a", "t"]], table, "with the column 's', one of the targets in training"),
        (train.assign(a=1e38), table, "column 'a': .* is too far from those of training"),
        (train, None, "table must be how a table was read, as Dataset.table, got None"),
        (train.iloc[:0], table, "column 'a' has no example"),
    ]:
        with pytest.raises(ValueError, match=words):
            read_rows(rows, how)


def test_new_texts_are_joined_as_those_of_training():
    train = pd.DataFrame({"a": ["x", "y"], "b": ["u", "v"]})
    for tokens, wanted in [("words", "y u"), ("characters", "yu")]:
        table = from_frame(train, x=["a", "b"], tokens=tokens).table
        assert read_rows(pd.DataFrame({"b": ["u"], "a": ["y"]}), table)["x"].tolist() == [wanted]


WRITTEN = [["1,000", "2,5"], ["1'000", "7"], ["$1", "3 €"], ["1e3", "-2"], ["0x1f", "0x2"], [" 3", "3"], ["4", "?"]]
WRITTEN += [["1\u00a0000", "n/a"], ["2024-01-31", "2024-02-01"], ["10:30", "11:45"]]


@pytest.mark.parametrize("texts", WRITTEN)
def test_numbers_written_as_texts_are_no_names(texts):
    frame = pd.DataFrame({"c": texts * 6, "age": np.arange(12) % 5, "y": [0, 1] * 6})
    for columns in (["c"], ["c", "age"]):
        with pytest.raises(ValueError, match="column 'c' holds numbers or dates written as texts"):
            from_frame(frame, x=columns, y="y")
    with pytest.raises(ValueError, match=r"column 'c' holds numbers or dates .* give kind='classification'"):
        from_frame(frame, x="age", y="c")
    assert from_frame(frame, x="age", y="c", kind="classification").table["labels"] == sorted(texts)
    assert from_frame(frame.astype({"c": "category"}), x=["c", "age"], y="y").train["x"].shape == (12, 3)


def test_texts_of_many_spaces_are_read_at_once():
    texts = [" " * 1000 + word for word in "abcd"]
    assert from_frame(pd.DataFrame({"x": texts, "y": [0, 1, 0, 1]})).train["x"].tolist() == texts


def test_the_text_that_keeps_a_column_from_being_numbers_is_named():
    frame = pd.DataFrame({"c": ["4", "?", "5.5"] * 4, "age": np.arange(12) % 5, "y": [0, 1] * 6})
    with pytest.raises(ValueError, match=r"column 'c' holds numbers or dates .* such as '4' beside '\?'; make them"):
        from_frame(frame, x=["c", "age"], y="y")
    with pytest.raises(ValueError, match=r"column 'c' holds numbers or dates .* \('4' beside '\?'\): give"):
        from_frame(frame, x="age", y="c")


def test_what_the_splits_do_not_share_is_refused(tmp_path):
    frame = pd.DataFrame({"c": [True, False] * 6, "age": np.arange(12) % 5, "y": [0, 1] * 6})
    for change, words in [
        ({"c": "True"}, "column 'c' must be numbers, as in training, got 'True'"),
        ({"y": -1}, r"column 'y' of the split 'test' must be labels of which some occur in training, got \['-1'\]"),
        ({"y": "a"}, "column 'y' must be of one kind in all splits"),
    ]:
        with pytest.raises(ValueError, match=words):
            from_frame(frame, y="y", test=frame.assign(**change))
    (tmp_path / "twice.csv").write_text("user,age,age,y\na,1,2,0\nb,3,4,1\n")
    with pytest.raises(ValueError, match=r"twice\.csv: the names of columns must be different.*'age'"):
        from_frame(tmp_path / "twice.csv", y="y")
    # A name is missing: pandas would take the names of the other columns for those after them.
    (tmp_path / "shifted.csv").write_text("user,age,y\na,1.5,2,0\nb,3.5,4,1\n")
    with pytest.raises(ValueError, match=r"shifted\.csv: a row has more entries than the 3 names of columns"):
        from_frame(tmp_path / "shifted.csv", y="y")


def test_options_of_a_table(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    people(np.random.default_rng(0)).to_csv("shop.csv", index=False)
    (tmp_path / "marks.csv").write_text("user;age;label\na;1,5;0\n")
    people(np.random.default_rng(0)).rename(columns={"label": "bought"}).to_csv("bought.csv", index=False)
    config = Config("fedavg", dataset="shop.csv", by="user", target="label")
    assert (config.clients, config.partition, config.heterogeneity) == (3, "writer", "none")
    assert dataclasses.replace(config, drift="R").heterogeneity == "swap_pairs"
    for wrong, words in [
        (["--dataset", "none.csv", "--by", "user"], "dataset must be a file that exists, got 'none.csv'"),
        (["--dataset", "none.csv", "--clients", "4"], "dataset must be a file that exists, got 'none.csv'"),
        (["--dataset", "shop.csv", "--by", "usr"], "unknown column for by 'usr': did you mean 'user'?"),
        (["--dataset", "shop.csv", "--by", "user", "--target", "lable"], "for target 'lable': did you mean 'label'?"),
        (
            ["--dataset", "marks.csv", "--by", "user"],
            "marks.csv: its columns are separated by ';'; pandas.read_csv(sep",
        ),
        (["--dataset", "bought.csv", "--by", "user"], "target must be given: no other column has a usual name"),
        (["--by", "user"], "by must be left out unless --dataset is a table"),
        (["--dataset", "shop.csv", "--by", "user", "--clients", "4"], "at most 3, the number of writers"),
    ]:
        assert main(["run", "fedavg", "--quiet", *wrong]) == 2
        assert words in " ".join(capsys.readouterr().err.split())


def test_a_store_of_a_table_is_not_opened_for_other_columns(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    people(np.random.default_rng(0)).to_csv("shop.csv", index=False)

    def opened(**change):
        options = {"dataset": "shop.csv", "by": "user", "target": "label", "inputs": "age", "store": "people"}
        options |= {"population": 4, "examples_per_client": 5, "cohort": 2, "model": "linear", "partition": "iid"}
        options |= change
        config = Config("fedavg", **{name: value for name, value in options.items() if value is not None})
        with open_population(config, None, None, False) as (config, *_):
            return config

    assert opened().inputs == opened(population=None, inputs=None).inputs == "age"
    for change in ({"inputs": None}, {"inputs": "tall", "population": None}, {"target": "tall", "kind": "regression"}):
        with pytest.raises(ValueError, match=r"store people is of another population \(.*(inputs|target): it has"):
            opened(**change)
    with pytest.raises(ValueError, match="partition must be given with --by and --population, whose clients are not"):
        opened(partition=None)
    with pytest.raises(ValueError, match="dataset must be a classification, or one of texts, with --population"):
        opened(target="tall", inputs="age", kind="regression", store="others")
