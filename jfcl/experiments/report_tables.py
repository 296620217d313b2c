"""Parts of `jfcl report` that are tables and lists of one run: clients, seeds, options, commands."""

from __future__ import annotations

import shlex
from typing import Any

import numpy as np

from jfcl.core import shown
from jfcl.experiments import html_page as html
from jfcl.experiments.comparison import OF_CLUSTERS, compares_clusters, is_configured, number
from jfcl.experiments.config import Config, to_saved
from jfcl.experiments.own import is_own
from jfcl.experiments.partial import PartialRun, first_seed, planned_rounds
from jfcl.experiments.used import as_used
from jfcl.simulation.loop import ALL_DONE

WORST = 10  # clients in the table of the worst


def worst_clients(run: PartialRun, label: str) -> str:
    """Returns the table of the clients of lowest accuracy, or of highest loss where no accuracy is known."""
    clients = run.clients
    by = next((n for n in ("accuracy", "loss") if n in clients and np.isfinite(clients[n]).any()), None)
    if by is None:
        return ""
    # Over the seeds of each client.
    is_known = np.isfinite(clients[by])
    ids, of = np.unique(clients["client"][is_known], return_inverse=True)
    values = clients[by][is_known]
    mean = np.bincount(of, values) / np.bincount(of)
    low, high = np.full(len(ids), np.inf), np.full(len(ids), -np.inf)
    np.minimum.at(low, of, values)
    np.maximum.at(high, of, values)
    sign, scale, digits = (1, 100, 1) if by == "accuracy" else (-1, 1, 3)
    worst = np.lexsort((ids, sign * mean))[:WORST]
    # A row for each.
    first, seeds, rows = first_seed(clients), len(np.unique(clients["seed"])), []
    columns = {"examples": "training examples", "true_cluster": "true cluster", "cluster": "cluster"}
    columns = {name: head for name, head in columns.items() if name in clients}
    for i in worst:
        about = [int(first[name][first["client"] == ids[i]][0]) for name in columns]
        over = [mean[i], low[i], high[i]] if seeds > 1 else [mean[i]]
        rows.append([ids[i], *about, *(number(scale * float(value), None, digits) for value in over)])
    unit = "accuracy %" if by == "accuracy" else "loss"
    heads = ["client", *columns.values()]
    heads += [f"mean {unit}", "lowest seed", "highest seed"] if seeds > 1 else [unit]
    caption = f"The {len(worst)} worst of {len(ids)} clients with test examples, by their {unit.split()[0]} on these."
    caption += f" The cluster is that of seed {first['seed'][0]}."
    return html.table(f"{label}worst", heads, rows, caption)


def seeds(run: PartialRun, label: str) -> str:
    """Returns the table of the results by seed, for several."""
    names = {"accuracy": (100, 1), "worst_client_accuracy": (100, 1), "perplexity": (1, 1), "loss": (1, 3)}
    names |= {"cluster_accuracy": (100, 1), "adjusted_rand": (1, 2), "clusters_in_use": (1, 0)}
    per_seed = run.summary["per_seed"]
    names = {n: style for n, style in names.items() if any(row.get(n) is not None for row in per_seed)}
    if len(per_seed) < 2:
        return ""
    recovers = compares_clusters(run.summary)
    names = {n: style for n, style in names.items() if recovers or n not in OF_CLUSTERS}
    heads = [n.replace("_", " ") + (" %" if scale == 100 else "") for n, (scale, _) in names.items()]
    rows = []
    for row in per_seed:
        cells = [number(None if row.get(n) is None else s * row[n], None, d) for n, (s, d) in names.items()]
        found = row.get("rounds_to_recovery")
        rows.append([row["seed"], *cells, *(["–" if found is None else found] if recovers else [])])
    return html.table(f"{label}seeds", ["seed", *heads, *(["found at round"] if recovers else [])], rows)


def used_config(run: PartialRun) -> dict[str, Any]:
    """Returns the options of a run with the values that it used, as far as they are known."""
    return as_used(run.config, str(run.folder / "config.json"))


def options(run: PartialRun, label: str) -> list[str]:
    """Returns the options of a run, those that differ from the default in bold, and the versions."""
    configured, left_out = is_configured(run.config), ("versions", "split_hash", "key")
    imported = configured and is_own(run.config["method"])  # not for a report: its own options are saved where given
    default = to_saved(Config("" if imported else run.config["method"]), "") if configured else run.config
    used = used_config(run)
    values = [
        ("rounds" if name == "num_rounds" else name, _shown(used[name]), value != default.get(name))
        for name, value in run.config.items()
        if name not in left_out
    ]
    versions = run.summary.get("versions") or run.config.get("versions")
    parts = [html.options(f"{label}options", values)] if values else []
    if configured:
        about = "Bold: not the default of the method. A dash: no effect, or the data or the devices decide."
        parts.append(html.element("p", about, _class="soft"))
    if isinstance(versions, dict):
        text = ", ".join(f"{name} {version}" for name, version in versions.items())
        text += f"; split of the data {run.config['split_hash']}" if run.config.get("split_hash") else ""
        parts.append(html.element("p", f"Versions: {text}.", id=f"{label}versions"))
    return parts


def _shown(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else shown(value)


def commands(run: PartialRun) -> list[str]:
    """Returns the commands that continue or repeat a run."""
    folder = shlex.quote(str(run.folder))
    base = f"jfcl run --config {shlex.quote(str(run.folder / 'config.json'))}"
    planned, done = planned_rounds(run), run.summary["num_rounds"]
    if not is_configured(run.config):
        text = "To resume it, call jfcl.simulate with the same arguments, out and resume=True." if run.config else ""
        return [html.element("p", text)] if text else []
    again = ["# repeat it in another folder", f"{base} --out {shlex.quote(f'{run.folder}-2')}"]
    if run.is_finished:
        more, where = [], ""
        # A run that ended early ends there again, and a schedule cannot be extended.
        if planned == done and run.config.get("schedule_rounds") is None:
            twice = 2 * run.config["num_rounds"]
            more = ["# continue for as many rounds again", f"{base} --out {folder} --resume --rounds {twice}"]
        elif planned > done and run.summary.get("ended") == ALL_DONE:  # it was resumed for fewer rounds
            more = [f"# continue to round {planned}", f"{base} --out {folder} --resume"]
    else:
        more = ["# continue where it stopped", f"{base} --out {folder} --resume"]
        at = f"round {run.checkpoints[0]}" if run.checkpoints else "the beginning: there is no checkpoint yet"
        where = html.element("p", f"--resume continues from {at}.")
    local = run.config.get("dataset") == "digits"
    data = "" if local else html.element("p", "Add --data-dir unless JFCL_DATA_DIR is the folder of the data.")
    return [html.commands([*more, *again]), where, data]
