"""PyTorch, or one line that says it is missing, for --help too: `from needs_torch import torch`."""

import sys
from pathlib import Path

try:
    import torch
except (ImportError, OSError) as error:  # not installed, or broken
    sys.exit(f"{Path(sys.argv[0]).name} needs PyTorch ({error}): pip install torch")

__all__ = ["torch"]
