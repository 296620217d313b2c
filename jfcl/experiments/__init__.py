"""Runs from configurations, and the papers' experiments as recipes made of such runs."""

from jfcl.experiments import papers
from jfcl.experiments.compare import compare
from jfcl.experiments.config import Config, from_saved
from jfcl.experiments.recipes import RECIPES, Recipe, reproduce
from jfcl.experiments.report import report
from jfcl.experiments.results import load_run, read_run
from jfcl.experiments.run import run
from jfcl.experiments.serving import export_model
from jfcl.experiments.setups import load_params, setup
from jfcl.experiments.sweeps import run_sweep

__all__ = ["RECIPES", "Config", "Recipe", "compare", "export_model", "from_saved", "load_params", "load_run", "papers"]
__all__ += ["read_run", "report", "reproduce", "run", "run_sweep", "setup"]
