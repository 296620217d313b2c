"""Tables against a plain reading by pandas and NumPy: columns, labels, splits, further rows, the command line."""

import json
from decimal import Decimal

import numpy as np
import pytest

from jfcl.core import check_clients
from jfcl.data import build, from_frame, generate_store, read_rows

pd = pytest.importorskip("pandas", reason="needs pandas")

HAZARDS = ("missing", "dates", "identifiers", "many names", "unknown name", "floats as labels", "numbers as texts")
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
    kind, hazard = rng.choice(LABELS), rng.choice(HAZARDS) if rng.random() < 0.3 else None
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
    elif hazard == "floats as labels" and kind == "floats":
        options.pop("kind")
    elif hazard == "numbers as texts":
        frame["price"] = [f"{v},5" for v in rng.integers(0, 9, count)]
    if hazard == "floats as labels" and kind != "floats":
        hazard = None
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
        with pytest.raises(ValueError, match=r"column|kind="):
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
        with pytest.raises(ValueError, match="a classification data set for partition 'dirichlet'"):
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
