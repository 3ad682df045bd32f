"""sagebwd.qk_clip_: what becomes of weights, and of the logits that they form."""

import copy
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402

HEAD_DIM, FEATURES = 8, 24


def projections(heads, heads_kv, bias=True, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for count in (heads, heads_kv):
        layer = torch.nn.Linear(FEATURES, count * HEAD_DIM, bias=bias).to(dtype)
        with torch.no_grad():
            for t in layer.parameters():
                t.copy_(torch.randn(t.shape, generator=generator, dtype=torch.float64))
        made.append(layer)
    return made


def largest_logits(q_proj, k_proj, x, heads, heads_kv):
    """The largest score of each head, in plain loops of NumPy."""
    with torch.no_grad():
        q, k = (np.asarray(layer(x).double()) for layer in (q_proj, k_proj))
    found = []
    for h in range(heads):
        of_keys = h * heads_kv // heads
        queries = q[:, h * HEAD_DIM : (h + 1) * HEAD_DIM]
        keys = k[:, of_keys * HEAD_DIM : (of_keys + 1) * HEAD_DIM]
        found.append(max(float(a @ b) / math.sqrt(HEAD_DIM) for a in queries for b in keys))
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("heads, heads_kv", [(4, 4), (4, 2), (6, 1), (1, 1)])
@pytest.mark.parametrize("alpha", [0.5, 0.0, 0.3, 1.0])
def test_logits_become_tau_or_stay(heads, heads_kv, alpha):
    q_proj, k_proj = projections(heads, heads_kv)
    x = torch.randn(20, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = largest_logits(q_proj, k_proj, x, heads, heads_kv)
    tau = float(before.double().quantile(0.4)) if heads > 1 else float(before[0]) / 2
    gamma = sagebwd.qk_clip_(q_proj, k_proj, before.float(), tau, alpha=alpha)
    after = largest_logits(q_proj, k_proj, x, heads, heads_kv)
    expected = before.clamp(max=tau)
    assert torch.allclose(after, expected, rtol=1e-6)
    assert torch.allclose(gamma.double(), expected / before, rtol=1e-6)
    assert gamma.dtype == torch.float32 and gamma.shape == (heads,)


def test_each_head_of_its_own_takes_the_root():
    """As MuonClip has it: sqrt(gamma) for both, and others stay to the bit."""
    q_proj, k_proj = projections(3, 3, dtype=torch.float32)
    kept = copy.deepcopy((q_proj, k_proj))
    gamma = sagebwd.qk_clip_(q_proj, k_proj, torch.tensor([50.0, 400.0, 100.0]), 100)
    assert gamma.tolist() == [1, 0.25, 1]
    for layer, old in zip((q_proj, k_proj), kept):
        for t, of_old in zip(layer.parameters(), old.parameters()):
            for h, factor in enumerate((1.0, 0.5, 1.0)):
                rows = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
                assert torch.equal(t[rows], of_old[rows] * factor)


def test_shared_keys_take_the_factor_of_the_largest_logit():
    q_proj, k_proj = projections(4, 2, dtype=torch.float32)
    kept = copy.deepcopy((q_proj, k_proj))
    sagebwd.qk_clip_(q_proj, k_proj, torch.tensor([400.0, 100.0, 25.0, 50.0]), 100)
    of_keys = k_proj.weight.view(2, -1) / kept[1].weight.view(2, -1)
    assert torch.allclose(of_keys, torch.tensor([[0.5], [1.0]]))
    # The second head's logits stay: what its keys lose its queries gain.
    of_queries = q_proj.weight.view(4, -1) / kept[0].weight.view(4, -1)
    assert torch.allclose(of_queries, torch.tensor([[0.5], [2.0], [1.0], [1.0]]))


def test_weights_and_slices_of_a_fused_projection():
    q_proj, k_proj = projections(2, 1, dtype=torch.float32)
    rows = 2 * HEAD_DIM, HEAD_DIM, HEAD_DIM
    fused = torch.cat([q_proj.weight, k_proj.weight, torch.ones(HEAD_DIM, FEATURES)]).detach()
    fused_bias = torch.cat([q_proj.bias, k_proj.bias, torch.ones(HEAD_DIM)]).detach()
    q, k, v = fused.split(rows)
    q_bias, k_bias, _ = fused_bias.split(rows)
    found = torch.tensor([300.0, 10.0])
    sagebwd.qk_clip_(q_proj, k_proj, found, 100)
    sagebwd.qk_clip_(q, k, found, 100, q_bias=q_bias, k_bias=k_bias)
    assert torch.equal(fused[: rows[0] + rows[1]], torch.cat([q_proj.weight, k_proj.weight]))
    assert torch.equal(fused_bias[: rows[0] + rows[1]], torch.cat([q_proj.bias, k_proj.bias]))
    assert bool((v == 1).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_16_bit_weights_are_rounded_once(dtype):
    q_proj, k_proj = projections(1, 1, bias=False, dtype=dtype)
    old = q_proj.weight.detach().clone()
    sagebwd.qk_clip_(q_proj, k_proj, torch.tensor([130.0]), 100)
    expected = (old.float() * (torch.tensor(100.0) / 130).sqrt()).to(dtype)
    assert torch.equal(q_proj.weight, expected) and q_proj.weight.requires_grad
    assert q_proj.weight.grad_fn is None


def test_heads_without_a_finite_logit():
    q_proj, k_proj = projections(4, 4)
    kept = copy.deepcopy(q_proj.weight)
    found = torch.tensor([-torch.inf, torch.nan, torch.inf, 5.0])
    assert sagebwd.qk_clip_(q_proj, k_proj, found, 10.0).tolist() == [1, 1, 1, 1]
    assert torch.equal(q_proj.weight, kept)
    for place, value in ((1, "nan"), (2, "inf")):
        wrong = torch.tensor([-torch.inf, 500.0, 3.0, 5.0])
        wrong[place] = float(value)
        with pytest.raises(sagebwd.SpecError, match=rf"max_logits\[{place}\] is {value}"):
            sagebwd.qk_clip_(q_proj, k_proj, wrong, 10.0, check=True)
    assert torch.equal(q_proj.weight, kept)
    sagebwd.qk_clip_(q_proj, k_proj, torch.tensor([-torch.inf, 1, 2, 3]), 10.0, check=True)


def test_the_host_reads_nothing():
    """Meta tensors have no numbers: whoever asked for one would fail."""
    q_proj, k_proj = projections(4, 2, dtype=torch.float32)
    q_proj, k_proj = q_proj.to("meta"), k_proj.to("meta")
    assert sagebwd.qk_clip_(q_proj, k_proj, torch.empty(4, device="meta"), 100).is_meta


def refused(message, *given, error=sagebwd.SpecError, **told):
    with pytest.raises(error, match=message):
        sagebwd.qk_clip_(*given, **told)


def test_refusals():
    q_proj, k_proj = projections(4, 2)
    kept = copy.deepcopy(q_proj.weight)
    found = torch.full((4,), 500.0)
    for tau in (0, -1.0, torch.nan, math.inf, True, "100", None):
        refused("tau=", q_proj, k_proj, found, tau)
    for alpha in (-0.1, 1.1, torch.nan, "half", False):
        refused("alpha=", q_proj, k_proj, found, 100, alpha=alpha)
    refused("max_logits has 5 heads, and q_proj 32 rows", q_proj, k_proj, torch.ones(5), 100)
    refused("max_logits has 64 heads", q_proj, k_proj, torch.ones(64), 100)
    refused("k_proj has 16 rows, and 1 heads of 32 rows", q_proj, k_proj, torch.ones(1), 100)
    three = projections(4, 3)[1]
    refused("k_proj has 24 rows, and 4 heads of 8 rows", q_proj, three, found, 100)
    for wrong in (torch.ones(4, 1), torch.ones(0), torch.ones(4, dtype=torch.int32)):
        refused("max_logits is .*pass floats of", q_proj, k_proj, wrong, 100)
    refused("max_logits is a list", q_proj, k_proj, [1.0] * 4, 100, error=TypeError)
    refused("q_proj is .*; pass a torch.nn.Linear", "q", k_proj, found, 100, error=TypeError)
    refused("k_proj is .*; pass a torch.nn.Linear", q_proj, torch.nn.ReLU(), found, 100,
            error=TypeError)  # fmt: skip
    refused("q_bias is given with a module", q_proj, k_proj, found, 100, q_bias=q_proj.bias)
    refused("k_bias has 3 rows", q_proj.weight, k_proj.weight, found, 100, k_bias=torch.ones(3))
    refused("q_proj is .*of a floating type", q_proj.weight.int(), k_proj, found, 100)
    refused("q_proj is on cpu and max_logits on meta", q_proj, k_proj, found.to("meta"), 100)
    assert torch.equal(q_proj.weight, kept)


def test_it_goes_with_what_attention_gives():
    """The emulation's logits of clipped weights are at tau, except for INT8's error."""
    heads, heads_kv, head_dim, features = 4, 2, 64, 96
    generator = torch.Generator().manual_seed(3)
    q_proj, k_proj = (torch.nn.Linear(features, count * head_dim, bias=False)
                      for count in (heads, heads_kv))  # fmt: skip
    with torch.no_grad():
        for layer in (q_proj, k_proj):
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
    x = torch.randn(1, 128, features, generator=generator)

    def logits():
        q, k = (layer(x).unflatten(-1, (-1, head_dim)).transpose(1, 2).bfloat16()
                for layer in (q_proj, k_proj))  # fmt: skip
        return sagebwd.emulation.emulated_attention(q, k, k, return_max_logits=True)[1]

    before = logits()
    tau = float(before.median())
    sagebwd.qk_clip_(q_proj, k_proj, before, tau)
    assert torch.allclose(logits(), before.clamp(max=tau), rtol=0.03)


def test_what_cannot_be_clipped_is_refused_and_stays():
    large = torch.full((4,), 400.0)
    normed = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(64, 128))
    fused, weight = torch.nn.Linear(64, 384), torch.randn(128, 64)
    narrow, expanded = weight.to(torch.float8_e4m3fn), torch.randn(128, 1).expand(128, 64)
    for q, k, tau, said in ((normed, weight, 100, "another parametrization"),
                            (fused, fused, 100, "share memory"),
                            (weight, weight[:64], 100, "share memory"),
                            (weight, narrow, 100, "16 bits or more"),
                            (weight, expanded, 100, "memory of its own"),
                            (weight, weight.clone(), 1e-320, "positive number"),
                            (weight, weight.clone(), 10**400, "positive number")):
        before = weight.clone()
        with pytest.raises(sagebwd.SpecError, match=said):
            sagebwd.qk_clip_(q, k, large, tau)
        assert torch.equal(weight, before)
    q, k, v = fused.weight.detach().split(128)
    assert bool((sagebwd.qk_clip_(q, k, large, 100) == 0.25).all())
