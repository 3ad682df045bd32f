"""Exported programs, vmap, compiled autograd and wrong masks in compiled code, on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from inputs import torch

import compiled_doors as doors
import sagebwd

backends = pytest.mark.parametrize("backend", ["aot_eager", "inductor"])


def test_an_exported_program_checks_on_the_device():
    given, told = [t.detach() for t in doors.inputs("cuda")], doors.Hidden("cuda")

    class Model(torch.nn.Module):
        def forward(self, q, k, v, mask):
            return sagebwd.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    exported = torch.export.export(Model(), (*given, told.holes), strict=False).module()
    for mask in (told.holes, told.padding):
        found = exported(*given, mask)
        assert torch.equal(found, sagebwd.scaled_dot_product_attention(*given, attn_mask=mask))


@backends
def test_under_vmap(backend):
    given, told = doors.inputs("cuda"), doors.Hidden("cuda")
    many = [torch.stack([t.detach(), t.detach().roll(1)]) for t in given]

    def mapped(q, k, v):
        return torch.func.vmap(lambda *qkv: sagebwd.scaled_dot_product_attention(
            *qkv, attn_mask=told.pairs))(q, k, v)  # fmt: skip

    torch._dynamo.reset()
    found = torch.compile(mapped, fullgraph=True, backend=backend)(*many)
    assert (found - mapped(*many)).norm() <= 1e-3 * found.norm()


#: The device stops the program, so each is one of its own.
WRONG = """
import sys
sys.path[:0] = [{here!r}]
import torch, sagebwd, compiled_doors as doors
given, told = doors.inputs("cuda"), doors.Hidden("cuda")
compiled = torch.compile(sagebwd.scaled_dot_product_attention, fullgraph=True, backend={backend!r})
compiled(*given, attn_mask=told.padding)
torch.cuda.synchronize()
print("the right mask passed", flush=True)
compiled(*given, attn_mask=torch.ones(2, 1, doors.TOKENS, doors.TOKENS, device="cuda").tril() > 0)
torch.cuda.synchronize()
"""


@backends
def test_a_wrong_mask_stops_the_program(backend):
    here = str(Path(doors.__file__).parent)
    done = subprocess.run([sys.executable, "-c", WRONG.format(here=here, backend=backend)],
                          capture_output=True, text=True, timeout=600, env=os.environ)  # fmt: skip
    assert "the right mask passed" in done.stdout, done.stderr
    assert done.returncode and "Message length" not in done.stderr
    assert "device-side assert" in done.stderr


@pytest.mark.parametrize("door", [doors.packed, doors.pytorchs, doors.listed, doors.sparse_linear],
                         ids=lambda door: door.__name__)  # fmt: skip
def test_compiled_autograd(door):
    import test_compiled_autograd

    if test_compiled_autograd.enable is None:
        pytest.skip("needs compiled autograd")
    given, told = doors.inputs("cuda"), doors.Hidden("cuda")
    expected = doors.loss_and_gradients(door, given, True, told)
    with test_compiled_autograd.compiling():
        found = doors.loss_and_gradients(door, given, True, told)
    for ours, eager in zip(found, expected):
        assert (ours - eager).double().norm() <= 0.01 * eager.double().norm()
