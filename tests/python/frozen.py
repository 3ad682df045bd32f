"""Whoever imports this has its garbage collector leave what is there alone, as a server does that
forks processes: to look through PyTorch takes half a second, and copies its memory in each."""

import atexit
import gc

gc.collect()
gc.freeze()
atexit.register(gc.unfreeze)  # Triton complains of what is left where a program ends
