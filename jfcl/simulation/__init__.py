"""Simulations: rounds of an algorithm with all clients, or cohorts of a population, on the device; a run's folder."""

from jfcl.mapping.jitted import clear_programs
from jfcl.simulation.grid import Sweep, sweep
from jfcl.simulation.loop import History, rollout
from jfcl.simulation.progress import DivergedError
from jfcl.simulation.run import simulate
