"""Compiles and prices a run for an accelerator that this machine does not have."""
