"""The parts of ``python -m sharding.benchmark``: what it runs, checks and tells."""
