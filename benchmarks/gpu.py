"""Rounds on one GPU: ours beside the best PyTorch and plain JAX on the same GPU, the most wanted first.

    make gpu                                          # python benchmarks/gpu.py; at most 8 minutes
    python benchmarks/gpu.py --only cnn --minutes 3   # the rows with "cnn" in their names
    python benchmarks/gpu.py --small                  # tiny shapes, also on a CPU, to see that all of it runs

Ours and plain JAX (peers/jax_plain.py) are measured in this process, PyTorch (peers/torch_gpu.py) in one of its own for
each case: by this Python where it has PyTorch, else in `.venv-torch` (make peers). All begin with the same models, on
random images. `--minutes` is a hard limit: what does not fit is listed as not measured. The JSON file is written again
after every measurement. `times_best_peer` of a row of ours is how often it fits into the best peer's round, without
peers that compute less exactly (`INEXACT`) or more (`MORE`), and without those in bfloat16 (`NARROW`) where ours is
not. A row of ours in bfloat16 has none if no peer was measured in bfloat16.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory on the same GPU

import jax
import jax.numpy as jnp
import numpy as np
from common import ROOT, is_of_another, print_table, results_file
from peers import jax_plain

import jfcl
from jfcl.core import Clients
from jfcl.experiments.bench import Case, make_training, measure
from jfcl.methods.federated_clustering import models_at_once
from jfcl.models import MODELS, ResNet, classification, in_bfloat16
from jfcl.simulation.folder import environment

# The work of a round, and the shape of an example.
MNIST, CIFAR = (28, 28, 1), (32, 32, 3)
CASES: dict[str, tuple[Case, tuple[int, ...]]] = {
    "ifca, mlp": (Case("ifca", "mlp", 1200, 200, None, 10, 4, 0.1), MNIST),
    "fedavg, cnn": (Case("fedavg", "cnn", 100, 600, 100, 6, lr=0.1), MNIST),
    "federated clustering, mlp": (Case("federated clustering", "mlp", 300, 200, 32, 1, lr=0.1), MNIST),
    "fedavg, resnet": (Case("fedavg", "resnet", 20, 250, 50, 5, lr=0.1), CIFAR),
    "cfl, mlp": (Case("cfl", "mlp", 1000, 200, None, 10, lr=0.1), MNIST),
}
SMALL = {
    "ifca, mlp": dict(clients=6, examples=8),
    "fedavg, cnn": dict(clients=3, examples=8, batch=4, steps=3),
    "federated clustering, mlp": dict(clients=8, examples=6, batch=4),
    "fedavg, resnet": dict(clients=2, examples=4, batch=2, steps=2),
    "cfl, mlp": dict(clients=6, examples=8),
}
NETWORKS = {"mlp": MODELS["mlp"][0], "cnn": MODELS["cnn_mnist"][0], "resnet": MODELS["resnet18_gn"][0]}
MAPPINGS = {"default": None, "vmap": jax.vmap, "one at a time": jfcl.chunked(1)}
MAPPINGS |= {f"chunks of {size}": jfcl.chunked(size) for size in (10, 20, 25, 34, 50)}
LIMIT_SECONDS, LIMIT_MB = 10, 60_000  # of the timed rounds of a measurement; of temporaries
PEER_SECONDS = 90  # of one process of PyTorch
GRAPH = "one by one, CUDA graph"
INEXACT = ("TF32 throughout",)  # distances of gradients, which are differences of large numbers
MORE = ("similarities",)
NARROW = ("autocast", "bfloat16")


class Job(NamedTuple):
    """Measurements that are made together.

    Attributes:
      row: a name in `CASES`.
      who: "jfcl", "JAX" or "PyTorch".
      forms: of PyTorch, names that peers/torch_gpu.py reads.
      mapping: of jfcl, a name in `MAPPINGS`.
      bfloat16: of jfcl, the task in bfloat16.
    """

    row: str
    who: str
    forms: tuple[str, ...] = ()
    mapping: str = "default"
    bfloat16: bool = False


JOBS = [
    Job("ifca, mlp", "jfcl"),
    Job("ifca, mlp", "jfcl", bfloat16=True),
    Job(
        "ifca, mlp",
        "PyTorch",
        (
            "bmm",
            "bmm, torch.compile",
            "bmm, torch.compile of all but the products, CUDA graph",
            "bmm, torch.compile, CUDA graph",
            "bmm, torch.compile of all but the products, CUDA graph, bfloat16",
            "bmm, torch.compile, CUDA graph, bfloat16",
        ),
    ),
    Job("ifca, mlp", "JAX"),
    Job("fedavg, cnn", "jfcl"),
    Job("fedavg, cnn", "jfcl", bfloat16=True),
    Job(
        "fedavg, cnn",
        "PyTorch",
        (
            GRAPH,
            f"{GRAPH}, autocast",
            "vmap(grad)",
            "vmap(grad), autocast",
            f"{GRAPH}, torch.compile, autocast",
        ),
    ),
    Job("fedavg, cnn", "jfcl", mapping="chunks of 25"),  # under 1 GB of temporaries
    Job("fedavg, cnn", "jfcl", mapping="chunks of 25", bfloat16=True),
    Job("fedavg, cnn", "jfcl", mapping="chunks of 34"),
    Job("federated clustering, mlp", "jfcl"),
    Job(
        "federated clustering, mlp",
        "PyTorch",
        (
            "bmm, Gram matrix in float32",
            "bmm, CUDA graph, Gram matrix in float32",
            "bmm, CUDA graph, float32 throughout",
            "bmm, CUDA graph, TF32 throughout",
        ),
    ),
    Job("fedavg, resnet", "jfcl", mapping="vmap"),
    Job("fedavg, resnet", "jfcl", mapping="vmap", bfloat16=True),
    Job(
        "fedavg, resnet",
        "PyTorch",
        ("one by one, torch.compile, autocast", "one by one, torch.compile"),
    ),
    # In processes of their own: on PyTorch 2.11 a captured, compiled form ended in an error, and no form after it ran.
    Job("fedavg, resnet", "PyTorch", (GRAPH, f"{GRAPH}, autocast")),
    Job("fedavg, resnet", "PyTorch", (f"{GRAPH}, torch.compile, autocast", f"{GRAPH}, torch.compile")),
    Job("cfl, mlp", "jfcl"),
    Job(
        "cfl, mlp",
        "PyTorch",
        (
            "bmm",
            "bmm, torch.compile of all but the products, CUDA graph",
            "bmm, torch.compile of all but the products, CUDA graph, similarities",
        ),
    ),
    Job("cfl, mlp", "JAX"),
    Job("fedavg, cnn", "JAX"),
    Job("fedavg, cnn", "PyTorch", (f"{GRAPH}, torch.compile",)),
    Job("federated clustering, mlp", "jfcl", mapping="chunks of 20"),
    Job("fedavg, resnet", "jfcl", mapping="one at a time", bfloat16=True),
    Job("fedavg, resnet", "jfcl", mapping="one at a time"),
    Job("fedavg, resnet", "jfcl", mapping="chunks of 10"),
    Job("fedavg, cnn", "jfcl", mapping="chunks of 50"),
    Job("federated clustering, mlp", "JAX"),
    Job("fedavg, resnet", "JAX"),
    Job("ifca, mlp", "PyTorch", ("bmm, torch.compile, max-autotune, CUDA graph",)),
]


def make_task(case: Case, shape: tuple[int, ...], small: bool) -> jfcl.Task:
    module = ResNet(10, width=4, stages=(1, 1)) if small and case.model == "resnet" else NETWORKS[case.model](10)
    return classification(module, shape, 10)


def make_algorithm(case: Case, task: jfcl.Task, mapping: str = "default") -> jfcl.Algorithm:
    make = {
        "ifca": functools.partial(jfcl.ifca, num_clusters=case.clusters),
        "fedavg": jfcl.fedavg,
        "federated clustering": jfcl.federated_clustering,
        "cfl": jfcl.cfl,
    }[case.method]
    return make(task, make_training(case), client_axis=MAPPINGS[mapping])


def make_clients(case: Case, shape: tuple[int, ...]) -> Clients:
    """Random images and labels, on the device."""
    n, m = case.clients, case.examples
    x = jax.random.uniform(jax.random.key(2), (n, m, *shape))
    y = jax.random.randint(jax.random.key(3), (n, m), 0, 10)
    return Clients({"x": x, "y": y}, jnp.full(n, m, jnp.int32))


def first_models(case: Case, params: Any) -> dict[str, jax.Array]:
    """The models of a state by names of parameters, `{"Dense_0/kernel": [K, ...], ...}`, as the peers take them."""
    count = {"ifca": case.clusters, "federated clustering": case.clients}.get(case.method, 1)
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {"/".join(part.key for part in path): leaf[:count] for path, leaf in leaves}


def case_of_torch(case: Case, shape: tuple[int, ...], forms: Sequence[str], rounds: int, **more: Any) -> dict[str, Any]:
    """The case that peers/torch_gpu.py reads; `models`, the path of a file, is among `more`."""
    fields = {name: value for name, value in case._asdict().items() if name not in ("method", "clusters")}
    return fields | {"round": case.method, "shape": shape, "forms": list(forms), "rounds": rounds} | more


def start_torch() -> subprocess.Popen | None:
    """A process that imports PyTorch and waits for its case; None where there is no PyTorch."""
    python = ROOT.parent / ".venv-torch" / "bin" / "python"
    if not python.exists():
        if importlib.util.find_spec("torch") is None:
            return None
        python = Path(sys.executable)
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen([python, ROOT / "peers" / "torch_gpu.py"], **pipes, text=True, start_new_session=True)


def stop(process: subprocess.Popen | None) -> None:
    """Ends a process with those that it started, such as the compilers of torch.compile."""
    if process is not None and process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def ask_torch(process: subprocess.Popen | None, case: dict[str, Any], timeout: float) -> list[dict[str, Any]]:
    """What a process of `start_torch` measured, a dict for each form; one without a result has an `error`."""
    if process is None:
        return [{"form": form, "error": "no PyTorch (make peers)"} for form in case["forms"]]
    try:
        said, why = process.communicate(json.dumps(case) + "\n", timeout=timeout)
    except subprocess.TimeoutExpired:
        stop(process)
        said, why = process.communicate()[0], f"stopped after {timeout:.0f} s"
    why = why.strip() or f"ended with status {process.returncode}, without a result"
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{") and line.endswith("}")]
    found = {line["form"]: line for line in lines}
    return [found.get(form, {"form": form, "error": why[-1000:]}) for form in case["forms"]]


def mapping_name(job: Job, case: Case, params: Any) -> str:
    if job.mapping != "default":
        return job.mapping
    axis = jfcl.mapping.auto()
    if case.method == "federated clustering":
        model = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
        axis = models_at_once(model, None)
    size = axis.size if isinstance(axis, jfcl.chunked) else None
    return "default: " + {None: "vmap", 1: "one at a time"}.get(size, f"chunks of {size}")


def run(job: Job, case: Case, shape: tuple[int, ...], small: bool, rounds: int, torch, left: float) -> list[dict]:
    """The rows of a job, of which `torch` is the process of PyTorch."""
    task = make_task(case, shape, small)
    if job.bfloat16:
        task = in_bfloat16(task)
    if job.who == "PyTorch":
        few = make_clients(case._replace(examples=1), shape)
        models = first_models(case, jax.jit(make_algorithm(case, task).init)(jax.random.key(0), few).params)
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/models.npz"
            np.savez(path, **{name: np.asarray(p) for name, p in models.items()})
            del models, few
            gc.collect()
            found = ask_torch(torch, case_of_torch(case, shape, job.forms, rounds, models=path), left)
        return [{"what": f"PyTorch, {line.pop('form')}"} | in_ms(line) for line in found]
    clients = make_clients(case, shape)
    state = jax.jit(make_algorithm(case, task).init)(jax.random.key(0), clients)
    if job.who == "JAX":
        models = first_models(case, state.params)
        step = jax_plain.ROUNDS[case.method](case)
        found = measure(step, jax.random.key(1), models, *clients.examples.values(), **limits(rounds))
        return [{"what": "JAX, vmap(grad)"} | in_ms(found)]
    step = make_algorithm(case, task, job.mapping).step
    found = measure(step, jax.random.key(1), state, clients, **limits(rounds))
    what = "jfcl" + (", bfloat16" if job.bfloat16 else "")
    return [{"what": what, "mapping": mapping_name(job, case, state.params)} | in_ms(found)]


def limits(rounds: int) -> dict[str, Any]:
    return {"repeats": rounds, "limit_seconds": LIMIT_SECONDS, "limit_mb": LIMIT_MB}


def in_ms(found: dict[str, Any]) -> dict[str, Any]:
    """A measurement with the median of its `seconds` as `ms`, and temporaries in GB."""
    seconds, temporary = found.pop("seconds", None), found.pop("temporary_mb", None)
    row = {"ms": 1e3 * statistics.median(seconds), "runs_ms": [1e3 * s for s in seconds]} if seconds else {}
    if temporary is not None:
        row["temporaries_gb"] = temporary / 1e3
        if not row:
            row["error"] = "not run: too large"
    return row | found


def add_ratios(rows: list[dict[str, Any]]) -> None:
    """Adds `best_peer` and `times_best_peer` to the rows of ours."""
    for row in rows:
        narrow = "bfloat16" in row["what"]
        peers = [
            other
            for other in rows
            if other["row"] == row["row"]
            and not other["what"].startswith("jfcl")
            and "ms" in other
            and not any(word in other["what"] for word in (*INEXACT, *MORE, *(() if narrow else NARROW)))
        ]
        alike = not narrow or any(word in other["what"] for other in peers for word in NARROW)
        if row["what"].startswith("jfcl") and "ms" in row and peers and alike:
            best = min(peers, key=lambda other: other["ms"])
            row |= {"best_peer": best["what"], "best_peer_ms": best["ms"], "times_best_peer": best["ms"] / row["ms"]}


def show(rows: list[dict[str, Any]], missing: list[str]) -> None:
    columns = ["row", "what", "mapping", "ms", "times_best_peer", "compile_seconds", "temporaries_gb"]
    print_table("One round on one GPU, medians", columns, rows, width=150)
    for row in rows:
        if "error" in row:
            print(f"{row['row']}, {row['what']}: {row['error'].strip().splitlines()[-1][:200]}")
    if missing:
        print(f"not measured: {'; '.join(missing)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8, help="a hard limit [8]")
    parser.add_argument("--only", default="", help="part of the names of the rows to measure")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each measurement [7]")
    parser.add_argument("--small", action="store_true", help="tiny shapes, on a CPU too; without torch.compile there")
    parser.add_argument(
        "--out", type=Path, help="JSON file; default: benchmarks/results/gpu-DEVICE.json; with --small none"
    )
    args = parser.parse_args()
    began = time.monotonic()
    place = environment()
    if jax.default_backend() != "gpu" and not args.small:
        parser.error(f"the device is {place['device']}: this needs a GPU, or --small")
    out, command = args.out, " ".join(["python", *sys.argv])
    if out is None and not args.small:
        name = "-".join(["gpu", *args.only.replace(",", "").split()])
        out = results_file(name)
        out = results_file(f"{name}-partial") if is_of_another(out, command) else out
    rows: list[dict[str, Any]] = []
    jobs = [job for job in JOBS if args.only in job.row]
    if not jobs:
        parser.error(f"--only must be part of one of {'; '.join(CASES)}, got {args.only!r}")
    if args.small:
        jobs = [job._replace(forms=tuple(f for f in job.forms if "torch.compile" not in f)) for job in jobs]
        jobs = [job for job in jobs if job.who != "PyTorch" or job.forms]
    waiting = list(jobs)
    lock = threading.Lock()
    torch: subprocess.Popen | None = None

    def missing() -> list[str]:
        return [
            ", ".join((job.row, *job[1:2], *(job.forms or (job.mapping, *["bfloat16"] * job.bfloat16))))
            for job in waiting
        ]

    def write() -> None:
        if out is None:
            return
        add_ratios(rows)
        order = sorted(rows, key=lambda row: list(CASES).index(row["row"]))
        found = {"command": command, **place, "seconds": time.monotonic() - began}
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_suffix(".part")
        part.write_text(json.dumps(found | {"rows": order, "not_measured": missing()}, indent=1) + "\n")
        part.replace(out)

    def end() -> None:
        """At the limit, wherever the script is: a compilation cannot be interrupted otherwise."""
        with lock:
            stop(torch)
            write()
            add_ratios(rows)
            show(rows, missing())
            sys.stdout.flush()
            os._exit(0)

    limit = threading.Timer(60 * args.minutes - (time.monotonic() - began), end)
    limit.daemon = True
    limit.start()
    while waiting:
        job = waiting[0]
        if torch is None and any(other.who == "PyTorch" for other in waiting):
            torch = start_torch()  # imports while ours is measured
        case, shape = CASES[job.row]
        if args.small:
            case, shape = case._replace(**SMALL[job.row]), (8, 8, 3) if shape == CIFAR else shape
        left = 60 * args.minutes - (time.monotonic() - began) - 5
        try:
            found = run(job, case, shape, args.small, args.rounds, torch, min(max(left, 1.0), PEER_SECONDS))
        except Exception as error:  # the others go on
            found = [{"what": f"{job.who}, {job.mapping}", "error": f"{type(error).__name__}: {error}"[-1000:]}]
        if job.who == "PyTorch":
            stop(torch)
            torch = None
        jax.clear_caches()
        gc.collect()
        with lock:
            rows += [{"row": job.row} | row | {"settings": case._asdict()} for row in found]
            waiting.pop(0)
            write()
        for row in found:
            said = row.get("error", "").strip()[-150:] or f"{row['ms']:.1f} ms"
            print(f"{time.monotonic() - began:.0f} s: {job.row}, {row['what']}: {said}", file=sys.stderr, flush=True)
    limit.cancel()
    stop(torch)
    add_ratios(rows)
    show(sorted(rows, key=lambda row: list(CASES).index(row["row"])), [])
    if out is not None:
        print(f"written: {out}")


if __name__ == "__main__":
    main()
