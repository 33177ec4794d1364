"""Who takes part in `benchmarks/federation.py`: one module each, behind one interface."""
