"""Norm, RoPE and gate as arguments of `sagebwd.distributed.attention`, over gloo with the
emulation."""

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

import inspect  # noqa: E402

import distributed_front as fronts  # noqa: E402
import distributed_ranks as ranks_of  # noqa: E402
from alike import relative  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import distributed  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

#: Beyond the error of one process.
MORE = 1e-3


def every_case(rank, method, ranks):
    return [fronts.together(rank, method, ranks, case) for case in fronts.CASES.values()]


@pytest.mark.parametrize(("method", "ranks"), [("ring", 2), ("ring", 3), ("ulysses", 2),
                                               ("both", 4)])  # fmt: skip
def test_ranks_together_give_what_one_process_gives(method, ranks, tmp_path):
    found, *others = ranks_of.run(tmp_path, ranks, every_case, method, ranks)
    assert not isinstance(found, str), found
    assert others == [[None] * len(fronts.CASES)] * (ranks - 1)
    for results, (name, case) in zip(found, fronts.CASES.items()):
        wrong = fronts.wrong_among(results, fronts.alone(case), fronts.exactly(case), MORE)
        assert wrong == [], name


@pytest.mark.parametrize(("method", "ranks"), [("ring", 2), ("both", 4)])
def test_chunks_of_256_tokens_are_quantised_as_the_whole(method, ranks, tmp_path):
    """Then only roundings of parts of out and of the gradients are left. In the sums of a gain's
    gradient more of the sum cancels than of the roundings; other groups would make 0.02 there."""
    case = (dict(heads=2, heads_kv=2, tokens=1000), dict(causal=True), fronts.CASES["one table"][2])
    found, *_ = ranks_of.run(tmp_path, ranks, fronts.together, method, ranks, case)
    assert not isinstance(found, str), found
    for name, right in fronts.alone(case).items():
        assert relative(found[name], right) < (1e-2 if "norm" in name else 4e-3), name


def said_by(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def wrong_calls(rank):
    """A rank says this of calls that are wrong on rank 1 alone, and of one that is right."""
    mesh = ranks_of.mesh_of("ring", 2)
    (q, k, v, _), _ = ranks_of.draw(tokens=64)
    q, k, v = (distributed.shard(t, mesh, dim=2) for t in (q, k, v))
    cos, sin = fronts.front_inputs.table(64, 16)
    own = tuple(distributed.shard(t, mesh, dim=-2) for t in (cos, sin))
    right = dict(q_norm=True, rope=own)
    wrong = [dict(q_norm=True, rope=(cos, sin)), dict(q_norm=torch.ones(31), rope=own),
             dict(q_norm=True, rope=own, gate=q[..., :1]), dict(rope=own), dict(q_norm=3, rope=own),
             dict(q_norm=True, rope=own, norm_eps=1e-5), dict(q_norm=True, rope=own, gate=q)]
    return [said_by(lambda given=given: distributed.attention(
        q, k, v, mesh=mesh, **(given if rank == 1 else right)))
            for given in (*wrong, right)]  # fmt: skip


def test_what_is_wrong_on_one_rank_is_said_on_all(tmp_path):
    of_0, of_1 = ranks_of.run(tmp_path, 2, wrong_calls)
    says = ["rope's cos has 64 tokens, and this rank has 32: pass the rows of its tokens, "
            "sagebwd.distributed.shard(cos, mesh, dim=-2, method='ring')",
            "q_norm has shape (31,)", "gate has shape", "norm and RoPE",
            "q_norm is an int", "norm and RoPE", "gate"]  # fmt: skip
    assert len(of_0) == len(of_1) == len(says) + 1 and of_0[-1] == of_1[-1] == "no error"
    for said, *both in zip(says, of_0, of_1):
        for one in both:
            assert said in one and one != "no error", (said, both)


def test_keywords_are_those_of_attention():
    ours, theirs = (inspect.signature(function).parameters
                    for function in (distributed.attention, sagebwd.attention))  # fmt: skip
    names = [*inspect.signature(sagebwd.qk_norm_rope).parameters][2:-1] + ["gate"]
    assert {name: ours[name].default for name in names} == {name: theirs[name].default
                                                            for name in names}  # fmt: skip
    with pytest.raises(TypeError, match="takes no recompute_qk: messages between ranks need"):
        distributed.attention(None, None, None, mesh=None, recompute_qk=True)


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_ranks_train_a_fused_transformer_as_one(method, tmp_path):
    """Qwen3's QK-norm and RoPE by `fuse`, with the positions of each rank's tokens."""
    pytest.importorskip("transformers", reason="needs transformers")
    (one,) = ranks_of.run(tmp_path, 1, ranks_of.train_transformer, 1, method, "", 1, "Qwen3")
    assert not isinstance(one, str), one
    two = ranks_of.run(tmp_path, 2, ranks_of.train_transformer, 2, method, "", 1, "Qwen3")[0]
    assert not isinstance(two, str), two
    assert float(two[0]) == pytest.approx(float(one[0]), rel=1e-3)
    for x, y in zip(two[1:], one[1:]):
        assert relative(x, y) < 0.05
    if hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"):  # PyTorch 2.8
        again = ranks_of.run(tmp_path, 2, ranks_of.train_transformer, 2, method, "", 1, "Qwen3",
                             True)[0]  # fmt: skip
        assert not isinstance(again, str), again
        assert all(map(torch.equal, again, two))
