"""sagebwd.arrays on memory of PyTorch's that does not say it is: as CuPy's and others' arrays."""

import pytest
from inputs import make, torch

import sagebwd
from sagebwd import arrays


class ByDlpack:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, stream=None):
        return self.tensor.detach().__dlpack__(stream=stream)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


class ByInterface:
    def __init__(self, tensor):
        self.tensor = tensor

    @property
    def __cuda_array_interface__(self):
        return self.tensor.detach().__cuda_array_interface__


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("kind, dtype", [(ByDlpack, torch.bfloat16), (ByDlpack, torch.float16),
                                         (ByInterface, torch.float16)])  # fmt: skip
def test_as_pytorchs_own(kind, dtype, layout):
    q, k, v, dout = make(200, 330, dtype=dtype, layout=layout)
    chosen = {"causal": "bottom-right", "layout": layout}
    expected = sagebwd.attention_forward(q, k, v, **chosen)
    expected += sagebwd.attention_backward(dout, q, k, v, *expected, **chosen)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def empty(shape, dtype):
        return kind(torch.empty(shape, dtype=getattr(torch, dtype), device="cuda"))

    with torch.cuda.stream(stream):
        there = {"stream": stream.cuda_stream, "empty": empty, **chosen}
        q, k, v, dout = map(kind, (q, k, v, dout))
        if kind is ByInterface and torch.cuda.device_count() > 1:
            with pytest.raises(sagebwd.SpecError, match="on which of several GPUs they are"):
                arrays.attention_forward(q, k, v, **there)
            return
        out, lse = arrays.attention_forward(q, k, v, **there)
        found = (out, lse, *arrays.attention_backward(dout, q, k, v, out, lse, **there))
    stream.synchronize()
    for got, own in zip(found, expected):
        assert torch.equal(got.tensor, own)
