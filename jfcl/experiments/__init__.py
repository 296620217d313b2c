"""Runs from configurations, and the papers' experiments as recipes made of such runs."""

from functools import partial

from jfcl.experiments import byzantine_cfl, cfl, federated_clustering, ifca, recipes
from jfcl.experiments.recipes import Recipe
from jfcl.experiments.run import Config, load_params, read_run, run, setup

RECIPES: dict[str, Recipe] = cfl.RECIPES | byzantine_cfl.RECIPES | federated_clustering.RECIPES | ifca.RECIPES
reproduce = partial(recipes.reproduce, recipes=RECIPES)

__all__ = ["RECIPES", "Config", "Recipe", "load_params", "read_run", "reproduce", "run", "setup"]
