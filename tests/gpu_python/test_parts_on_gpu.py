"""Parts of the keys on a GPU: a shared mean, and gradients of a part by itself."""

import pytest
from inputs import make, relative, torch

import sagebwd

KINDS = [{}, {"granularity": "block"}, {"precision": "qk16"},
         {"precision": "gradients16", "deterministic": False}]  # fmt: skip


def keys_with_a_mean(d):
    """Keys have few bits, so that their sums are exact in FP32 in any order; parts' means are
    apart."""
    q, k, v, dout = make(300, 512, d=d)
    part = (torch.arange(512, device="cuda") // 171).bfloat16()
    return q, ((k * 8).round() / 8 + 2 + part[:, None] / 4), v, dout


@pytest.mark.parametrize("d", [64, 128, 160])
@pytest.mark.parametrize("chosen", KINDS, ids=str)
def test_the_mean_of_the_keys_changes_nothing(d, chosen):
    q, k, v, dout = keys_with_a_mean(d)

    def run(k_mean):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out, lse = sagebwd.attention(*leaves, k_mean=k_mean, return_lse=True, **chosen)
        return out, lse, *torch.autograd.grad(out, leaves, dout)

    mean = k.float().mean(2)
    for i, (x, y) in enumerate(zip(run(mean), run(None))):
        assert torch.equal(x, y) or (i == 2 and relative(x, y) < 1e-3 and len(chosen) == 2)


@pytest.mark.parametrize("how", ["mean", "part", "naive"])
@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("chosen", KINDS, ids=str)
def test_gradients_of_parts_are_those_of_the_whole(d, chosen, how):
    q, k, v, dout = keys_with_a_mean(d)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    repeated = (t.repeat_interleave(2, 1) for t in leaves[1:])
    expected = torch.nn.functional.scaled_dot_product_attention(leaves[0], *repeated)
    wanted = torch.autograd.grad(expected, leaves, dout.double())
    given = chosen | ({"k_mean": k.float().mean(2)} if how == "mean" else {})
    parts = [(q, *x) for x in zip(k.chunk(3, 2), v.chunk(3, 2))]
    forward = [sagebwd.attention_forward(*x, **given) for x in parts]
    out, lse = sagebwd.merge(forward)
    gradients = [
        sagebwd.attention_backward(
            dout, *x, out, lse, part=of_part if how == "part" else None, **given
        )
        for x, of_part in zip(parts, forward)
    ]
    dq, dk, dv = zip(*gradients)
    limit = 0.08 if "granularity" in chosen else 0.04
    assert relative(torch.cat(dk, 2), wanted[1]) < limit
    assert relative(torch.cat(dv, 2), wanted[2]) < limit
    error = relative(sum(g.float() for g in dq), wanted[0])
    assert error > 0.1 if how == "naive" else error < limit


def halves(q, k, v, causal=False):
    """Attends to all keys, in two parts; with `causal` the first queries see nothing of the
    second."""
    masks = ("top-left", "bottom-right") if causal else (False, False)
    at = k.shape[2] // 2
    parts = [sagebwd.attention(q, k[:, :, part], v[:, :, part], causal=mask, return_lse=True)
             for part, mask in zip((slice(0, at), slice(at, None)), masks)]  # fmt: skip
    return sagebwd.merge(parts)


def leaves_of(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def with_gradients(call, inputs, dout, dlse):
    out, lse = call(*inputs)
    return out, lse, *torch.autograd.grad((out, lse), inputs, (dout, dlse))


@pytest.mark.parametrize("causal", [False, True])
def test_a_graph_of_merged_parts_takes_other_inputs(causal):
    def draw(seed):
        *inputs, dout = make(256, 256, seed=seed)
        return *inputs, dout, torch.randn(2, 4, 256, device="cuda")

    def run(q, k, v, dout, dlse):
        return with_gradients(lambda *qkv: halves(*qkv, causal), (q, k, v), dout, dlse)

    *inputs, dout, dlse = draw(0)
    inputs = leaves_of(*inputs)
    run(*inputs, dout, dlse)  # compiled before the capture; of its results nothing is left
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(*inputs, dout, dlse)
    for seed in (1, 2):
        fresh = draw(seed)
        with torch.no_grad():
            for to, source in zip((*inputs, dout, dlse), fresh):
                to.copy_(source)
        graph.replay()
        expected = run(*leaves_of(*fresh[:3]), *fresh[3:])
        for name, x, y in zip(("out", "lse", "dq", "dk", "dv"), captured, expected):
            assert torch.equal(x, y), name


CAPTURE = """
import sys
import torch, sagebwd
q, k, v = (torch.randn(1, 2, 128, 64, device="cuda").bfloat16().requires_grad_() for _ in range(3))

def ours(q, k, v):
    parts = [sagebwd.attention(q, k[:, :, at], v[:, :, at], return_lse=True)
             for at in (slice(0, 64), slice(64, 128))]
    return sagebwd.merge(parts)[0]

def pytorchs(q, k, v):
    return (q * k + q * v).exp()

call = {"ours": ours, "PyTorch's": pytorchs}[sys.argv[1]]
def run():
    out = call(q, k, v)
    return out, *torch.autograd.grad(out.sum(), (q, k, v))

earlier = run()  # its graph lives on, and with it the nodes of the default stream
with torch.cuda.graph(torch.cuda.CUDAGraph()):
    captured = run()
print("captured")
"""


def test_a_capture_beside_earlier_results_fails_only_where_pytorchs_own_does():
    """Nodes that add up gradients of a leaf belong to the stream on which they were made; while
    they live, gradients of a leaf that is used twice are added there, outside of a capture."""
    import os
    import subprocess
    import sys
    from pathlib import Path

    environment = os.environ | {"PYTHONPATH": os.pathsep.join(
        [str(Path(sagebwd.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}  # fmt: skip
    ran = {who: subprocess.run([sys.executable, "-c", CAPTURE, who], env=environment, text=True,
                               capture_output=True, timeout=300, check=False)
           for who in ("ours", "PyTorch's")}  # fmt: skip
    captured = {who: "captured" in result.stdout for who, result in ran.items()}
    assert captured["ours"] or not captured["PyTorch's"], ran["ours"].stderr[-3000:]


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_queries_that_no_part_sees_have_no_gradient(layout):
    """A whole tile of them, and a part of one: dK of the keys beside them is right as well."""
    *tensors, dout = make(346, 256, layout=layout)
    dlse = torch.randn(2, 4, 346, device="cuda")
    given = {"causal": "bottom-right", "layout": layout, "return_lse": True}

    def run(call):
        return with_gradients(call, leaves_of(*tensors), dout, dlse)

    expected = run(lambda *qkv: sagebwd.attention(*qkv, **given))
    found = run(lambda *qkv: sagebwd.merge([sagebwd.attention(*qkv, **given)], layout=layout))
    token = 2 if layout == "bhsd" else 1
    assert (found[1][..., :90] == -torch.inf).all()
    assert not found[2].narrow(token, 0, 90).any()
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    for x, y in zip(found[2:], expected[2:]):
        assert x.isfinite().all() and relative(x, y) < 0.02


def test_infinite_sinks_beside_padding():
    *tensors, dout = make(300)
    used = torch.tensor([300, 170], dtype=torch.int32, device="cuda")
    dlse = torch.randn(2, 4, 300, device="cuda")

    def run(sinks):
        sinks = [] if sinks is None else [torch.tensor(sinks, device="cuda")]
        leaves = leaves_of(*tensors, *sinks)
        return with_gradients(lambda q, k, v, sinks=None: sagebwd.attention(
            q, k, v, causal=True, seqused_q=used, seqused_k=used, sink_logits=sinks,
            return_lse=True), leaves, dout, dlse)  # fmt: skip

    plain = run(None)
    out, lse, *gradients, of_sinks = run([-torch.inf] * 4)
    assert not of_sinks.any() and all(map(torch.equal, (out, lse, *gradients), plain))
    out, lse, dq, dk, dv, of_sinks = run([-torch.inf, 0.5, torch.inf, -1e30])
    assert all(t.isfinite().all() for t in (out, dq, dk, dv, of_sinks))
    assert torch.equal(out[:, 0], plain[0][:, 0]) and torch.equal(dq[:, 0], plain[2][:, 0])
    assert not out[:, 2].any() and not dq[:, 2].any() and (lse[:, 2] == torch.inf).all()
    assert not out[1, :, 170:].any() and not dq[1, :, 170:].any()
    assert of_sinks[0] == of_sinks[2] == 0 and of_sinks[1] != 0
