"""Attention of DTensors, as PyTorch's context_parallel makes them, over gloo with the emulation."""

import contextlib

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

import distributed_ranks as ranks_of  # noqa: E402
from alike import relative  # noqa: E402
from test_distributed import NAMES  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import distributed  # noqa: E402
from sagebwd.core import options  # noqa: E402
from sagebwd.distributed import dtensors  # noqa: E402
from sagebwd.numerics.emulation import emulated_attention  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


@pytest.mark.parametrize(
    ("ranks", "tokens", "causal", "ours_outside"),
    [(2, 1536, True, False), (4, 104, True, True), (3, 90, False, False)],
)
def test_pytorchs_context_parallel_takes_us(ranks, tokens, causal, ours_outside, tmp_path):
    """PyTorch's chunks are as long as each other: those of 1536 tokens are not ours."""
    drawn = dict(heads=4, heads_kv=4, tokens=tokens)
    results = ranks_of.run(tmp_path, ranks, ranks_of.through_pytorch, ranks, drawn, causal,
                           ours_outside)  # fmt: skip
    chosen = dict(causal=causal)
    exact = ranks_of.exactly(drawn, chosen, False)
    whole = ranks_of.alone(drawn, chosen, False)
    for result in results:
        assert not isinstance(result, str), result
        found, calls = result
        assert calls == 1
        for i, x in zip((0, 2, 3, 4), found):
            assert relative(x, exact[i]) < relative(whole[i], exact[i]) + 2e-3, NAMES[i]


@pytest.mark.parametrize(
    ("ranks", "drawn", "causal"),
    [(4, dict(heads=4, heads_kv=2, tokens=104), True),
     (8, dict(heads=2, heads_kv=2, tokens=96), True),
     (4, dict(heads=4, heads_kv=1, tokens=88), False)],
)  # fmt: skip
def test_two_dimensions_of_a_mesh_share_tokens(ranks, drawn, causal, tmp_path):
    """Each place of the ring has several early chunks of PyTorch's, and as many late ones."""
    exact, whole = (call(drawn, dict(causal=causal), False)
                    for call in (ranks_of.exactly, ranks_of.alone))  # fmt: skip
    for found in ranks_of.run(tmp_path, ranks, ranks_of.on_two_dimensions, drawn, causal):
        assert not isinstance(found, str), found
        for i, x in zip((0, 2, 3, 4), found, strict=True):
            assert relative(x, exact[i]) < relative(whole[i], exact[i]) + 2e-3, NAMES[i]


def neighbours_under_a_mask(rank):
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = ranks_of.mesh_of("ring", 2)
    q = distribute_tensor(torch.randn(1, 2, 64, 32).bfloat16(), mesh, [Shard(2)])
    sagebwd.scaled_dot_product_attention(q, q, q)  # each key is seen: any order will do
    said = []
    for inside in (False, True):
        with _of_pytorch(mesh, 66) if inside else contextlib.nullcontext():
            try:
                sagebwd.scaled_dot_product_attention(q, q, q, is_causal=True)
            except options.SpecError as error:
                said.append(str(error))
    return said


def _of_pytorch(mesh, tokens):
    """PyTorch's context, which balances no number of tokens that 4 does not divide."""
    from torch.distributed.tensor.experimental import context_parallel

    x = torch.zeros(tokens)
    return context_parallel(mesh, buffers=[x], buffer_seq_dims=[0])


def test_neighbouring_tokens_under_a_causal_mask_are_refused(tmp_path):
    for result in ranks_of.run(tmp_path, 2, neighbours_under_a_mask):
        assert not isinstance(result, str), result
        outside, inside = result
        assert "outside PyTorch's context_parallel" in outside
        assert "multiple of twice the ranks" in inside


def what_ranks_must_share(rank):
    from torch.distributed.device_mesh import DeviceMesh

    mesh, said = ranks_of.mesh_of("ring", 2), []
    x = torch.randn(1, 2, 32, 32).bfloat16()
    whole = torch.zeros(1, 8)
    distributed.shard(whole, mesh, dim=1, method="ulysses").add_(1)
    for given in (dict(mesh=mesh, sink_logits=torch.zeros(2) if rank else None),
                  dict(mesh=DeviceMesh("cpu", [1, 0]))):  # fmt: skip
        try:
            distributed.attention(x, x, x, **given)
        except options.SpecError as error:
            said.append(str(error))
    return [*said, float(whole.sum())]


def test_sinks_of_some_ranks_and_decreasing_meshes_are_refused(tmp_path):
    for sinks, order, untouched in ranks_of.run(tmp_path, 2, what_ranks_must_share):
        assert "sink_logits" in sinks and "must increase" in order and untouched == 0


def other_placements(rank):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = ranks_of.mesh_of("ring", 2)
    x = torch.randn(1, 2, 64, 32).bfloat16()
    errors = []
    for placed in ((Shard(3), Shard(3)), (Shard(2), Replicate())):
        q, k = (distribute_tensor(x, mesh, [one]) for one in placed)
        try:
            sagebwd.scaled_dot_product_attention(q, k, k)
        except options.SpecError as error:
            errors.append(str(error))
    return errors


def test_other_placements_are_refused(tmp_path):
    for result in ranks_of.run(tmp_path, 2, other_placements):
        assert len(result) == 2 and "redistribute()" in result[0] and "key is placed" in result[1]


def heads_of_each(rank, heads, heads_kv):
    """The relative error where the ranks of a mesh share the heads, or why they cannot."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = ranks_of.mesh_of("ring", torch.distributed.get_world_size())
    drawn = dict(heads=heads, heads_kv=heads_kv, tokens=40)
    # A CPU has no kernels.
    dtensors.on_one_rank = lambda *qkv, **given: emulated_attention(*qkv)
    (q, k, v, _), _ = ranks_of.draw(**drawn)
    given = [distribute_tensor(t, mesh, [Shard(1)]) for t in (q, k, v)]
    try:
        out = sagebwd.scaled_dot_product_attention(*given, enable_gqa=True).full_tensor()
    except options.SpecError as error:
        return str(error)
    return relative(out, ranks_of.exactly(drawn, {}, False)[0])


@pytest.mark.parametrize(("ranks", "heads", "heads_kv", "fits"), [
    (2, 12, 4, True), (3, 10, 5, True), (2, 3, 3, True), (2, 12, 3, False), (4, 4, 2, False),
    (2, 1, 1, False)])  # fmt: skip
def test_each_rank_has_the_key_heads_of_its_query_heads(ranks, heads, heads_kv, fits, tmp_path):
    """12 and 3 heads give 2 ranks 6 and 2, and 6 and 1: numbers that would do, of other heads."""
    for found in ranks_of.run(tmp_path, ranks, heads_of_each, heads, heads_kv, timeout=6):
        if fits:
            assert not isinstance(found, str) and found < 0.03, found
        else:
            assert f"query has {heads} heads and key and value have {heads_kv}, which" in found


def first_values(rank):
    """The parameters are cut up before they have values, as by FSDP on the meta device."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, found = ranks_of.mesh_of("ring", 2), []
    for heads in (None, 3):
        router = sagebwd.nn.BlockRouter(32, heads=heads)
        for name, weight in list(router.named_parameters()):
            cut = distribute_tensor(torch.full_like(weight, torch.nan), mesh, [Shard(0)])
            router.register_parameter(name, torch.nn.Parameter(cut))
        router.reset_parameters()
        found += [weight.full_tensor().detach() for weight in router.parameters()]
    return found


def test_parameters_that_are_cut_up_get_their_first_values(tmp_path):
    for found in ranks_of.run(tmp_path, 2, first_values):
        assert not isinstance(found, str), found
        assert len(found) == 4 and found[2].shape == (3, 32, 32)
        assert all(torch.equal(x, torch.eye(32).expand(x.shape)) for x in found)


def under_way(rank):
    """Gradients for what a collective has not brought yet, and for what it has."""
    from torch.distributed import _functional_collectives as collectives

    mesh, found = ranks_of.mesh_of("ring", 2), []
    x = torch.randn(1, 2, 16, 32, generator=torch.Generator().manual_seed(rank)).bfloat16()
    for arrived in (False, True):
        leaf = x.clone().requires_grad_()
        whole = collectives.all_gather_tensor(x, 0, mesh)
        assert type(whole) is collectives.AsyncCollectiveTensor
        with pytest.raises(options.SpecError, match="the kernels need a CUDA GPU"):
            sagebwd.attention(whole, whole, whole)
        whole = collectives.all_gather_tensor_autograd(leaf, 0, mesh)
        whole = whole * 1 if arrived else whole
        out = distributed.attention(whole, whole, whole, mesh=mesh)
        (gradient,) = torch.autograd.grad(out.float().square().sum(), leaf)
        found += [out.detach(), gradient]
    return found


def test_what_is_under_way_is_waited_for(tmp_path):
    for found in ranks_of.run(tmp_path, 2, under_way):
        assert not isinstance(found, str), found
        assert all(map(torch.equal, found[:2], found[2:])) and found[1].norm() > 0


def compiled_around(rank):
    """Code around attention of DTensors and around unshard runs compiled, and without that."""
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = ranks_of.mesh_of("ring", 2)
    x = torch.randn(1, 2, 64, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    q = distribute_tensor(x, mesh, [Shard(2)])

    def attend(q):
        return torch.nn.functional.scaled_dot_product_attention(q, q, q) * 2

    def gather(x):
        return distributed.unshard(x, mesh, dim=2) * 2

    with sagebwd.sdpa():
        found = [call(q).full_tensor()
                 for call in (attend, torch.compile(attend, backend="aot_eager"))]  # fmt: skip
    own = distributed.shard(x, mesh, dim=2)
    return *found, torch.compile(gather, backend="aot_eager")(own), x * 2


def test_torch_compile_leaves_a_gap_for_them(tmp_path):
    for found in ranks_of.run(tmp_path, 2, compiled_around):
        assert not isinstance(found, str), found
        assert torch.equal(found[0], found[1]) and torch.equal(found[2], found[3])
