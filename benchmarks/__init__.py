"""Scripts that measure and compare, run from the repository; `benchmarks.papers` runs the papers' experiments."""
