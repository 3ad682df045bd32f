"""Workspaces of CPU tensors for kernels on the simulator."""

import torch


def aligned(new_empty):
    """In the place of `torch.Tensor.new_empty`: bytes begin at multiples of 256, as memory of a GPU
    does."""

    def allocate(t, *size, dtype=None, **more):
        if dtype != torch.uint8:
            return new_empty(t, *size, dtype=dtype, **more)
        count = size[0] if isinstance(size[0], int) else size[0][0]
        found = new_empty(t, count + 256, dtype=dtype)
        begin = -found.data_ptr() % 256
        return found[begin : begin + count]

    return allocate
