"""Compiles and prices a run for an accelerator that is not there."""
