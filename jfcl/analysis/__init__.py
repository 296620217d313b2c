"""The analysis of results: metrics, rankings, plots."""
