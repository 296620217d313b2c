"""Runs from configurations."""

from jfcl.experiments.run import Config, load_params, read_run, run, setup

__all__ = ["Config", "load_params", "read_run", "run", "setup"]
