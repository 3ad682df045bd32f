"""PyTorch's settings of the whole process, on a GPU: FP32 products, and the default device."""

import threading

import pytest
from inputs import leaves, listed, torch
from test_float32 import SETTINGS, as_before, choose, in_force, needs_new  # noqa: F401

import sagebwd
from sagebwd.numerics import emulation

settings = pytest.mark.parametrize(
    "name", [name if isinstance(setting, str) else pytest.param(name, marks=needs_new)
             for name, setting in SETTINGS.items()])  # fmt: skip


def mixed(inputs, alpha=0.7, precision="six-of-seven"):
    """SLA2 with lists that are given: a router's own products are the model's, as a layer's are."""
    mask = listed(4, 300, 300, (128, 64))
    out = sagebwd.sparse_linear_attention(*inputs, alpha=alpha, block_mask=mask,
                                          precision=precision)  # fmt: skip
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


def linear(inputs):
    out = sagebwd.block_linear_attention(*inputs, block_mask=listed(4, 300, 300, (128, 64)))
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


def emulated(inputs):
    out = emulation.emulated_attention(*inputs, causal=True)
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), inputs)]


CALLS = [mixed, lambda inputs: mixed(inputs, precision="exact"),
         lambda inputs: mixed(inputs, alpha="estimated"), linear, emulated]  # fmt: skip


@settings
@pytest.mark.parametrize("call", CALLS, ids=["kernels", "exact", "estimated", "linear",
                                               "emulation"])  # fmt: skip
def test_each_setting_is_left_as_it_was_and_changes_nothing(call, name):
    inputs, _ = leaves(300, hk=4)
    expected = call(inputs)
    choose(SETTINGS[name])
    before = in_force()
    assert all(map(torch.equal, call(inputs), expected))
    assert in_force() == before


@settings
def test_a_monitor_measures_as_without(name):
    def measured():
        inputs, dout = leaves(500)
        with sagebwd.Monitor() as monitor:
            torch.autograd.grad(sagebwd.attention(*inputs), inputs, dout)
        return {of: monitor.latest[of] for of in ("O", "dQ", "dK", "dV", "dS")}

    expected = measured()
    choose(SETTINGS[name])
    assert measured() == pytest.approx(expected, rel=5e-3)


def test_threads_leave_it_as_it_was():
    torch.set_float32_matmul_precision("high")
    inputs, _ = leaves(300, hk=4)
    expected, found = mixed(inputs, precision="exact"), []

    def work():
        found.append(mixed([t.detach().requires_grad_() for t in inputs], precision="exact"))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_float32_matmul_precision() == "high" and len(found) == 4
    for each in found:
        assert all(map(torch.equal, each, expected))


@pytest.mark.filterwarnings("error::sagebwd.MonitorWarning")
def test_a_default_device_loses_no_record():
    inputs, dout = leaves(300)
    with torch.device("cuda"), sagebwd.Monitor(every=1) as monitor:
        torch.autograd.grad(sagebwd.attention(*inputs), inputs, dout)
    assert len(monitor.records) == 1


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_default_device_changes_nothing_of_ranks(method):
    """One rank says to itself what many say to each other."""
    dist = torch.distributed
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.device_mesh.init_device_mesh("cuda", (1,))
        inputs, dout = leaves(300)

        def run():
            out = sagebwd.distributed.attention(*inputs, mesh=mesh, method=method, causal=True)
            whole = sagebwd.distributed.unshard(out, mesh, dim=2, method=method)
            return [whole, *torch.autograd.grad(out, inputs, dout)]

        expected = run()
        with torch.device("cuda"):
            found = run()
        assert all(map(torch.equal, found, expected))
    finally:
        dist.destroy_process_group()
