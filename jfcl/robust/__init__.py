"""Attacks, means and robust means of updates, and differential privacy: what every method shares."""
