"""sagebwd.nn: SLA2 as a module, its stage 1, and what it refuses."""

import numpy as np
import pytest

import sagebwd
from sagebwd.reference import sparse_linear

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sla_inputs import BLOCKS, drawn  # noqa: E402
from stand_in import listed_kernels_on_the_cpu  # noqa: E402, F401

from sagebwd.nn import BlockRouter, SparseLinearAttention  # noqa: E402
from sagebwd.sla.exact import listed_attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

QUERIES, KEYS, HEADS, HEADS_KV, CHANNELS = 21, 18, 4, 2, 4
DENSITY = 0.45  # 2 of 5


def tensors(batch=2, queries=QUERIES, keys=KEYS):
    return (drawn(batch, HEADS, queries, CHANNELS, seed=1), drawn(batch, HEADS_KV, keys, CHANNELS),
            drawn(batch, HEADS_KV, keys, CHANNELS, seed=3))  # fmt: skip


def made(**given):
    options = dict(heads_kv=HEADS_KV, density=DENSITY, block_size=BLOCKS, precision="exact",
                   seq_len=QUERIES) | given  # fmt: skip
    module = SparseLinearAttention(CHANNELS, HEADS, **options).double()
    for seed, p in enumerate(module.parameters()):
        with torch.no_grad():
            p += 0.5 * drawn(*p.shape, seed=seed)
    return module


def reference(module, q, k, v, dout=None, **routed):
    """`sparse_linear` with a module's parameters."""

    def array(t):
        return None if t is None else t.detach().numpy()

    beta = array(module.beta)
    alpha = "estimated" if beta is not None else array(module.alpha_logit.sigmoid())
    if "block_mask" not in routed:
        routed = dict(
            query_map=array(module.router.query_map),
            density=module.density,
            key_map=array(module.router.key_map),
            score=module.score,
            **routed,
        )
    return sparse_linear(*(array(t) for t in (q, k, v, dout)), alpha=alpha, beta=beta,
                         block_size=BLOCKS, linear=module.linear, **routed)  # fmt: skip


def full_of(q, k, v):
    return listed_attention(q, k, v, None, BLOCKS, CHANNELS**-0.5)[0]


KINDS = [dict(alpha=alpha, linear=linear, score=score, router=router) for alpha, linear, score,
         router in (("block", "complement", "logits", "learned"),
                    ("head", "all", "softmax", "learned"),
                    ("estimated", "complement", "logits", "learned"),
                    ("estimated", "all", "logits", "pooled"),
                    ("block", "complement", "softmax", "pooled"))]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_hard_routing_is_the_reference_and_trains_alpha_alone(kind, layout):
    module, given = made(**kind, layout=layout), tensors()

    def swapped(t):
        return t.transpose(1, 2) if layout == "bshd" else t

    leaves = [swapped(t).clone().requires_grad_() for t in given]
    dout = drawn(2, HEADS, QUERIES, CHANNELS, seed=9)
    out = module(*leaves)
    out.backward(swapped(dout))
    expected = reference(module, *given, dout)
    found = dict(out=swapped(out), dq=swapped(leaves[0].grad), dk=swapped(leaves[1].grad),
                 dv=swapped(leaves[2].grad))  # fmt: skip
    if module.beta is None:
        a = module.alpha_logit.detach().sigmoid()
        found["dalpha"] = module.alpha_logit.grad / (a * (1 - a))
    else:
        found["dbeta"] = module.beta.grad
    for name, x in found.items():
        np.testing.assert_allclose(x.detach().numpy(), expected[name], rtol=1e-9, atol=1e-11)
    assert all(p.grad is None for p in module.router.parameters())
    mask = module.block_mask(*leaves[:2])
    assert np.array_equal(mask.numpy(), expected["block_mask"])


@pytest.mark.parametrize("kind", KINDS)
def test_stage_one_is_the_distance_to_full_attention(kind):
    module, given = made(**kind), tensors()
    loss = module.stage_one_loss(*given, temperature=0.3)
    loss.backward()
    full = full_of(*given).numpy()
    soft = reference(module, *given, temperature=0.3)
    np.testing.assert_allclose(loss.item(), ((soft["out"] - full) ** 2).mean(), rtol=1e-9)
    dout = torch.from_numpy(2 * (soft["out"] - full) / full.size)
    expected = reference(module, *given, dout, temperature=0.3)
    for name, p in module.named_parameters():
        wanted = expected[f"d{name.rpartition('.')[2]}".replace("dalpha_logit", "dalpha")]
        if name == "alpha_logit":
            a = p.detach().sigmoid().numpy()
            wanted = wanted * a * (1 - a)
        np.testing.assert_allclose(p.grad.numpy(), wanted, rtol=1e-8, atol=1e-12, err_msg=name)
    assert module.stage_one_loss(*given).item() != loss.item()  # the module's own temperature


def test_soft_routing_and_straight_through():
    module, given = made(temperature=0.5), tensors()
    hard, soft = module(*given), module(*given, routing="soft")
    through = module(*given, routing="straight-through")
    np.testing.assert_allclose(soft.detach(), reference(module, *given, temperature=0.5)["out"],
                               rtol=1e-9)  # fmt: skip
    torch.testing.assert_close(through, hard, rtol=1e-12, atol=1e-12)
    assert not torch.allclose(soft, hard, atol=1e-3)
    dout = drawn(*hard.shape)
    maps = [module.router.query_map, module.router.key_map]
    (found,) = torch.autograd.grad(through, maps[:1], dout)
    # The soft lists' gradient, of what hard lists would gain.
    mask = module.block_mask(*given[:2])
    of_mask = reference(module, *given, dout, block_mask=mask.double().numpy())["dblock_mask"]
    scores = module.router(*given[:2])
    lists = sagebwd.soft_top_blocks(scores, DENSITY, 0.5)
    (wanted,) = torch.autograd.grad(lists, maps[:1], torch.from_numpy(of_mask))
    assert found.abs().max() > 1e-3
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("alpha", ["block", "head"])
def test_the_calibrated_alpha_is_the_best(alpha):
    module, given = made(alpha=alpha), tensors()
    module.calibrate_alpha(*given)
    full = full_of(*given)
    loss = (module(*given) - full).square().sum()
    (slope,) = torch.autograd.grad(loss, module.alpha_logit)
    inside = (module.alpha_logit.sigmoid() - 0.5).abs() < 0.489
    assert inside.any() and slope[inside].abs().max() < 1e-9 * loss.item()
    with torch.no_grad():
        for step in (0.1, -0.1):
            module.alpha_logit[inside] += step
            assert (module(*given) - full).square().sum() > loss
            module.alpha_logit[inside] -= step


@pytest.mark.parametrize("alpha", ["block", "head", "estimated"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nothing_is_calibrated_from_what_is_not_finite(alpha, bad):
    module = made(alpha=alpha)
    before = {name: p.clone() for name, p in module.named_parameters()}
    for i, name in enumerate("qkv"):
        given = [t.clone() for t in tensors()]
        given[i][1, 0, 3, 2] = bad
        with pytest.raises(sagebwd.SpecError, match=f"^{name} has NaN or infinite values"):
            module.calibrate_alpha(*given)
    assert all(torch.equal(p, before[name]) for name, p in module.named_parameters())


@pytest.mark.parametrize("alpha", ["head", "estimated"])
def test_seq_len_is_for_alpha_by_block_only(alpha):
    module = made(alpha=alpha, seq_len=QUERIES)
    assert module.seq_len is None and made(alpha="block").seq_len == QUERIES
    assert module(*tensors(queries=30)).shape[2] == 30
    assert "with alpha='block', which needs it" in " ".join(SparseLinearAttention.__doc__.split())
    with pytest.raises(sagebwd.SpecError, match="seq_len"):
        made(alpha=alpha, seq_len=0)


def test_the_calibrated_estimate_is_right_in_the_mean():
    module, given = made(alpha="estimated"), tensors()
    module.calibrate_alpha(*given)
    found = reference(module, *given)
    gap = found["alpha"] - found["exact_alpha"]
    np.testing.assert_allclose(gap.mean((0, 2)), 0, atol=1e-10)
    assert np.abs(gap).max() > 0.03


def hidden_topics(seed, blocks=32):
    """(q, k, v) in which pooling misleads: one key in each block answers to a topic, and weighs
    much; in other channels all keys of a block are alike, and weigh little."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    topics = torch.eye(8, dtype=torch.float64).repeat_interleave(blocks // 8, 0)
    topics = topics[torch.randperm(blocks, generator=generator)]
    place = torch.zeros(blocks, 8, 1, dtype=torch.float64)
    place[:, 3] = 1
    of_q = topics[torch.randperm(blocks, generator=generator)][:, None].expand(-1, 8, -1)
    q, k = (torch.cat([32**0.5 * x, 1.4 * randn(blocks, 1, 8).expand(-1, 8, -1)], 2).flatten(0, 1)
            for x in (of_q, place * topics[:, None]))  # fmt: skip
    return [x[None, None] for x in (q, k, randn(8 * blocks, 16))]


def test_stage_one_learns():
    """Trained maps find what pooling does not, in tokens that were not trained on."""
    module = SparseLinearAttention(16, 1, density=0.125, block_size=(8, 8), alpha="head",
                                   precision="exact").double()  # fmt: skip
    module.calibrate_alpha(*hidden_topics(0))
    before = module.report(*hidden_topics(99))
    optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
    for step in range(60):
        loss = module.stage_one_loss(*hidden_topics(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = module.report(*hidden_topics(99))
    assert before["mass"] < 0.8 * before["best_mass"] and after["mass"] > 0.95 * after["best_mass"]
    assert after["error"] < 0.6 * before["error"]


def test_the_report_is_what_the_reference_says():
    for kind in (dict(alpha="block"), dict(alpha="estimated")):
        module, given = made(**kind), tensors()
        found, expected = module.report(*given), reference(module, *given)
        full = full_of(*given).numpy()

        def error(x, full=full):
            return np.linalg.norm(x - full) / np.linalg.norm(full)

        counts = expected["block_mask"].sum(2)
        wanted = dict(
            density=0.4, error=error(expected["out"]), error_sparse=error(expected["out_sparse"]),
            error_linear=error(expected["out_linear"]), alpha=expected["alpha"].mean(),
            exact_alpha=expected["exact_alpha"].mean(),
            alpha_distance=((expected["alpha"] - expected["exact_alpha"]) ** 2).mean() ** 0.5,
            unlisted=(counts == 0).mean(), longest_column=counts.max(),
        )  # fmt: skip
        for name, value in wanted.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-9, err_msg=name)
        # The last block of queries, which is short, counts by its queries.
        assert given[0].shape[2] == 21
        np.testing.assert_allclose(found["mass"], expected["exact_alpha"].mean(), rtol=1e-9)
        assert found["mass"] < found["best_mass"] < 1


def test_kernels_take_the_place_of_exact_attention(listed_kernels_on_the_cpu):  # noqa: F811
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, h, 300, 64, dtype=torch.bfloat16) for h in (4, 2, 2))
    module = SparseLinearAttention(64, 4, heads_kv=2, density=0.3, alpha="head", precision="qk16",
                                   group_kv=64)  # fmt: skip
    out = module(q, k, v)
    assert len(listed_kernels_on_the_cpu) == 1
    expected = sagebwd.sparse_linear_attention(
        q, k, v, alpha=0.5, block_mask=module.block_mask(q, k), precision="qk16", group_kv=64
    )
    assert torch.equal(out, expected)
    assert listed_kernels_on_the_cpu[1:] == listed_kernels_on_the_cpu[:1]
    assert "precision=qk16" in listed_kernels_on_the_cpu[0]
    assert "group_kv=64" in listed_kernels_on_the_cpu[0]
    module.stage_one_loss(q, k, v)  # soft lists need no kernels
    assert len(listed_kernels_on_the_cpu) == 2


def test_a_subclass_has_another_sparse_attention():
    given = tensors()

    class Silent(SparseLinearAttention):
        def attend_blocks(self, q, k, v, lists, *rest):
            assert lists.mask.dtype == torch.bool
            return torch.zeros_like(q), q.new_zeros(q.shape[:3])

    silent = Silent(CHANNELS, HEADS, heads_kv=HEADS_KV, block_size=BLOCKS, alpha="head",
                    precision="exact").double()  # fmt: skip
    linear = sagebwd.block_linear_attention(*given, block_mask=silent.block_mask(*given[:2]),
                                            block_size=BLOCKS)  # fmt: skip
    torch.testing.assert_close(silent(*given), 0.5 * linear)


def test_the_state_is_stable():
    module = SparseLinearAttention(64, 6, seq_len=1000)
    assert {name: tuple(t.shape) for name, t in module.state_dict().items()} == {
        "alpha_logit": (6, 8),
        "router.query_map": (64, 64),
        "router.key_map": (64, 64),
    }
    assert torch.equal(module.router.query_map, torch.eye(64)) and not module.alpha_logit.any()
    module = SparseLinearAttention(64, 6, alpha="estimated", router=BlockRouter(64, heads=6))
    assert {name: tuple(t.shape) for name, t in module.state_dict().items()} == {
        "beta": (6,),
        "router.query_map": (6, 64, 64),
        "router.key_map": (6, 64, 64),
    }
    module = SparseLinearAttention(64, 6, alpha="head", router="pooled")
    assert {name: tuple(t.shape) for name, t in module.state_dict().items()} == {
        "alpha_logit": (6, 1)
    }
    first, second = made(), made()
    with torch.no_grad():
        first.alpha_logit.add_(1)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(*tensors()), second(*tensors()))


def test_a_frozen_router_stays_as_it_is():
    module = made()
    assert module.freeze_router() is module
    module.stage_one_loss(*tensors()).backward()
    assert module.alpha_logit.grad.any()
    assert all(p.grad is None and not p.requires_grad for p in module.router.parameters())


def test_an_optimiser_goes_on_without_a_router_that_is_frozen():
    module = made()
    optimiser = torch.optim.AdamW(module.parameters(), lr=0.1)
    module.stage_one_loss(*tensors()).backward()
    module.freeze_router()
    before = [p.clone() for p in module.router.parameters()]
    optimiser.step()
    assert before and all(map(torch.equal, before, module.router.parameters()))


def test_wrong_use_is_refused():
    def refused(match, call, error=sagebwd.SpecError):
        with pytest.raises(error, match=match):
            call()

    def module(**given):
        return SparseLinearAttention(64, 4, **{"alpha": "head", **given})

    refused("pass seq_len=.*'head' or 'estimated'", lambda: module(alpha="block"))
    refused("alpha='mean': pass 'block' or 'head' or 'estimated'", lambda: module(alpha="mean"))
    refused("density=0", lambda: module(density=0))
    refused("head dimension 65 is not built", lambda: SparseLinearAttention(65, 2, alpha="head"))
    assert SparseLinearAttention(65, 2, alpha="head", precision="exact").head_dim == 65
    refused("density=2", lambda: module(density=2))
    refused(r"block_size=\(32, 64\): kernels have 64 and 128", lambda: module(block_size=(32, 64)))
    refused("linear='rest'", lambda: module(linear="rest"))
    refused("router='random': pass 'learned', 'pooled', or a module",
            lambda: module(router="random"))
    refused("score='max'", lambda: module(score="max"))
    refused("temperature=-1", lambda: module(temperature=-1))
    refused("feature_map='relu'", lambda: module(feature_map="relu"))
    refused("layout='hnd'", lambda: module(layout="hnd"))
    refused("heads=4 is no multiple of heads_kv=3", lambda: module(heads_kv=3))
    refused("SparseLinearAttention.. takes no topk: pass density=", lambda: module(topk=0.1),
            TypeError)  # fmt: skip
    refused("takes no BLKK: pass block_size", lambda: module(BLKK=64), TypeError)
    refused("did you mean 'density'", lambda: module(densty=0.1), TypeError)
    refused("learned=1: pass True or False", lambda: BlockRouter(64, learned=1))
    made_for, given = made(), tensors()
    for wrong in (dict(block_size=(4, 4)), dict(heads=2, block_size=BLOCKS)):
        refused("the router was made for head_dim=4, . heads",
                lambda wrong=wrong: made(router=BlockRouter(CHANNELS, **wrong)))  # fmt: skip
    refused("the router was made for head_dim=8",
            lambda: made(router=BlockRouter(8, block_size=BLOCKS)))  # fmt: skip
    refused("lists of blocks of 64 queries", lambda: SparseLinearAttention(
        64, 4, alpha="head", granularity="block", block_size=(64, 64)))  # fmt: skip
    of_others = made(router=torch.nn.Sequential(BlockRouter(CHANNELS, block_size=(4, 4))))
    of_others.router.forward = lambda q, k: of_others.router[0](q, k)
    refused(r"scores of \(2, 4, 6, 5\), and \(2, 4, 3, 5\) is needed", lambda: of_others(*given))
    refused("20 tokens .* alpha='block' for seq_len=21",
            lambda: made_for(given[0][:, :, :20], *given[1:]))  # fmt: skip
    refused("4 and 4 heads of 4 channels; the module was made for 4 and 2",
            lambda: made_for(given[0], given[0], given[0]))  # fmt: skip
    refused("routing='best': pass 'hard' or 'soft'", lambda: made_for(*given, routing="best"))
    refused("temperature=0", lambda: made_for.stage_one_loss(*given, temperature=0))
    refused("q is a list", lambda: made_for([1], *given[1:]), TypeError)


@pytest.mark.parametrize("density", [DENSITY, 1.0])
@pytest.mark.parametrize("alpha", ["head", "block"])
def test_a_router_may_leave_lists_empty_or_short(alpha, density):
    """The module knows the lists that it makes as they are."""

    class Masked(torch.nn.Module):
        def forward(self, q, k):
            scores = sagebwd.pooled_block_scores(q, k, block_size=BLOCKS).clone()
            scores[:, :, 0], scores[:, 1:, 1, 1:] = -torch.inf, -torch.inf
            return scores

    module = made(alpha=alpha, density=density, router=Masked())
    q, k, v = (t.requires_grad_() for t in tensors())
    mask, leaves = module.block_mask(q, k), [q, k, v, module.alpha_logit]
    assert not mask[:, :, 0].any() and mask[:, 2, 2].all() == (density == 1)
    out = module(q, k, v)
    expected = sagebwd.sparse_linear_attention(
        q, k, v, alpha=module.alpha_logit.sigmoid(), block_mask=mask, block_size=BLOCKS,
        precision="exact")  # fmt: skip
    assert torch.equal(out, expected)
    dout = drawn(*out.shape, seed=9)
    for x, y in zip(torch.autograd.grad(out, leaves, dout),
                    torch.autograd.grad(expected, leaves, dout)):  # fmt: skip
        assert torch.equal(x, y)
