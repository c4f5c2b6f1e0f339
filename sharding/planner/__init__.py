"""The parts of ``python -m sharding.plan``: what it compiles, measures, counts and tells."""
