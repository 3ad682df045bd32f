"""`sagebwd.reference`: attention on the CPU, on NumPy arrays."""

from sagebwd.numerics.reference import emulate, exact, random_inputs, round_to
from sagebwd.sla.reference import sparse_linear

__all__ = ["emulate", "exact", "random_inputs", "round_to", "sparse_linear"]
