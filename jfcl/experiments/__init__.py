"""Runs from configurations, and the papers' experiments as recipes made of such runs."""

from functools import partial

from jfcl.experiments import byzantine_cfl, cfl, federated_clustering, ifca, recipes
from jfcl.experiments.config import Config, from_saved
from jfcl.experiments.recipes import Recipe
from jfcl.experiments.results import load_run, read_run
from jfcl.experiments.run import run
from jfcl.experiments.setups import load_params, setup

RECIPES: dict[str, Recipe] = cfl.RECIPES | byzantine_cfl.RECIPES | federated_clustering.RECIPES | ifca.RECIPES
reproduce = partial(recipes.reproduce, recipes=RECIPES)

__all__ = [
    "RECIPES",
    "Config",
    "Recipe",
    "from_saved",
    "load_params",
    "load_run",
    "read_run",
    "reproduce",
    "run",
    "setup",
]
