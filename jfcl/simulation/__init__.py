"""Simulations: rounds of an algorithm on clients on the device, or on a population on the host; a run's folder."""

from jfcl.simulation.loop import History, rollout, simulate
from jfcl.simulation.population import PopulationHistory, simulate_population
from jfcl.simulation.programs import clear_programs
from jfcl.simulation.progress import DivergedError

__all__ = [
    "DivergedError",
    "History",
    "PopulationHistory",
    "clear_programs",
    "rollout",
    "simulate",
    "simulate_population",
]
