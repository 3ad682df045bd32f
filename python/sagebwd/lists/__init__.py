"""Lists of blocks: which key blocks each query block sees, and attention to those."""
