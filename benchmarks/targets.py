"""Rounds compiled for TPUs and GPUs that are not here: memory, communication, and predicted seconds.

    python benchmarks/targets.py                                    # all cases and targets; some two hours of 2 cores
    python benchmarks/targets.py --cases ifca-mlp cfl --targets h100
    python benchmarks/targets.py --here                             # on this machine's GPU: predicted and measured

Needs the compilers (docs/plan.md). Nothing is run: memory and collectives are facts of the compiled programs, seconds
are predictions of `jfcl.planning.cost`. A case that the results hold already is compiled again only with `--again`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from common import RESULTS, kept_rows, print_table, report
from matplotlib.figure import Figure

import jfcl
from jfcl.core import Clients
from jfcl.planning import targets
from jfcl.planning.cost import price
from jfcl.planning.plan import candidates
from jfcl.simulation.folder import environment

TARGETS = ("v5e:1x1", "v5e:2x2", "v5e:4x4", "v6e:2x2", "h100")
FILE = RESULTS / "targets.json"
PICTURE = RESULTS / "targets.png"
COLUMNS = ["case", "target", "mapping", "ms", "mfu", "temporaries_gb", "collectives", "sent_mb", "steps"]
SCALING = ("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4")


class Case(NamedTuple):
    """A round of a method.

    Attributes:
      make: `(task, training, client_axis) -> Algorithm`.
      model: a flax module.
      clients, examples: `N` and `M`, of 28 x 28 pixels.
      steps, batch: of local training; None is the full batch.
    """

    make: Callable[..., Any]
    model: Any
    clients: int
    examples: int
    steps: int
    batch: int | None = None


MLP, WIDE = jfcl.models.MLP(10), jfcl.models.MLP(10, hidden=(2048,))
CNN = jfcl.models.CNNMnist(10)
CASES = {
    "fedavg-mlp": Case(jfcl.fedavg, MLP, 1200, 200, 10),
    "ifca-mlp": Case(partial(jfcl.ifca, num_clusters=4), MLP, 1200, 200, 10),
    "cfl": Case(jfcl.cfl, MLP, 1000, 200, 10),
    "federated-clustering": Case(jfcl.federated_clustering, MLP, 300, 200, 1, 32),
    "momentum-clustering": Case(partial(jfcl.momentum_clustering, num_clusters=4, quantile=0.25), MLP, 300, 200, 1),
    "fedavg-cnn": Case(jfcl.fedavg, CNN, 100, 600, 6, 100),
    "fedavg-mlp-2048": Case(jfcl.fedavg, WIDE, 1000, 200, 10),
}


def shapes(case: Case) -> Clients:
    n, m = case.clients, case.examples
    examples = {"x": jax.ShapeDtypeStruct((n, m, 28, 28, 1), np.float32), "y": jax.ShapeDtypeStruct((n, m), np.int32)}
    return Clients(examples, jax.ShapeDtypeStruct((n,), np.int32))


def planned(name: str, target: str) -> list[dict[str, Any]]:
    """The rows of one case: of its rarest branches, and without them where that is less."""
    case = CASES[name]
    task = jfcl.models.classification(case.model, (28, 28, 1), 10)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=case.steps, batch_size=case.batch)
    began = time.perf_counter()
    plan = jfcl.plan(lambda axis: case.make(task, training, client_axis=axis), shapes(case), target=target)
    row = {
        "case": name,
        "target": target,
        "mapping": plan.mapping if plan.chunk is None else f"chunked({plan.chunk})",
        "fits": plan.fits,
        "needed_gb": plan.needed_bytes / 1e9,
        "temporaries_gb": plan.temp_bytes / 1e9,
        "compile_seconds": time.perf_counter() - began,
    }
    if plan.cost is None:
        return [row]
    rows = []
    for rare in (True, False):
        cost = plan.cost if rare else plan.common
        if rare or cost.seconds < 0.95 * plan.cost.seconds:
            rows.append(
                row
                | {
                    "case": name if rare else f"{name}, no rare branch",
                    "ms": 1000 * cost.seconds,
                    "mfu": cost.mfu,
                    "collectives": float(sum(count for count, _ in cost.collectives.values())),
                    "sent_mb": sum(size for _, size in cost.collectives.values()) / 1e6,
                    "steps": float(cost.sequential_steps),
                    "parts": dict(list(cost.parts.items())[:6]),
                }
            )
    return rows


def measured(name: str, chip: str, largest: int | None, rounds: int = 10) -> list[dict[str, Any]]:
    """The rows of one case on this machine's devices: rounds of each mapping, beside predictions for `chip`.

    The mappings are those that a plan compares, or `vmap` and the `largest` chunks among them.
    """
    case = CASES[name]
    rng = np.random.default_rng(0)
    examples = {
        "x": rng.standard_normal((case.clients, case.examples, 28, 28, 1), np.float32),
        "y": rng.integers(0, 10, (case.clients, case.examples)).astype(np.int32),
    }
    clients = Clients(examples, np.full(case.clients, case.examples, np.int32))
    task = jfcl.models.classification(case.model, (28, 28, 1), 10)
    training = jfcl.local_training(optax.sgd(0.1), num_steps=case.steps, batch_size=case.batch)
    mesh = jfcl.client_mesh()
    rows = []
    every, *chunks = candidates(case.clients, mesh.size)
    for inner in [every, *(chunks if largest is None else chunks[::-1][:largest])]:
        axis = jfcl.sharded(mesh, inner)
        algorithm, placed = case.make(task, training, client_axis=axis), jfcl.mapping.place(axis, clients)
        state = jax.jit(algorithm.init)(jax.random.key(0), placed)
        began = time.perf_counter()
        try:
            step = jax.jit(algorithm.step, donate_argnums=1).lower(jax.random.key(1), state, placed).compile()
            compiled = time.perf_counter()
            seconds = []
            for t in range(rounds + 1):
                started = time.perf_counter()
                state, _ = jax.block_until_ready(step(jax.random.key(t), state, placed))
                seconds.append(time.perf_counter() - started)
        except jax.errors.JaxRuntimeError as error:  # too little memory for this mapping
            print(f"{name}, {inner}: {str(error).splitlines()[0][:200]}")
            continue
        most, least = (price(step.as_text(), targets.target(chip), rare=rare).seconds for rare in (True, False))
        row = {
            "case": name,
            "target": chip,
            "mapping": f"chunked({inner.size})" if isinstance(inner, jfcl.chunked) else "vmap",
            "ms": 1000 * most,
            "ms_no_rare_branch": 1000 * least,
            "measured_ms": 1000 * float(np.median(seconds[1:])),
            "compile_seconds": compiled - began,
        }
        rows.append(row | {"predicted_of_measured": row["ms_no_rare_branch"] / row["measured_ms"]})
    return rows


def picture(rows: list[dict[str, Any]]) -> Figure:
    """Milliseconds of a round by case, a bar for each target, on a logarithmic axis; pale: with its rarest branches."""
    cases = [name for name in CASES if any(row["case"] == name for row in rows)]
    shown = [t for t in TARGETS if any(row["target"] == t for row in rows)]
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    axes = figure.subplots()
    width = 0.8 / max(len(shown), 1)
    for i, target in enumerate(shown):
        found = {row["case"]: row.get("ms") for row in rows if row["target"] == target and row["fits"]}
        at = [k + (i - (len(shown) - 1) / 2) * width for k in range(len(cases))]
        rarest = [found.get(name) or np.nan for name in cases]
        usual = [found.get(f"{name}, no rare branch") or rare for name, rare in zip(cases, rarest, strict=True)]
        axes.bar(at, rarest, width, color=f"C{i}", alpha=0.35)
        axes.bar(at, usual, width, color=f"C{i}", label=target)
    axes.set_xticks(range(len(cases)), cases, rotation=20, ha="right")
    axes.set(
        yscale="log",
        ylabel="ms a round, predicted",
        title="One round on accelerators that are not here; pale: with its rarest branches",
    )
    axes.margins(y=0.15)  # room for the legend
    axes.legend(ncols=len(shown), fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--targets", nargs="+", default=list(TARGETS))
    parser.add_argument("--scaling", action="store_true", help="IFCA's round on 1, 4, 8 and 16 chips, too")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--here", action="store_true", help="run on the GPUs of this machine")
    parser.add_argument("--largest", type=int, help="with --here, vmap and so many of the largest chunks; default: all")
    parser.add_argument("--chip", help="whose figures predict with --here; default: those of this machine's GPU")
    args = parser.parse_args()
    if args.here:
        kind = jax.devices()[0].device_kind.lower()
        chip = args.chip or next((name for name in targets.CHIPS if name in kind), None)
        if chip is None:
            parser.error(f"no figures of {kind!r}; give --chip, one of {', '.join(targets.CHIPS)}")
        rows = []
        columns = ["case", "target", "mapping", "ms", "ms_no_rare_branch", "measured_ms", "predicted_of_measured"]
        name = "-".join(["measured", *([] if args.cases == list(CASES) else args.cases)])  # a part never over the whole
        for case in args.cases:
            rows += measured(case, chip, args.largest)
            report(name, f"rounds on {kind}", [*columns, "compile_seconds"], rows, partial=case != args.cases[-1])
        return
    targets.only_compile()
    rows = kept_rows(json.loads(FILE.read_text())) if FILE.exists() else []
    jobs = [(name, target) for name in args.cases for target in args.targets]
    jobs += [("ifca-mlp", target) for target in SCALING] if args.scaling else []
    for name, target in dict.fromkeys(jobs):
        done = [row for row in rows if row["case"].split(",")[0] == name and row["target"] == target]
        if done and not args.again:
            continue
        rows = [row for row in rows if row not in done] + planned(name, target)
        rows.sort(key=lambda row: (list(CASES).index(row["case"].split(",")[0]), row["case"], row["target"]))
        versions = environment()["versions"]
        kept = {"command": "python benchmarks/targets.py --scaling", "predicted": True, "versions": versions}
        FILE.write_text(json.dumps(kept | {"rows": rows}, indent=1) + "\n")
    print_table("rounds compiled for accelerators (seconds are predictions)", COLUMNS, rows, width=140)
    picture(rows).savefig(PICTURE, dpi=120)


if __name__ == "__main__":
    main()
