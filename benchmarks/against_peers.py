"""The same job in every library: same examples, same first models, same rounds; seconds, and the accuracy reached.

    python benchmarks/against_peers.py                 the whole table (make peers first; who is not set up is left out)
    python benchmarks/against_peers.py --only cnn      the jobs whose name contains "cnn"
    python benchmarks/against_peers.py --quick         small jobs of full batches, to see that all agree; writes nothing

Libraries take turns (ours, a peer, ours, another, ... and that several times over), each time in a process of its own,
so that what else the machine does hits all of them. A round's seconds are the median over all rounds of all turns but
the first of each, in which those that compile do so. All accuracies come from one NumPy function that is given the
final models (peers/job.py); where they differ by more than TOLERANCE the libraries did not do the same job, and nothing
is written.

Real MNIST where JFCL_DATA_DIR has it, else the digits of scikit-learn enlarged to 28 x 28.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from common import report, run_peer

import jfcl
from jfcl.experiments import bench

JOBS = {
    "fedavg mlp": dict(method="fedavg", model="mlp", clients=100, examples=200, batch=20, steps=10, rounds=21),
    "fedavg cnn": dict(method="fedavg", model="cnn_mnist", clients=100, examples=100, batch=20, steps=5, rounds=6),
    # HypCluster in FedJAX: the same where all clients have as many examples.
    "ifca mlp": dict(method="ifca", model="mlp", clients=100, examples=200, batch=20, steps=10, rounds=11, clusters=4),
    "flhc mlp": dict(method="flhc", model="mlp", clients=100, examples=200, batch=20, steps=10, rounds=11, clusters=4)
    | {"options": {"distance": "euclidean", "linkage": "ward"}},  # of jfcl; CFLA's only ones with a number of clusters
}
QUICK = dict(clients=8, examples=40, batch=None, steps=2, rounds=3)
OURS = {  # a row of ours: its mapping, and the devices that the CPU is made to show
    "jfcl, one at a time": dict(mapping="chunked(1)", devices=1),
    "jfcl, chunks of 4": dict(mapping="chunked(4)", devices=1),
    "jfcl, vmap": dict(mapping="vmap", devices=1),
    "jfcl, two devices": dict(mapping="sharded(chunked(1))", devices=2),
}
PEERS = {  # environment (.venv-NAME) and script (peers/NAME_loop.py) of each, and the methods it has; {x}: x's version
    "PyTorch loop": ("torch", ("fedavg", "ifca")),
    "FedJAX 0.0.17": ("fedjax", ("fedavg", "ifca")),
    "pfl-research 0.6.0": ("pfl", ("fedavg",)),
    "Flower 1.41": ("flower", ("fedavg", "ifca")),
    "CFLA 1.0.4": ("cfla", ("ifca", "flhc")),
    "BlazeFL {blazefl}": ("blazefl", ("fedavg", "ifca")),
}
TOLERANCE, QUICK_TOLERANCE = 0.02, 0.002  # every library shuffles differently; nothing is shuffled in full batches
WARM_STEPS = 20


def load_images() -> tuple[str, dict[str, np.ndarray], dict[str, np.ndarray]]:
    """`(name, train, test)`, images `[n, 28, 28, 1]`."""
    if os.environ.get("JFCL_DATA_DIR"):
        mnist = jfcl.data.load("mnist")
        return "mnist", mnist.train, mnist.test
    digits = jfcl.data.load("digits").train
    x = np.pad(digits["x"].repeat(3, axis=1).repeat(3, axis=2), ((0, 0), (2, 2), (2, 2), (0, 0)))
    order = np.random.default_rng(0).permutation(len(x))
    pick = lambda rows: {"x": x[rows], "y": digits["y"][rows]}  # noqa: E731
    return "digits", pick(order[:1500]), pick(order[1500:])


def write_data(case: dict[str, Any], path: Path) -> str:
    """Writes examples, first models and test examples of a job to `path` (see peers/job.py); returns the data's name.

    Client `i` of a job with `K` clusters is of kind `i % K` and sees its images turned by `360 / K * (i % K)` degrees.
    """
    name, train, test = load_images()
    rng = np.random.default_rng(1)
    n, m, k = case["clients"], case["examples"], case["clusters"]
    rows = rng.permutation(len(train["x"])) if n * m <= len(train["x"]) else rng.integers(0, len(train["x"]), n * m)
    rows = rows[: n * m].reshape(n, m)
    kind = np.arange(n) % k
    turn = lambda x, c: np.rot90(x, 4 * c // k, axes=(1, 2))  # noqa: E731
    x = np.stack([turn(train["x"][rows[i]], kind[i]) for i in range(n)])
    y = train["y"][rows]
    models = first_models(case, x, y)
    layers = {}
    for i, copies in enumerate(zip(*models, strict=True)):
        kernels, biases = zip(*copies, strict=True)
        layers |= {f"kernel_{i}": np.stack(kernels), f"bias_{i}": np.stack(biases)}
    turned = {"test_x": np.stack([turn(test["x"], c) for c in range(k)]), "test_y": np.stack([test["y"]] * k)}
    np.savez(path, x=x, y=y, kind=kind, **turned, **layers)
    return name


def first_models(case: dict[str, Any], x: np.ndarray, y: np.ndarray) -> list[list[tuple[np.ndarray, np.ndarray]]]:
    """The models that all libraries start from, as jfcl.models draws them.

    With several clusters each was first trained for `WARM_STEPS` steps by the first client of its kind: from random
    models, which clusters IFCA finds is a matter of luck, and accuracies could not be compared.
    """
    task = bench.make_task(case["model"])
    params = task.init(jax.random.key(0))
    models = [params]
    if case["clusters"] > 1:

        @jax.jit
        def warm(params, batch):
            def step(_, params):
                grads = jax.grad(lambda p: task.loss(p, batch).mean())(params)
                return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

            return jax.lax.fori_loop(0, WARM_STEPS, step, params)

        models = [warm(params, {"x": x[c], "y": y[c]}) for c in range(case["clusters"])]
    return [[(np.asarray(p[name]["kernel"]), np.asarray(p[name]["bias"])) for name in sorted(p)] for p in models]


def run_job(name: str, case: dict[str, Any], turns: int) -> list[dict[str, Any]]:
    """A row for every library that is set up and has the method."""
    found: dict[str, list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        case = case | {"data": str(Path(folder) / "data.npz")}
        data = write_data(case, Path(case["data"]))
        contenders = {ours: ("jfcl", case | more) for ours, more in OURS.items()}
        contenders |= {peer: (env, case) for peer, (env, methods) in PEERS.items() if case["method"] in methods}
        for turn in range(turns):
            for library, (env, its_case) in contenders.items():
                result = run_peer(env, f"{env}_loop.py", its_case)
                if result is None:
                    if turn == 0:
                        print(f".venv-{env} is not set up (make peers): left out", file=sys.stderr)
                    continue
                library = library.format(**result["versions"])
                found.setdefault(library, []).append(result)
                seconds = statistics.median(result["seconds"][1:])
                said = f"{name}, {library}: {seconds:.3f} s a round, accuracy {result['accuracy']:.4f}"
                print(said, file=sys.stderr, flush=True)
    best = min(statistics.median(later_rounds(found[ours])) for ours in OURS)
    rows = []
    for library, results in found.items():
        seconds = statistics.median(later_rounds(results))
        rows.append(
            {
                "job": name,
                "library": library,
                "data": data,
                "seconds": seconds,
                "ms_a_client_step": 1e3 * seconds / (case["clients"] * case["steps"]),
                "times_ours": seconds / best,
                "first_round": statistics.median(r["seconds"][0] for r in results),
                "accuracy": statistics.mean(r["accuracy"] for r in results),
                "threads": results[-1].get("threads"),
                "versions": results[-1]["versions"],
                "runs": [r["seconds"] for r in results],
                "accuracies": [r["accuracy"] for r in results],
            }
        )
    return rows


def later_rounds(results: list[dict[str, Any]]) -> list[float]:
    """The seconds of all rounds but each turn's first."""
    return [s for r in results for s in r["seconds"][1:]]


def check_agreement(rows: list[dict[str, Any]], tolerance: float) -> None:
    """`ValueError` if the accuracies that the libraries reach in one job differ by more than `tolerance`."""
    for job in {row["job"] for row in rows}:
        reached = {row["library"]: row["accuracy"] for row in rows if row["job"] == job}
        if max(reached.values()) - min(reached.values()) > tolerance:
            raise ValueError(f"{job}: accuracies differ by more than {tolerance}: {reached}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the names of the jobs to run")
    parser.add_argument("--turns", type=int, default=3, metavar="N", help="how often every library runs a job [3]")
    parser.add_argument("--quick", action="store_true", help="small jobs, one turn each; writes nothing")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    settings = {name: {"clusters": 1, "lr": 0.05} | job | (QUICK if args.quick else {}) for name, job in JOBS.items()}
    for name, case in settings.items():
        if args.only in name:
            rows += [{"settings": case} | row for row in run_job(name, case, 1 if args.quick else args.turns)]
    columns = ["job", "library", "data", "seconds", "ms_a_client_step", "times_ours", "first_round", "accuracy"]
    title = "The same job in every library; seconds a round; times ours: of the fastest of ours"
    check_agreement(rows, QUICK_TOLERANCE if args.quick else TOLERANCE)
    name = None if args.quick else "-".join(["against-peers", *args.only.split()])
    report(name, title, columns, rows)


if __name__ == "__main__":
    main()
