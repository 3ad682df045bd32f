"""Attention on tensors: what a call asks for, its checks, and the kernels that it runs."""
