"""Runs one check of test_jax_on_gpu.py in a process: XLA takes GPU memory as it likes.

    python jax_program.py CHECK
"""

import sys
import threading

import exact
import jax
import jax.numpy as jnp
import numpy as np

import sagebwd
from sagebwd.integrations.jax import attention, qk_norm_rope, sparse_linear_attention


def make(b=2, h=4, hk=2, m=333, n=333, d=64, dtype=jnp.bfloat16, seed=0):
    random = np.random.default_rng(seed)
    shapes = (b, h, m, d), (b, hk, n, d), (b, hk, n, d), (b, h, m, d)
    return [jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes]


def run(q, k, v, dout, dlse=None, wrap=jax.jit, **chosen):
    """(out, lse, dq, dk, dv) by jax.vjp."""

    def both(q, k, v):
        return attention(q, k, v, return_lse=True, **chosen)

    def passes(q, k, v, dout, dlse):
        results, backward = jax.vjp(both, q, k, v)
        return *results, *backward((dout, dlse))

    rows = jnp.zeros(q.shape[:3], jnp.float32) if dlse is None else dlse
    return wrap(passes)(q, k, v, dout, rows)


def check(arrays, chosen, expected, **more):
    exact.assert_near(run(*arrays, **chosen, **more),
                      exact.attention(*arrays, dlse=more.get("dlse"), **expected))  # fmt: skip


def jit():
    for d in (64, 96, 128, 256):
        check(make(d=d), {"causal": True}, {"causal": True})
    check(make(m=200, n=500, dtype=jnp.float16), {"softmax_scale": 0.2}, {"scale": 0.2})
    check(make(), {"causal": True}, {"causal": True}, wrap=lambda f: f)


def windows():
    for left in (10, 64, 300):
        check(make(), {"causal": True, "window_left": left}, {"causal": True, "left": left})
    check(make(), {"window_left": 40, "window_right": 25}, {"left": 40, "right": 25})


def gradient_of_lse():
    dlse = jnp.asarray(np.random.default_rng(9).standard_normal((2, 4, 333)), jnp.float32)
    check(make(), {"causal": True}, {"causal": True}, dlse=dlse)


def grad():
    """By jax.grad, of out alone."""
    q, k, v, dout = make()

    def loss(q, k, v):
        return (attention(q, k, v, causal=True) * dout).astype(jnp.float32).sum()

    found = jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v)
    for x, y in zip(found, run(q, k, v, dout, causal=True)[2:]):
        assert jnp.array_equal(x, y)


def sparse_linear():
    """SLA2's attention, with an alpha for each query."""
    random = np.random.default_rng(8)
    mask = random.random((2, 4, 3, 6)) < 0.4
    alpha = jnp.asarray(random.uniform(0.2, 0.8, (2, 4, 333)), jnp.float32)
    for d in (64, 128):
        q, k, v, dout = make(d=d)
        out, backward = jax.vjp(jax.jit(lambda *given: sparse_linear_attention(
            *given[:3], alpha=given[3], block_mask=jnp.asarray(mask))), q, k, v, alpha)  # fmt: skip
        expected = sagebwd.reference.sparse_linear(q, k, v, dout, alpha=alpha, block_mask=mask)
        names = "out", "dq", "dk", "dv", "dalpha"
        exact.assert_near((out, *backward(dout)), [expected[name] for name in names], names=names)


def front():
    """Norm and RoPE against FP64, and gradients against differences of FP64 along themselves."""
    q, k, dk, dq = make(dtype=jnp.float16)
    random = np.random.default_rng(8)
    gains = [1 + 0.3 * random.standard_normal(shape) for shape in ((64,), (2, 64))]
    angles = 3 * random.standard_normal((333, 32))
    turn = np.exp(1j * angles)[None, None]
    learned = q, k, *(jnp.asarray(g, jnp.float32) for g in gains)

    def ours(q, k, *norms):
        rope = jnp.cos(jnp.asarray(angles)), jnp.sin(jnp.asarray(angles))
        return qk_norm_rope(q, k, q_norm=norms[0], k_norm=norms[1], rope=rope)

    def in_fp64(*given):
        found = []
        for x, gain in zip(given[:2], given[2:]):
            n = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * gain.reshape(1, -1, 1, 64)
            pairs = (n[..., :32] + 1j * n[..., 32:]) * turn
            found.append(np.concatenate((pairs.real, pairs.imag), -1))
        return found

    wide = [np.asarray(x, np.float64) for x in learned]
    found, backward = jax.vjp(jax.jit(ours), *learned)
    exact.assert_near(found, in_fp64(*wide), names=("q", "k"))
    weights = [np.asarray(x, np.float64) for x in (dq, dk)]
    for i, x in enumerate(np.asarray(g, np.float64) for g in backward((dq, dk))):
        sums = []
        for step in (1e-4, -1e-4):
            moved = [y + step * x if i == j else y for j, y in enumerate(wide)]
            sums.append(sum((y * w).sum() for y, w in zip(in_fp64(*moved), weights)))
        slope = (sums[0] - sums[1]) / 2e-4
        assert abs(slope - (x * x).sum()) <= 1e-3 * (x * x).sum(), (i, slope, (x * x).sum())


def vmap():
    stacks = [jnp.stack(pair) for pair in zip(make(seed=1), make(seed=2))]
    found = jax.jit(jax.vmap(lambda *arrays: run(*arrays, wrap=lambda f: f)))(*stacks)
    for i in range(2):
        one = run(*(stack[i] for stack in stacks))
        assert all(jnp.array_equal(x[i], y) for x, y in zip(found, one))


def beside_pytorch():
    """In one process, by turns and at the same time, on a stream that is not the default one."""
    import torch

    arrays = make(m=1000, n=1000)
    tensors = [torch.tensor(np.asarray(x, np.float32)).cuda().bfloat16() for x in arrays]
    q, k, v = (t.requires_grad_() for t in tensors[:3])

    def by_pytorch():
        out = sagebwd.attention(q, k, v, causal=True)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3])]

    expected = by_pytorch()
    torch.cuda.synchronize()
    ours = run(*arrays, causal=True)
    exact.assert_near(ours, exact.attention(*arrays, causal=True))
    wanted = [np.asarray(x, np.float32) for x in (ours[0], *ours[2:])]
    for x, y in zip(expected, wanted):  # the same kernels: the same bits
        assert np.array_equal(x.float().cpu().numpy(), y)

    failures = []

    def in_thread(work):
        def guarded():
            try:
                for _ in range(20):
                    work()
            except BaseException as error:
                failures.append(error)

        return threading.Thread(target=guarded)

    def pytorch_again():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            found = by_pytorch()
        stream.synchronize()
        assert all(torch.equal(x, y) for x, y in zip(found, expected))

    def jax_again():
        assert all(jnp.array_equal(x, y) for x, y in zip(run(*arrays, causal=True), ours))

    threads = [in_thread(work) for work in (pytorch_again, jax_again, jax_again)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures


def out_of_memory():
    """XLA's own words, where q, k, v and out leave too little for a workspace; then all goes on."""
    heads, d, bytes_each = 16, 128, jax.devices()[0].memory_stats()["bytes_limit"] // 5
    q, k, v = (jnp.zeros((1, heads, bytes_each // (heads * d * 2), d), jnp.bfloat16)
               for _ in range(3))  # fmt: skip
    try:
        jax.block_until_ready(jax.jit(attention)(q, k, v))
    except jax.errors.JaxRuntimeError as error:
        assert "XLA gives no memory for the workspace" in str(error), error
        assert "It says: Failed to allocate" in str(error), error
    else:
        raise AssertionError("it had memory enough")
    del q, k, v
    check(make(), {"causal": True}, {"causal": True})


if __name__ == "__main__":
    assert jax.default_backend() == "gpu", jax.devices()
    globals()[sys.argv[1]]()
    print("right")
