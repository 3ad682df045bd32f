"""`sagebwd.arrays`: attention on arrays of other libraries, such as CuPy's."""

from sagebwd.integrations.arrays import attention_backward, attention_forward

__all__ = ["attention_backward", "attention_forward"]
