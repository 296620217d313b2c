"""Methods, models, data, augmentations, attacks, aggregators and metrics by name, or a user's own by `MODULE:NAME`.

A module is imported as `python -m` does: the current folder comes first. Each function that finds something raises
`ValueError` for an unknown name, for what cannot be imported, with its error, and for what does not fit.
"""

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
from typing import Any

import flax.linen as nn

from jfcl import data, kernels, models
from jfcl.analysis import metrics
from jfcl.core import check, check_choice
from jfcl.core.options import first_sentence
from jfcl.methods import METHODS, Method
from jfcl.robust import aggregate, attacks
from jfcl.simulation.evaluation import check_further
from jfcl.training.augment import AUGMENTATIONS

IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
METRICS = {metric.__name__: metric for metric in (metrics.macro_f1, metrics.auc, metrics.calibration_error)}
# The arguments that are passed to functions of users: always, or where they take them.
OF_FACTORIES = ("client_axis", "num_clusters", "cluster")
OF_ATTACKS = {"updates": ["key", "updates", "malicious", "usable"], "data": ["rng", "x", "y", "num_classes"]}
OF_AGGREGATORS = ("num_malicious", "radius", "bucket_size", "key", "trusted")


def is_import_path(name: Any) -> bool:
    """Returns whether a name has the form `MODULE:NAME`.

    Example:
      >>> is_import_path("my_method:server_momentum"), is_import_path("ifca"), is_import_path("mnist:3.0.1")
      (True, False, False)
    """
    return isinstance(name, str) and IMPORT_PATH.fullmatch(name) is not None


def find_method(name: str) -> Method:
    """Returns the method of a name in `jfcl.methods.METHODS`, or of a factory `(task, training, *, client_axis, ...)`.

    Example:
      >>> find_method("jfcl.methods.ditto:ditto").make is find_method("ditto").make
      True
      >>> find_method("ifac")
      Traceback (most recent call last):
      ValueError: unknown method 'ifac': did you mean 'ifca'? Accepted: ..., or MODULE:FACTORY for one of your own
    """
    return METHODS[name] if name in METHODS else _as_method(name, _imported("method", name, METHODS, "MODULE:FACTORY"))


def find_model(name: str) -> Callable[[int], Any]:
    """Returns the function that makes a model of a number of outputs: that of a name in `MODELS`, or `MODULE:NAME`.

    Example:
      >>> find_model("mlp")(10) == find_model("jfcl.models:MLP")(10)
      True
    """
    if name in models.MODELS:
        return models.MODELS[name][0]
    accepted = "the name of a class or function of the number of outputs, such as a flax module with num_outputs"
    make = _imported("model", name, models.MODELS)
    nnx = sys.modules.get("flax.nnx")  # takes long to import, and without it no class is derived from its own
    if nnx is not None and inspect.isclass(make) and issubclass(make, nnx.Module):
        return lambda num_outputs: partial(make, num_outputs)  # a function of rngs
    check(not isinstance(make, nn.Module), "model", name, f"{accepted}; it is an instance of {type(make).__name__}")
    if inspect.isclass(make) and issubclass(make, nn.Module):
        fields = {field.name for field in dataclasses.fields(make) if field.init}
        check(fields - {"parent", "name"}, "model", name, accepted)
    return _function("model", name, accepted, (10,))


def find_metrics(names: str) -> dict[str, metrics.Metric]:
    """Returns the metrics that a list, separated by commas, names as in `METRICS` or by `MODULE:NAME`, by their names.

    Example:
      >>> list(find_metrics("macro_f1,jfcl.metrics:auc"))
      ['macro_f1', 'auc']
    """
    listed = [name.strip() for name in names.split(",")]
    found = [METRICS[name] if name in METRICS else _imported("metric", name, METRICS) for name in listed]
    functions = {name.rpartition(":")[2]: metric for name, metric in zip(listed, found, strict=True)}
    check(len(functions) == len(listed), "metrics", names, "names that differ in their last part")
    check_further(functions)
    return functions


def find_augmentation(name: str) -> Callable[..., Any]:
    """Returns the augmentation of a name in `AUGMENTATIONS`, or `MODULE:NAME`.

    Example:
      >>> find_augmentation("flip") is find_augmentation("jfcl.augment:flip")
      True
    """
    if name in AUGMENTATIONS:
        return AUGMENTATIONS[name]
    return _function("augment", name, "the name of a function (key, batch) -> batch", (None, None), AUGMENTATIONS)


def find_dataset(name: str, data_dir: str | None) -> data.Dataset:
    """Returns the data set of a name that `jfcl.data.load` knows, or the one that `MODULE:FUNCTION` returns.

    Example:
      >>> find_dataset("digits", None).num_classes
      10
    """
    if not is_import_path(name):
        return data.load(name, data_dir=data_dir)
    accepted = "the name of a function without arguments that returns a jfcl.data.Dataset"
    dataset = _function("dataset", name, accepted)()
    check(isinstance(dataset, data.Dataset), "dataset", name, f"{accepted}; it returns {type(dataset).__name__}")
    return data.dataset.normalised(dataset, texts=True)


def find_attack(name: str, **offered: Any) -> attacks.UpdateAttack | attacks.DataAttack:
    """Returns the attack of a name in `UPDATE_ATTACKS` or `DATA_ATTACKS`, or of `MODULE:NAME`.

    An attack of `UPDATE_ATTACKS` receives those of the offered arguments that it takes, such as the run's aggregator.

    Example:
      >>> find_attack("label_reverse") is find_attack("jfcl.robust.attacks:label_reverse")
      True
    """
    if name in attacks.UPDATE_ATTACKS:
        return attacks.UPDATE_ATTACKS[name](**aggregate.taken_arguments(attacks.UPDATE_ATTACKS[name], **offered))
    if name in attacks.DATA_ATTACKS:
        return attacks.DATA_ATTACKS[name]
    accepted = "the name of a function with the arguments (key, updates, malicious, usable), or (rng, x, y,"
    accepted += " num_classes) for an attack on data"
    attack = _function(
        "attack", name, accepted, (None,) * 4, attacks.UPDATE_ATTACKS | attacks.DATA_ATTACKS, offered=("cluster", "ids")
    )
    fits = _positional(attack)[:4] in OF_ATTACKS.values()
    check(fits, "attack", f"{name}{inspect.signature(attack)}", accepted)
    return attack


def is_on_data(attack: str | None) -> bool:
    """Returns whether an attack changes examples, as the names of its arguments tell.

    Example:
      >>> is_on_data("backdoor"), is_on_data("ipm"), is_on_data(None)
      (True, False, False)
    """
    if is_import_path(attack):
        return _positional(find_attack(attack))[:4] == OF_ATTACKS["data"]
    return attack in attacks.DATA_ATTACKS


def is_on_updates(attack: str | None) -> bool:
    """Returns whether an attack changes updates."""
    return attack is not None and not is_on_data(attack)


def find_aggregator(name: str) -> list[str | Callable[..., Any]]:
    """Returns the parts of an aggregator, as `jfcl.kernels.make_aggregator` takes them: `MODULE:NAME` as functions.

    Example:
      >>> find_aggregator("nnm+krum"), find_aggregator("nnm+jfcl.kernels:krum")[1] is kernels.krum
      (['nnm', 'krum'], True)
    """
    accepted = f"the name of a function (updates, *, mask, ...); further arguments may be {', '.join(OF_AGGREGATORS)}"
    arguments = {"arguments": (None,), "keywords": ("mask",), "offered": OF_AGGREGATORS}
    parts = [_function("aggregator", n, accepted, **arguments) if is_import_path(n) else n for n in name.split("+")]
    try:
        kernels.aggregator_options(parts)
    except ValueError as error:
        raise ValueError(f"{error}; MODULE:NAME is one of your own") from None
    return parts


def required(make: Callable) -> list[str]:
    """Returns the keyword-only arguments of a factory that have no default."""
    parameters = inspect.signature(make).parameters.values()
    return [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]


# ---------------------------------------------------------------------------------------------------------------
# What a user's module holds.


def _imported(what: str, name: str, choices: Collection[str] = (), form: str = "MODULE:NAME") -> Any:
    """Imports what `MODULE:NAME` names; the error for another name suggests the nearest of the `choices`."""
    if not is_import_path(name):
        try:
            check_choice(what, name, choices)
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
        hint = _near(attribute, [n for n in vars(module) if not n.startswith("_")])
        where = getattr(module, "__file__", None) or "built in"
        raise ValueError(f"{what} {name!r}: module {module_name} ({where}) has no {attribute!r}{hint}")
    return getattr(module, attribute)


def _why_not_imported(module: str, error: BaseException) -> str:
    """Describes an error in an import, with the line of the module in which it occurs."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
        here = [path.stem for path in Path().glob("*.py")] + [path.parent.name for path in Path().glob("*/__init__.py")]
        return f"there is no module {module!r} in this folder, nor among the installed packages{_near(module, here)}"
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name == "<module>"]
    at = "" if isinstance(error, SyntaxError) or not lines else f" ({lines[0].filename}, line {lines[0].lineno})"
    return f"module {module!r} cannot be imported: {type(error).__name__}: {error}{at}"


def _near(name: str, choices: Collection[str]) -> str:
    near = difflib.get_close_matches(name, choices, n=1)
    return f": did you mean {near[0]!r}?" if near else ""


def _positional(function: Callable) -> list[str]:
    """Returns the names of the positional arguments."""
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


def _function(
    what: str,
    name: str,
    accepted: str,
    arguments: tuple = (),
    choices: Collection[str] = (),
    **further: Collection[str],
) -> Callable[..., Any]:
    """Imports a function that can be called with `arguments`, `keywords=`, and what it takes of `offered=`."""
    function = _imported(what, name, choices)
    check(callable(function), what, name, accepted)
    try:
        taken = aggregate.taken_arguments(function, **dict.fromkeys(further.get("offered", ())))
        inspect.signature(function).bind(*arguments, **dict.fromkeys((*further.get("keywords", ()), *taken)))
    except (TypeError, ValueError) as error:  # the latter for some classes and builtins, whose signature is unknown
        raise ValueError(f"{what} must be {accepted}, got {name!r}: {error}") from None
    return function


@functools.cache
def _as_method(name: str, make: Any) -> Method:
    """Returns the method of a user's factory, after a check of its form."""
    parameters = inspect.signature(make).parameters if inspect.isfunction(make) else {}
    further = [argument for argument in (_positional(make) if parameters else ())[2:] if argument != "client_axis"]
    if "client_axis" not in parameters or list(parameters)[:2] != ["task", "training"] or further:
        takes = f"takes ({', '.join(parameters)})" if parameters else f"is {type(make).__name__}"
        form = "a function (task, training, *, client_axis, ...) that returns an Algorithm"
        remedy = f"; write a * before {further[0]}: options are keyword-only" if further else ""
        raise ValueError(f"method {name!r} must be {form}, but {takes}{remedy}")
    method = Method(make, first_sentence(" ".join((inspect.getdoc(make) or make.__name__).split("\n\n")[0].split())))
    try:
        declared = method.declared
    except Exception as error:  # whatever the evaluation of an annotation raises
        raise ValueError(f"the annotations of method {name!r} cannot be read: {error}") from error
    for option in required(make):
        if option not in {*declared, *OF_FACTORIES}:
            accepted = "have a default, or an annotation of a number, a text or bool"
            raise ValueError(f"argument {option} of method {name!r} must {accepted}")
    return method
