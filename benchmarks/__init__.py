"""Programs that measure pltpack; run them from the repository root, for example ``python -m benchmarks.demo``."""
