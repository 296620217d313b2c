"""Kernels: arrays in, arrays out. They know nothing of models, data or the rest of the library."""
