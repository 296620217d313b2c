"""The analysis of results: metrics, the parameter tree of CFL, plots."""
