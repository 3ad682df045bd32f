"""`sagebwd.distributed` over gloo with the emulation, against one process and FP64."""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

import distributed_ranks as ranks_of  # noqa: E402
from alike import relative  # noqa: E402
from stand_in import kernels_on_the_cpu  # noqa: E402, F401

from sagebwd import distributed  # noqa: E402
from sagebwd.core import options  # noqa: E402
from sagebwd.distributed import passes, sharding  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

NAMES = ("out", "lse", "dq", "dk", "dv")
MESHES = [("ring", 2), ("ring", 4), ("ulysses", 2), ("ulysses", 4), ("both", 4), ("both", 8)]
#: Beyond the error of one process.
MORE = 1e-3


def check(found, drawn, chosen, use_dlse, more=MORE):
    expected = ranks_of.exactly(drawn, chosen, use_dlse)
    whole = ranks_of.alone(drawn, chosen, use_dlse)
    for name, x, y, exact in zip(NAMES, found, whole, expected):
        assert x.shape == y.shape and x.dtype == y.dtype, name
        assert relative(x, exact) < relative(y, exact) + more, (name, drawn, chosen)
    return whole


def all_forms(rank, method, ranks):
    return [ranks_of.together(rank, method, ranks, *form) for form in FORMS]


# Heads that 4 ranks share, and fewer key heads than these; lengths that no number divides.
FORMS = [
    (dict(heads=8, heads_kv=2, tokens=101), dict(causal=True), True),
    (dict(heads=4, heads_kv=1, tokens=67, batch=2, layout="bshd"),
     dict(causal=True, layout="bshd"), False),
    (dict(heads=4, heads_kv=4, tokens=50, dtype=torch.float16), {}, True),
    (dict(heads=12, heads_kv=3, tokens=40, keys=90), dict(smooth_k=False), True),
    (dict(heads=4, heads_kv=2, tokens=64, d=64), dict(granularity="block", causal="bottom-right"),
     False),
]  # fmt: skip


@pytest.mark.parametrize(("method", "ranks"), MESHES)
def test_ranks_together_give_what_one_process_gives(method, ranks, tmp_path):
    found, *others = ranks_of.run(tmp_path, ranks, all_forms, method, ranks)
    assert not isinstance(found, str), found
    assert others == [[None] * len(FORMS)] * (ranks - 1)
    for (results,), form in zip(found, FORMS):
        check(results, *form)


@pytest.mark.parametrize(("method", "ranks"), [("ring", 2), ("both", 4)])
def test_chunks_of_256_tokens_are_quantised_as_the_whole(method, ranks, tmp_path):
    """Then only roundings of parts of out and of the gradients are left."""
    form = (dict(heads=2, heads_kv=2, tokens=1000, d=32), dict(causal=True), False)
    ((found,), *_) = ranks_of.run(tmp_path, ranks, ranks_of.together, method, ranks, *form)
    whole = check(found, *form, more=2e-4)
    for name, x, y in zip(NAMES, found, whole):
        # Each rounding to bf16 is 1.7e-3; other groups would make other integers, about 1e-2.
        assert relative(x, y) < (1e-6 if name == "lse" else 4e-3), name


def again_and_again(rank, method, ranks, times):
    """For each time after the first, whether this rank's part of every result has its bits."""
    mesh = ranks_of.mesh_of(method, ranks)
    (q, k, v, dout), dlse = ranks_of.draw(heads=4, heads_kv=2, tokens=77)
    *leaves, dout, dlse = (distributed.shard(t, mesh, dim=2, method=method).detach()
                           for t in (q, k, v, dout, dlse))  # fmt: skip
    leaves = [t.requires_grad_() for t in leaves]

    def results():
        found = distributed.attention(*leaves, mesh=mesh, method=method, causal=True,
                                      return_lse=True)  # fmt: skip
        return *found, *torch.autograd.grad(found, leaves, (dout, dlse))

    first = results()
    return [all(map(torch.equal, first, results())) for _ in range(times - 1)]


@pytest.mark.parametrize(("method", "ranks"), [("ring", 4), ("ulysses", 4), ("both", 4)])
def test_the_same_inputs_give_the_same_bits(method, ranks, tmp_path):
    found = ranks_of.run(tmp_path, ranks, again_and_again, method, ranks, 20)
    assert found == [[True] * 19] * ranks


def test_ulysses_has_windows_and_the_bits_of_one_process(tmp_path):
    """Each rank has all queries of its key heads, so that it sums dK where one process does."""
    drawn = dict(heads=4, heads_kv=2, tokens=90)
    form = (drawn, dict(causal=True, window_left=20), True)
    ((found,), _) = ranks_of.run(tmp_path, 2, ranks_of.together, "ulysses", 2, *form)
    assert all(map(torch.equal, found, ranks_of.alone(*form)))


def by_a_model(rank):
    """Gradients of a layer with a sink, plain and checkpointed in two ways."""
    return [gradients_of_a_model(how) for how in ("plain", "reentrant", "not reentrant")]


def gradients_of_a_model(how):
    mesh = ranks_of.mesh_of("ring", 2)
    (q, k, v, dout), _ = ranks_of.draw(tokens=60)
    own = [distributed.shard(t, mesh, dim=2).detach().requires_grad_() for t in (q, k, v)]
    sinks = torch.linspace(-1, 1, 4).requires_grad_()

    def layer(q, k, v):
        return distributed.attention(q * 1.5, k, v, mesh=mesh, causal=True, sink_logits=sinks) * 2

    if how == "plain":
        out = layer(*own)
    else:
        out = torch.utils.checkpoint.checkpoint(layer, *own, use_reentrant=how == "reentrant")
    loss = (out * distributed.shard(dout, mesh, dim=2)).sum()
    loss.backward()
    torch.distributed.all_reduce(sinks.grad)
    return [out.detach(), *(t.grad for t in (*own, sinks))]


def test_checkpoints_change_no_bit(tmp_path):
    for found in ranks_of.run(tmp_path, 2, by_a_model):
        assert not isinstance(found, str), found
        plain, *checkpointed = found
        assert all(map(torch.equal, plain + plain, [x for of in checkpointed for x in of]))
    (q, k, v, dout), _ = ranks_of.draw(tokens=60)
    sinks = torch.linspace(-1, 1, 4).double().requires_grad_()
    s = (q * 1.5).double() @ k.double().repeat_interleave(2, 1).mT * 32**-0.5
    s = s.masked_fill(torch.ones(60, 60, dtype=torch.bool).triu(1), -torch.inf)
    s = torch.cat((s, sinks[:, None, None].expand(1, 4, 60, 1)), -1)
    out = 2 * s.softmax(-1)[..., :60] @ v.double().repeat_interleave(2, 1)
    (expected,) = torch.autograd.grad(out, sinks, dout.double())
    assert relative(plain[-1], expected) < 0.02


def test_compilers_leave_it_out_of_their_graphs():
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = ranks_of.mesh_of("ring", 1)
        *leaves, dout = ranks_of.draw(tokens=60)[0]
        leaves = [t.requires_grad_() for t in leaves]

        def layer(q, k, v):
            return distributed.attention(q * 1.5, k, v, mesh=mesh, causal=True) * 2

        def run(layer):
            out = layer(*leaves)
            return out, *torch.autograd.grad(out, leaves, dout)

        assert all(map(torch.equal, run(torch.compile(layer, backend="eager")), run(layer)))
    finally:
        dist.destroy_process_group()


def only_lse_and_only_one_rank_uses_out(rank, uses_out):
    """Gradients where ranks use different results."""
    mesh = ranks_of.mesh_of("ulysses", 2)
    (q, k, v, dout), dlse = ranks_of.draw(tokens=60)

    def own(x):
        return distributed.shard(x, mesh, dim=2, method="ulysses")

    leaves = [own(t).detach().requires_grad_() for t in (q, k, v)]
    out, lse = distributed.attention(*leaves, mesh=mesh, method="ulysses", return_lse=True)
    loss = (lse * own(dlse)).sum()
    if rank in uses_out:
        loss = (out * own(dout)).sum()
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [distributed.unshard(x, mesh, dim=2, method="ulysses") for x in gradients]


@pytest.mark.parametrize("uses_out", [(), (1,)])
def test_gradients_where_ranks_use_other_results(uses_out, tmp_path):
    found, _ = ranks_of.run(tmp_path, 2, only_lse_and_only_one_rank_uses_out, uses_out)
    (q, k, v, dout), dlse = ranks_of.draw(tokens=60)
    dout, dlse = dout.double(), dlse.double()
    (dout[:, :, :30] if uses_out else dout).zero_()
    if uses_out:
        dlse[:, :, 30:] = 0
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    s = leaves[0] @ leaves[1].repeat_interleave(2, 1).mT * 32**-0.5
    results = s.softmax(-1) @ leaves[2].repeat_interleave(2, 1), s.logsumexp(-1)
    for x, y in zip(found, torch.autograd.grad(results, leaves, (dout, dlse))):
        assert x.double().norm() == y.norm() == 0 or relative(x, y) < 0.03


@pytest.mark.parametrize("is_own", [True, False])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.usefixtures("kernels_on_the_cpu")
def test_kernels_are_asked_for_what_the_emulation_is(layout, is_own, monkeypatch):
    """A stand-in is in the kernels' place, and it is itself emulated."""
    (q, k, v, dout), dlse = ranks_of.draw(tokens=60, d=64, layout=layout)
    mean = k.float().mean(1 if layout == "bshd" else 2) + 0.25
    chosen = dict(options.defaults(), causal="top-left")
    one_gpu = passes.Passes(0.2, layout, chosen)
    for told in ((is_own, None), (is_own, mean)):
        for given in (None, dlse):
            found = []
            for emulated in (True, False):
                monkeypatch.setattr(passes, "is_emulated", lambda q: emulated)  # noqa: B023
                out, lse = one_gpu.forward(q, k, v, is_own, *told)
                gradients = one_gpu.backward(dout, q, k, v, out, lse, given, is_own, *told)
                found.append((out, lse, *gradients))
            for x, y in zip(*found):
                assert relative(x, y) < 1e-3


# ---- training with FSDP2 -------------------------------------------------------------------------


def test_two_ranks_train_as_one(tmp_path):
    """examples/long_context.py, with both ways, of lengths that no number divides."""
    words = "--tokens 301 --steps 3 --width 64 --head-dim 32 --layers 2".split()
    (one,) = ranks_of.run(tmp_path, 1, ranks_of.train_example, 1, words)
    assert one[0] > one[1] > one[2]
    for method in ("ring", "ulysses"):
        two = ranks_of.run(tmp_path, 2, ranks_of.train_example, 2, [*words, "--method", method])
        assert two[0] == two[1] == pytest.approx(one, abs=2e-3), method


# ---- transformers --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_ranks_train_a_transformer_as_one(method, tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    (one,) = ranks_of.run(tmp_path, 1, ranks_of.train_transformer, 1, method, "", 2)
    assert not isinstance(one, str), one
    two = ranks_of.run(tmp_path, 2, ranks_of.train_transformer, 2, method, "", 2)[0]
    assert not isinstance(two, str), two
    assert float(two[0]) == pytest.approx(float(one[0]), rel=1e-3)
    for x, y in zip(two[1:], one[1:]):
        assert relative(x, y) < 0.05


@pytest.mark.parametrize(("wrong", "said"), [("positions", "shard position_ids"),
                                             ("padding", "has padding")])  # fmt: skip
def test_what_ranks_cannot_share_is_refused_on_every_rank(wrong, said, tmp_path):
    pytest.importorskip("transformers", reason="needs transformers")
    for result in ranks_of.run(tmp_path, 2, ranks_of.train_transformer, 2, "ring", wrong):
        assert result.startswith("SpecError") and said in result


# ---- which tokens are where ----------------------------------------------------------------------


def place(method, around, across, at=0, row=0):
    ring = object() if method != "ulysses" else None
    heads = object() if method != "ring" else None
    return sharding.Place(None, [], ring, heads, at, around, row, across)


@pytest.mark.parametrize(
    ("method", "around", "across"),
    [("ring", 1, 1), ("ring", 2, 1), ("ring", 7, 1), ("ulysses", 1, 3), ("both", 3, 4)],
)
@pytest.mark.parametrize("tokens", [24, 25, 100, 1000, 5000, 131072, 131073])
def test_every_token_is_in_one_place(method, around, across, tokens):
    places = [place(method, around, across, at, row)
              for at in range(around) for row in range(across)]  # fmt: skip
    spans = [sharding.spans_of(tokens, p) for p in places]
    have = sorted(span for of_rank in spans for span in of_rank)
    assert have[0][0] == 0 and have[-1][1] == tokens
    assert all(a[1] == b[0] for a, b in pairwise(have))
    lengths = [sum(end - first for first, end in of_rank) for of_rank in spans]
    assert min(lengths) > 0
    if method != "ulysses":
        bounds = sharding.chunk_bounds(tokens, 2 * around)
        unit = 256 if tokens >= 512 * around else 1
        assert all(bound % unit == 0 for bound in bounds[:-1])
        # A place has at most one unit more than another; the last unit may lack tokens.
        own = [sum(lengths[at * across : (at + 1) * across]) for at in range(around)]
        assert max(own) - min(own) <= 256 if unit > 1 else True


@pytest.mark.parametrize("around", [2, 3, 8])
@pytest.mark.parametrize("across", [1, 2])
def test_causal_work_is_balanced(around, across):
    """Scores that each place of a ring computes, by counting those that queries see."""
    tokens = 8192 * around
    work = []
    for at in range(around):
        rows = [place("both" if across > 1 else "ring", around, across, at, row)
                for row in range(across)]  # fmt: skip
        spans = [span for row in rows for span in sharding.spans_of(tokens, row)]
        work.append(sum((first + 1 + end) * (end - first) // 2 for first, end in spans))
    assert max(work) < 1.001 * min(work)


def cut_and_put_together(rank, method, ranks):
    mesh = ranks_of.mesh_of(method, ranks)
    results = []
    for tokens in (16, 33, 600):
        x = torch.arange(2 * tokens * 3).view(2, tokens, 3)
        part = distributed.shard(x, mesh, dim=1, method=method)
        whole = distributed.unshard(part, mesh, dim=-2, method=method)
        results.append(torch.equal(whole, x) and part.shape[1] < tokens)
    return results


@pytest.mark.parametrize(("method", "ranks"), [("ring", 3), ("ulysses", 3), ("both", 4)])
def test_unshard_undoes_shard(method, ranks, tmp_path):
    results = ranks_of.run(tmp_path, ranks, cut_and_put_together, method, ranks)
    assert results == [[True] * 3] * ranks
