"""Settings and edges of a process: determinism, modules imported again, threads."""

import threading
import warnings

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

import warm  # noqa: E402
from packed_inputs import packed  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from test_direct import explicit, make  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors")


# ---- torch.use_deterministic_algorithms ----------------------------------------------------------


def step(inputs, dout, **options):
    out = sagebwd.attention(*inputs, **options)
    return out, *torch.autograd.grad(out, inputs, dout)


def doors():
    """Backward passes under options, each by another way to the kernels."""
    inputs, dout = make()
    out, lse = sagebwd.attention_forward(*(t.detach() for t in inputs))
    sequences, dout_packed, where = packed()
    return {
        "attention": lambda **o: step(inputs, dout, **o),
        "packed": lambda **o: step(sequences, dout_packed, **where, **o),
        "explicit": lambda **o: sagebwd.attention_backward(dout, *inputs, out, lse, **o),
    }


@pytest.mark.parametrize("door", ["attention", "packed", "explicit"])
def test_any_order_is_an_error_where_pytorch_is_to_be_deterministic(door):
    call = doors()[door]
    for _ in range(3):  # of later calls the form is known
        call(deterministic=False)
        torch.use_deterministic_algorithms(True)
        call()  # by default they are
        call(deterministic=True)
        with pytest.raises(RuntimeError, match=r"leave deterministic=False out.*warn_only=True"):
            call(deterministic=False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        with pytest.warns(UserWarning, match="deterministic=False adds dQ up in any order"):
            call(deterministic=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()
        torch.use_deterministic_algorithms(False)


def test_a_forward_alone_is_deterministic_whatever_is_said():
    (q, k, v), _ = make(grad=False)
    torch.use_deterministic_algorithms(True)
    sagebwd.attention(q, k, v, deterministic=False)


# ---- modules that are imported again -------------------------------------------------------------

AGAIN = """
import gc, importlib, sys
import torch, sagebwd
import sagebwd.core.ops

x = [torch.zeros(1, 2, 8, 64, device="meta").bfloat16().requires_grad_() for _ in range(3)]

def works(package):
    out = package.attention(*x)
    assert out.shape == x[0].shape
    torch.autograd.grad(out.sum(), x)

def modules():
    return {name: m for name, m in sys.modules.items() if name.split(".")[0] == "sagebwd"}

works(sagebwd)
for _ in range(3):
    importlib.reload(sagebwd.core.ops)
    works(sagebwd)

for module in modules().values():  # as a notebook's autoreload does
    if module.__file__.endswith(".py"):
        importlib.reload(module)
works(sagebwd)

earlier = sagebwd
for name in modules():
    del sys.modules[name]
del sagebwd
import sagebwd
assert sagebwd is not earlier
works(earlier)
works(sagebwd)
del earlier
gc.collect()
works(sagebwd)
print("works")
"""


def test_modules_can_be_imported_again():
    ran = warm.run(["-c", AGAIN], loaded="torch")
    assert ran.stdout == "works\n" and ran.returncode == 0, ran.stderr


# ---- threads -------------------------------------------------------------------------------------


def in_threads(works):
    """Runs them at once; raises what the first that failed raised."""
    failures, barrier = [], threading.Barrier(len(works))

    def run(work):
        try:
            barrier.wait(60)
            work()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def leaves_of(tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def parts_and_sink(q, k, v):
    parts = [sagebwd.attention(q, k[:, :, at], v[:, :, at], return_lse=True)
             for at in (slice(0, 16), slice(16, 24))]  # fmt: skip
    return sagebwd.with_sink(*sagebwd.merge(parts), torch.zeros(4))[0]


def by_pytorchs_name(q, k, v):
    with sagebwd.sdpa():
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def test_ways_of_calling_in_threads_at_once():
    calls = [sagebwd.attention, parts_and_sink, by_pytorchs_name,
             lambda q, k, v: sagebwd.sageattn(q, k, v, is_causal=True)]  # fmt: skip
    inputs, dout = make()

    def gradients(call):
        leaves = leaves_of(inputs)
        return torch.autograd.grad(call(*leaves), leaves, dout)

    expected = [gradients(call) for call in calls]

    def work(i):
        for _ in range(4):
            for x, y in zip(gradients(calls[i]), expected[i]):
                assert torch.equal(x, y)

    in_threads([lambda i=i: work(i % 4) for i in range(8)])


def test_a_graph_of_one_thread_is_differentiated_by_others():
    inputs, dout = make()
    expected = explicit(inputs, dout)[2:]
    for _ in range(2):
        leaves = leaves_of(inputs)
        outs = [sagebwd.attention(*leaves) for _ in range(4)]
        found = {}

        def work(i, outs=outs, leaves=leaves, found=found):
            found[i] = torch.autograd.grad(outs[i], leaves, dout)

        in_threads([lambda i=i: work(i) for i in range(4)])
        for gradients in found.values():
            assert all(map(torch.equal, gradients, expected))
        # And of one graph from several threads, which autograd adds up.
        out = sagebwd.attention(*leaves)
        in_threads([lambda out=out: out.backward(dout, retain_graph=True)] * 2)
        for leaf, gradient in zip(leaves, expected):
            assert torch.equal(leaf.grad, gradient * 2)
