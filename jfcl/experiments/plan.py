"""`jfcl plan`: the run of a `Config`, compiled for an absent accelerator."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import jax

from jfcl import mapping
from jfcl.core import Clients, check, client_shapes, files, max_examples, num_bytes, require
from jfcl.core.names import renamed
from jfcl.data.heterogeneity import VARIANTS
from jfcl.experiments import lookup, setups
from jfcl.experiments.config import Config
from jfcl.experiments.options import PRECISIONS
from jfcl.planning import targets
from jfcl.planning.plan import Plan, plan
from jfcl.simulation.folder import finite_or_none

FILES = ("plan.json", "step.hlo.txt", "init.hlo.txt")
REFUSED = {  # options of a run, and what a plan accepts instead
    **dict.fromkeys(("population", "store"), "left out: plan a cohort, as --clients"),
    "devices": "left out: the target has its own",
}


def plan_run(
    config: Config,
    target: str | None,
    *,
    data_dir: str | None = None,
    out: str | None = None,
    tick: Callable[[str, int], None] | None = None,
) -> Plan:
    """Returns the plan of a run on `target`.

    The data are divided among the clients, which shows the numbers of examples, but those of a few clients of every
    cluster alone, and of newcomers, are stacked and transformed.

    Args:
      config: the options of the run.
      target: a chip, or several, as in `jfcl.plan`.
      data_dir: folder of official data files; default: $JFCL_DATA_DIR, else TFDS.
      out: folder for the plan and its programs; default: none are kept. Those of an earlier plan are replaced.
      tick: as in `jfcl.plan`.

    Raises:
      ValueError: what `run` and `jfcl.plan` refuse; a population; a mapping that a target has not.
    """
    require(target is not None, "Give a target, such as --target v5e:2x4 or --target h100.")
    chosen = targets.target(target)
    for name, accepted in REFUSED.items():
        check(getattr(config, name) is None, name, getattr(config, name), accepted)
    check(config.mapping != "pmap", "mapping", config.mapping, "vmap, chunked, sharded or auto")
    targets.mesh(chosen)  # refuses a compiler that is not there before data are read
    dataset = setups.load_dataset(config, data_dir)
    some = config.clusters * max(VARIANTS.values())  # clients of every kind: inputs of some are no bytes
    federation = setups.make_federation(config, dataset, lambda count: slice(0, min(some, count)))
    if not lookup.is_on_data(config.attack):  # which may leave others
        federation = setups.in_bytes(config, federation)
    task = setups.make_task(config, federation, target="tpu" if chosen.chip.is_tpu else "gpu")
    training = setups.make_training(config, max_examples(federation.train))
    both = federation.train, federation.test
    clients, tests = (client_shapes(Clients(part.examples, part.size), config.clients) for part in both)
    evaluated = (tests, federation.newcomers, None if federation.drift is None else tests)  # and those of the next step
    inner = {"vmap": [jax.vmap]}.get(config.mapping)
    with jax.default_matmul_precision(PRECISIONS[config.precision]), renamed(setups.names_of_method(config)):
        planned = plan(
            partial(setups.make_algorithm, config, task, training, federation),
            clients,
            target=target,
            inner=inner if config.chunk is None else [mapping.chunked(config.chunk)],
            other_bytes=num_bytes(evaluated) / chosen.count,
            seeds=config.seeds,
            name=f"{config.method} with model {config.model!r}",
            tick=tick,
        )
    if out is not None:
        content = {"method": config.method, "model": config.model, "num_rounds": config.rounds, "predicted": True}
        content |= {"seconds": planned.seconds(config.rounds), "config": dict(config.values)}
        plan_json = files.json_bytes(finite_or_none(content | planned.as_dict()))
        contents = (plan_json, planned.step_hlo.encode(), planned.init_hlo.encode())
        Path(out).mkdir(parents=True, exist_ok=True)
        files.replace_together(Path(out), dict(zip(FILES, contents, strict=True)))
    return planned
