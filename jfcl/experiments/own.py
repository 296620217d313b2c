"""Methods, models, data sets, attacks and aggregators by name: those of the library, and a user's own as `MODULE:NAME`.

A module is imported as `python -m` does: the current folder comes first.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn

from jfcl import data, kernels
from jfcl.analysis import metrics
from jfcl.analysis.metrics import Metric
from jfcl.core import check, check_choice
from jfcl.core.options import first_sentence
from jfcl.data.dataset import normalised
from jfcl.data.tables import is_file, read_file
from jfcl.methods import METHODS, Method
from jfcl.models import MODELS
from jfcl.robust.aggregate import taken_arguments
from jfcl.robust.attacks import DATA_ATTACKS, UPDATE_ATTACKS, DataAttack, UpdateAttack
from jfcl.simulation.evaluation import check_further

FORM = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
ALWAYS_GIVEN = ("client_axis", "num_clusters", "cluster")  # to factories that take them
OF_ATTACKS = {"updates": ["key", "updates", "malicious", "usable"], "data": ["rng", "x", "y", "num_classes"]}
METRICS = {metric.__name__: metric for metric in (metrics.macro_f1, metrics.auc, metrics.calibration_error)}
OF_AGGREGATORS = ("num_malicious", "radius", "bucket_size", "key")  # given to those that take them


class Named(NamedTuple):
    """The names in `choices`, and those of the form `MODULE:NAME`; `find` raises `ValueError` for others."""

    choices: Collection[str]
    find: Callable[[str], Any]

    def check(self, name: str, value: str) -> None:
        """Raises `ValueError` for a name of nothing, or of something that does not fit."""
        self.find(value)


def is_own(name: Any) -> bool:
    """Returns whether a name has the form `MODULE:NAME`.

    Example:
      >>> is_own("my_method:server_momentum"), is_own("ifca"), is_own("mnist:3.0.1")
      (True, False, False)
    """
    return isinstance(name, str) and FORM.fullmatch(name) is not None


def find_method(name: str) -> Method:
    """Returns the method of a name in `jfcl.methods.METHODS`, or of `MODULE:FACTORY`, which is imported.

    Raises:
      ValueError: an unknown name; a module that cannot be imported, with its error; a factory of another form than
        `(task, training, *, client_axis, ...)`, or with an argument that nothing gives.

    Example:
      >>> find_method("jfcl.methods.ditto:ditto").make is find_method("ditto").make
      True
      >>> find_method("ifac")
      Traceback (most recent call last):
      ValueError: unknown method 'ifac': did you mean 'ifca'? Accepted: ..., or MODULE:FACTORY for one of your own
    """
    if name in METHODS:
        return METHODS[name]
    return _read_method(name, _find("method", name, METHODS, "MODULE:FACTORY"))


def find_model(name: str) -> Callable[[int], Any]:
    """Returns the function from a number of outputs to the model of a name in `MODELS`, or of `MODULE:NAME`.

    Raises:
      ValueError: an unknown name; a module that cannot be imported; no class or function of the number of outputs.

    Example:
      >>> find_model("jfcl.models:MLP")(10), find_model("mlp")(10) == find_model("jfcl.models:MLP")(10)
      (MLP(
          # attributes
          num_outputs = 10
          hidden = (200,)
      ), True)
    """
    if name in MODELS:
        return MODELS[name][0]
    make = _find("model", name, MODELS)
    accepted = "the name of a class or function of the number of outputs, such as a flax module with num_outputs"
    nnx = sys.modules.get("flax.nnx")  # takes long to import, and without it no class is derived from its own
    if nnx is not None and inspect.isclass(make) and issubclass(make, nnx.Module):
        return lambda num_outputs: partial(make, num_outputs)  # a function of rngs
    if inspect.isclass(make) and issubclass(make, nn.Module):
        taken = [f.name for f in dataclasses.fields(make) if f.init and f.name not in ("parent", "name")]
        check(taken, "model", name, accepted)
    _check_takes("model", name, make, (10,), accepted)
    return make


def find_metrics(names: str) -> dict[str, Metric]:
    """Returns the functions of outputs of names in `METRICS` and of `MODULE:NAME`, apart by commas, by their last part.

    Raises:
      ValueError: an unknown name, or one twice; a module that cannot be imported; no function of three arguments.

    Example:
      >>> list(find_metrics("macro_f1,jfcl.metrics:auc"))
      ['macro_f1', 'auc']
    """
    found: dict[str, Metric] = {}
    for name in map(str.strip, names.split(",")):
        metric = METRICS[name] if name in METRICS else _find("metric", name, METRICS)
        _check_takes("metrics", name, metric, (None, None, None), "a function of (outputs, batch, real)")
        short = name.rpartition(":")[2]
        check(short not in found, "metrics", name, "names that differ in their last part")
        found[short] = metric
    check_further(found)
    return found


def table_defaults(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that a table decides, unless they are given: its clients are those of the column `by`.

    They are the values in the column that have two examples or more.

    Raises:
      ValueError: a file that cannot be read, or without the column.
    """
    if not is_file(given.get("dataset")):
        return {}
    apart = any(given.get(name) is not None for name in ("population", "store"))
    if apart or given.get("by") is None or given.get("partition", "writer") != "writer":
        return {"heterogeneity": "none"}
    found = {"heterogeneity": "none", "partition": "writer"}
    if given.get("clients") is None:
        file = Path(given["dataset"])
        changed = file.stat().st_mtime_ns if file.is_file() else None
        found["clients"] = _num_users(str(file), given["by"], changed)
        found["clusters"] = min(4, found["clients"])  # the number of models
    return found


@functools.lru_cache(maxsize=8)
def _num_users(file: str, by: str, changed: int | None) -> int:
    """Returns how many values of a column occur twice or more in a table's file, at least 1; `changed` is its time."""
    frame = read_file(file, "dataset", by)
    check_choice("column for by", by, list(frame.columns))
    return max(int((frame[by].value_counts() > 1).sum()), 1)


def dataset_of(config: Any, data_dir: str | None) -> data.Dataset:
    """Returns the data set of a `Config`: a table, of which numbers are scaled, or one that `find_dataset` finds."""
    if not is_file(config.dataset):
        return find_dataset(config.dataset, data_dir)
    x = None if config.inputs is None else [column.strip() for column in config.inputs.split(",")]
    options = {"by": config.by, "x": x, "y": config.target, "kind": config.kind, "scale": True}
    return data.from_frame(config.dataset, **options, name=Path(config.dataset).name)


def find_dataset(name: str, data_dir: str | None) -> data.Dataset:
    """Returns the data set of a name that `jfcl.data.load` knows, or the one that `MODULE:FUNCTION` returns.

    Raises:
      ValueError: what `jfcl.data.load` refuses; a module that cannot be imported; a function with arguments, or of
        something else.

    Example:
      >>> find_dataset("digits", None).num_classes
      10
    """
    if not is_own(name):
        return data.load(name, data_dir=data_dir)
    make, accepted = _find("dataset", name), "the name of a function without arguments that returns a jfcl.data.Dataset"
    _check_takes("dataset", name, make, (), accepted)
    found = make()
    check(isinstance(found, data.Dataset), "dataset", name, f"{accepted}; it returns {type(found).__name__}")
    return normalised(found, texts=True)


def find_attack(name: str) -> UpdateAttack | DataAttack:
    """Returns the attack of a name in `UPDATE_ATTACKS` or `DATA_ATTACKS`, or of `MODULE:NAME`.

    Raises:
      ValueError: an unknown name; a module that cannot be imported; no function of the arguments of an attack.

    Example:
      >>> find_attack("label_reverse") is find_attack("jfcl.robust.attacks:label_reverse")
      True
    """
    if name in UPDATE_ATTACKS:
        return UPDATE_ATTACKS[name]()
    if name in DATA_ATTACKS:
        return DATA_ATTACKS[name]
    attack = _find("attack", name, (*UPDATE_ATTACKS, *DATA_ATTACKS))
    accepted = (
        "the name of a function with the arguments (key, updates, malicious, usable), or (rng, x, y, num_classes)"
    )
    accepted += " for an attack on data"
    given = _signature("attack", name, attack, accepted)
    check(_first_four(given) in OF_ATTACKS.values(), "attack", f"{name}{given}", accepted)
    _check_takes("attack", name, attack, (None,) * 4, accepted, taken_arguments(attack, cluster=None, ids=None))
    return attack


def _first_four(signature: inspect.Signature) -> list[str]:
    """Returns the names of the first four positional arguments."""
    parameters = signature.parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:4]


def is_on_data(attack: str | None) -> bool:
    """Returns whether an attack changes examples, by the names of its arguments.

    Example:
      >>> is_on_data("backdoor"), is_on_data("ipm"), is_on_data(None)
      (True, False, False)
    """
    if not is_own(attack):
        return attack in DATA_ATTACKS
    return _first_four(inspect.signature(find_attack(attack))) == OF_ATTACKS["data"]


def is_on_updates(attack: str | None) -> bool:
    """Returns whether an attack changes updates."""
    return attack is not None and not is_on_data(attack)


def find_aggregator(name: str) -> list[str | Callable[..., Any]]:
    """Returns the parts of an aggregator, as `jfcl.kernels.make_aggregator` takes them: `MODULE:NAME` as functions.

    Raises:
      ValueError: an unknown name; a module that cannot be imported; no function `(updates, *, mask)`, or one with an
        argument that nothing gives.

    Example:
      >>> find_aggregator("nnm+krum"), find_aggregator("nnm+jfcl.kernels:krum")[1] is kernels.krum
      (['nnm', 'krum'], True)
    """
    parts = [_find_part(part) if is_own(part) else part for part in name.split("+")]
    try:
        kernels.aggregator_options(parts)
    except ValueError as error:
        raise ValueError(f"{error}; MODULE:NAME is one of your own") from None
    return parts


def _find_part(name: str) -> Callable[..., Any]:
    part = _find("aggregator", name)
    accepted = f"the name of a function (updates, *, mask, ...); further arguments may be {', '.join(OF_AGGREGATORS)}"
    _signature("aggregator", name, part, accepted)
    given = taken_arguments(part, **dict.fromkeys(OF_AGGREGATORS))
    _check_takes("aggregator", name, part, (None,), accepted, ("mask", *given))
    return part


def required(method: Method) -> list[str]:
    """Returns the keyword-only arguments of a factory that have no default."""
    parameters = inspect.signature(method.make).parameters
    return [name for name in method.options if parameters[name].default is inspect.Parameter.empty]


def _check_takes(
    what: str, name: str, make: Any, arguments: tuple, accepted: str, keywords: Collection[str] = ()
) -> None:
    """Raises `ValueError` for what cannot be called with `arguments` and `keywords`."""
    signature = _signature(what, name, make, accepted)
    try:
        signature.bind(*arguments, **dict.fromkeys(keywords))
    except TypeError as error:
        raise ValueError(f"{what} must be {accepted}, got {name!r}: {error}") from None


def _signature(what: str, name: str, made: Any, accepted: str) -> inspect.Signature:
    """Returns the signature of what can be called; raises `ValueError` for anything else."""
    check(callable(made), what, name, accepted)
    try:
        return inspect.signature(made)
    except ValueError:  # of some classes and builtins Python knows none
        raise ValueError(f"{what} must be {accepted}, got {name!r}, which has no signature") from None


def _find(what: str, name: str, known: Collection[str] = (), form: str = "MODULE:NAME") -> Any:
    """Imports what `MODULE:NAME` names; raises `ValueError` for another name, with the nearest of those `known`."""
    if not is_own(name):
        try:
            check_choice(what, name, known)
        except ValueError as error:
            raise ValueError(f"{error}, or {form} for one of your own") from None
    module_name, _, attribute = name.partition(":")
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
    if module_name not in sys.modules:
        importlib.invalidate_caches()  # a file that is a moment old
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ValueError(f"{what} {name!r}: {_why_not_imported(module_name, error)}") from error
    if not hasattr(module, attribute):
        near = difflib.get_close_matches(attribute, [n for n in vars(module) if not n.startswith("_")], n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        where = getattr(module, "__file__", None) or "built in"
        raise ValueError(f"{what} {name!r}: module {module_name} ({where}) has no {attribute!r}{hint}")
    return getattr(module, attribute)


def _why_not_imported(module: str, error: BaseException) -> str:
    """Returns the sentence on an error in an import, with the line of the module where it occurs."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        here = [path.stem for path in Path().glob("*.py")] + [path.parent.name for path in Path().glob("*/__init__.py")]
        near = difflib.get_close_matches(module, here, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        return f"there is no module {module!r} in this folder, nor among the installed packages{hint}"
    text = f"module {module!r} cannot be imported: {type(error).__name__}: {error}"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    if isinstance(error, SyntaxError) or not lines:
        return text
    return f"{text} ({lines[0].filename}, line {lines[0].lineno})"


@functools.cache
def _read_method(name: str, make: Any) -> Method:
    """Returns the method of a factory; raises `ValueError` for one of another form than the command line calls."""
    form = f"method {name!r} must be a function (task, training, *, client_axis, ...) that returns an Algorithm, and"
    if not inspect.isfunction(make):
        raise ValueError(f"{form} is {type(make).__name__}")
    parameters = inspect.signature(make).parameters
    positional = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if positional[:2] != ["task", "training"] or "client_axis" not in parameters:
        raise ValueError(f"{form} takes ({', '.join(parameters)})")
    where = f"argument {{}} of method {name!r} must"
    if positional[2:]:
        raise ValueError(f"{where.format(positional[2])} be keyword-only: write a * before it")
    method = Method(make, first_sentence(" ".join((inspect.getdoc(make) or make.__name__).split("\n\n")[0].split())))
    try:
        declared = method.declared
    except Exception as error:  # whatever the evaluation of an annotation raises
        raise ValueError(f"the annotations of method {name!r} cannot be read: {error}") from error
    for option in method.options:
        if parameters[option].default is inspect.Parameter.empty and option not in {*declared, *ALWAYS_GIVEN}:
            raise ValueError(f"{where.format(option)} have a default, or an annotation of a number, a text or bool")
    for option in [option for option in declared.values() if option.default is not None]:
        try:
            option.check(option.default)
        except ValueError as error:
            raise ValueError(f"the default of an argument of method {name!r}: {error}") from None
    return method
