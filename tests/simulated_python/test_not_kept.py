"""recompute_qk=True: normed and rotated queries and keys are formed again in the backward. On a
simulated GPU, and as PyTorch computes norm and RoPE."""

import functools
import gc
import itertools
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd.core import front, front_direct, front_end, front_kernels  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mixed import on_the_simulator  # noqa: E402, F401

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))
from alike import bytes_kept  # noqa: E402

pytestmark = [pytest.mark.usefixtures("on_the_simulator"), pytest.mark.skipif(
    not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"),
    reason="needs PyTorch 2.8")]  # fmt: skip

FIRSTS = torch.tensor([0, 40, 40, 130], dtype=torch.int32)
MASK = torch.tensor([[True, False, True], [False, True, True]])[None, None]


def packed(q, k, v, gate=None, **given):
    q, k, v, gate = (t if t is None else t[0].transpose(0, 1) for t in (q, k, v, gate))
    out = sagebwd.attention(q, k, v, cu_seqlens_q=FIRSTS, cu_seqlens_k=FIRSTS, gate=gate, **given)
    return out.transpose(0, 1)[None]


def tokens_first(q, k, v, gate=None, **given):
    q, k, v, gate = (t if t is None else t.transpose(1, 2) for t in (q, k, v, gate))
    return sagebwd.attention(q, k, v, gate=gate, layout="bshd", **given).transpose(1, 2)


def branches(q, k, v, **given):
    found = sagebwd.sparse_linear_attention(q, k, v, alpha=0.4, block_mask=MASK,
                                            return_branches=True, **given)  # fmt: skip
    return found[0] + found[2]


MODULE = sagebwd.nn.SparseLinearAttention(64, 2, heads_kv=1, density=0.5, alpha="head")
ATTENDS = {
    "all keys": functools.partial(sagebwd.attention, causal=True),
    "tokens first": tokens_first,
    "packed": packed,
    "a sink": functools.partial(sagebwd.attention, sink_logits=torch.zeros(2)),
    "listed blocks": functools.partial(sagebwd.block_sparse_attention, block_mask=MASK),
    "both branches": functools.partial(sagebwd.sparse_linear_attention, alpha=0.4, block_mask=MASK),
    "an estimate": functools.partial(sagebwd.sparse_linear_attention, alpha="estimated",
                                     block_mask=MASK),
    "branches": branches,
    "without kernels": functools.partial(sagebwd.sparse_linear_attention, alpha=0.4,
                                         block_mask=MASK, precision="exact"),
    "a module": MODULE,
    "a module's router learns": functools.partial(MODULE, routing="straight-through"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def noted(request, monkeypatch):
    """Notes the results of norm and RoPE, by references that keep nothing, and counts them."""
    front_direct._known.clear()
    by_kernels = getattr(request, "param", "kernels") == "kernels"
    if by_kernels:
        monkeypatch.setattr(front_kernels, "may_run", lambda t: True)
    monkeypatch.setattr(front, "operators", lambda: operators)

    how = "" if by_kernels else "_without_kernels"

    class operators:  # noqa: N801
        front_backward = staticmethod(getattr(front_kernels, f"_backward{how}"))

        @staticmethod
        def front_forward(*given):
            noted.formed += 1
            return getattr(front_kernels, f"_forward{how}")(*given)

    class noted:  # noqa: N801
        ys, formed = [], 0

        @classmethod
        def stay(cls):
            """Whether all results that were given since this was asked last are still there."""
            there = {not y.expired() for y in cls.ys}
            cls.ys.clear()
            (all_of_them,) = there
            return all_of_them

    def note(*given, qk_norm_rope=front.qk_norm_rope, **named):
        found = qk_norm_rope(*given, **named)
        noted.ys.extend(StorageWeakRef(y.untyped_storage()) for y in found)
        return found

    forward = front_direct.Form.forward
    monkeypatch.setattr(front_end.front, "qk_norm_rope", note)
    monkeypatch.setattr(front_direct.Form, "forward", lambda *given: (
        setattr(noted, "formed", noted.formed + 1), forward(*given))[1])  # fmt: skip
    yield noted
    front_direct._known.clear()


def tensors():
    """q, k, v, a gate and dout, of 2 heads on 1 and 130 tokens of 64 channels."""
    return [drawn(1, heads, 130, 64, seed=s, dtype=torch.bfloat16) + 0.3
            for s, heads in enumerate((2, 1, 1, 2, 2))]  # fmt: skip


def given_of(tokens=130):
    angles = 2 * drawn(tokens, 32, seed=7, dtype=torch.float32)
    gain = 1 + 0.2 * drawn(64, seed=8, dtype=torch.bfloat16)
    return dict(q_norm=gain.requires_grad_(), k_norm=True, rope=(angles.cos(), angles.sin()))


def leaves_of(*given):
    return [t.detach().requires_grad_() for t in given]


def passes(attend, gated=True, **more):
    q, k, v, gate, dout = tensors()
    given = given_of()
    leaves = leaves_of(q, k, v, *([gate] if gated else []))
    keywords = dict(gate=leaves[3]) if gated else {}
    out = attend(*leaves[:3], **given, **keywords, **more)
    out.backward(dout)
    return out, *(t.grad for t in (*leaves, given["q_norm"]))


def assert_same(found, wanted):
    assert len(found) == len(wanted)
    for x, y in zip(found, wanted):
        assert x.dtype == y.dtype and torch.equal(x, y) and y.isfinite().all() and y.any()


@pytest.mark.parametrize("noted, name", [
    *(("kernels", name) for name in ATTENDS), *(("formulas", name) for name in list(ATTENDS)[::3])],
    indirect=["noted"])  # fmt: skip
def test_the_same_bits_without_keeping_them(noted, name):
    gated = name != "branches"
    for _ in range(2):  # by operators, then past them
        wanted = passes(ATTENDS[name], gated)
        before = noted.formed
        assert_same(passes(ATTENDS[name], gated, recompute_qk=True), wanted)
        assert noted.formed == before + 2  # once forward, once backward
    for again in (False, True):
        leaves = leaves_of(*tensors()[:3])
        noted.ys.clear()
        out = ATTENDS[name](*leaves, **given_of(), recompute_qk=again)
        assert noted.stay() is not again and out.requires_grad


def saved_by(attend, **more):
    """How many bytes are kept for the backward."""
    q, k, v, gate, _ = leaves_of(*tensors())
    return bytes_kept(lambda: attend(q, k, v, gate=gate, **given_of(), **more))


@pytest.mark.parametrize("name", ["all keys", "packed", "listed blocks", "both branches",
                                  "a module"])  # fmt: skip
def test_it_saves_the_bytes_of_q_and_k(name):
    apart = saved_by(ATTENDS[name]) - saved_by(ATTENDS[name], recompute_qk=True)
    assert apart == 2 * 3 * 130 * 64


@pytest.mark.parametrize("name", ATTENDS)
def test_a_graph_serves_twice_and_in_parts(noted, name):
    q, k, v, _, dout = tensors()
    results = []
    for again in (False, True):
        given, leaves = given_of(), leaves_of(q, k, v)
        out = ATTENDS[name](*leaves, **given, recompute_qk=again)
        before = noted.formed
        # Norm and RoPE have no part in this one.
        of_v = torch.autograd.grad(out, leaves[2], dout, retain_graph=True)
        of_all = torch.autograd.grad(out, [*leaves, given["q_norm"]], dout, retain_graph=True)
        more = torch.autograd.grad(out, [*leaves, given["q_norm"]], 2 * dout)
        with pytest.raises(RuntimeError, match="a second time"):
            torch.autograd.grad(out, leaves, dout)
        results.append((*of_v, *of_all, *more))
    assert_same(*reversed(results))
    assert noted.formed == before + 3


def test_a_backward_without_norm_and_rope_leaves_nothing(noted, monkeypatch):
    results = []
    formed_again = front.formed_again
    monkeypatch.setattr(front, "formed_again", lambda *given: (
        results.append(formed_again(*given)), [StorageWeakRef(y.untyped_storage())
                                              for y in results[-1]], results[-1])[2])  # fmt: skip
    leaves = leaves_of(*tensors()[:3])
    out = sagebwd.attention(*leaves, **given_of(), recompute_qk=True)
    torch.autograd.grad(out, leaves[2], tensors()[4], retain_graph=True)
    (ys,) = results
    kept = [StorageWeakRef(y.untyped_storage()) for y in ys]
    results.clear()
    del ys
    assert all(y.expired() for y in kept) and out.requires_grad


@pytest.mark.parametrize("name, reentrant", [*zip(ATTENDS, itertools.cycle([False, True]))])
def test_checkpoints_give_the_same_bits(name, reentrant):
    def checkpointed(*given, **more):
        return checkpoint(functools.partial(ATTENDS[name], **more), *given, use_reentrant=reentrant)

    wanted = passes(ATTENDS[name], gated=False)
    assert_same(passes(checkpointed, gated=False, recompute_qk=True), wanted)


@pytest.mark.parametrize("name", ATTENDS)
def test_hooks_of_the_caller_see_all_others_once(name):
    """x is read once in a backward, though attention's node and its own need it."""
    wanted = passes(ATTENDS[name], gated=False)
    packs, reads = {}, []

    def pack(t):
        packs[len(packs)] = t.detach().clone()
        return len(packs) - 1

    def unpack(number):
        reads.append(number)
        return packs[number]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = passes(ATTENDS[name], gated=False, recompute_qk=True)
    assert_same(found, wanted)
    assert len(reads) == len(set(reads)) and packs


@pytest.mark.parametrize("which", ["q", "v", "out"])
def test_changes_in_place_are_refused(which):
    q, k, v, _, dout = tensors()
    leaves = leaves_of(q, k, v)
    out = sagebwd.attention(*leaves, **given_of(), recompute_qk=True)
    with torch.no_grad():
        {"q": leaves[0], "v": leaves[2], "out": out}[which].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out if which != "out" else out.clone(), leaves, dout)


@pytest.mark.parametrize("name", ATTENDS)
def test_it_is_differentiated_once(name):
    leaves = leaves_of(*tensors()[:3])
    out = ATTENDS[name](*leaves, **given_of(), recompute_qk=True)
    (first,) = torch.autograd.grad(out.float().square().sum(), leaves[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        first.float().sum().backward()


@pytest.mark.parametrize("learned", ["v", "k", "gain"])
def test_part_of_it_is_learned(noted, learned):
    q, k, v, _, dout = tensors()
    results = []
    for again in (False, True):
        given = given_of()
        given["q_norm"].requires_grad_(learned == "gain")
        t = {"v": v, "k": k, "gain": given["q_norm"]}[learned].requires_grad_()
        noted.ys.clear()
        out = sagebwd.attention(q, k, v, **given, recompute_qk=again)
        assert noted.stay() is (not again or learned == "v")
        results.append((out, *torch.autograd.grad(out, t, dout)))
        t.requires_grad_(False)
    assert_same(*reversed(results))
    with torch.no_grad():
        assert torch.equal(sagebwd.attention(q, k, v, **given_of(), recompute_qk=True),
                           results[0][0])  # fmt: skip


def test_nothing_waits_for_the_collector():
    """A node that a hook's tensor refers to would keep itself."""
    gc.collect()
    gc.disable()
    try:
        leaves = leaves_of(*tensors()[:3])
        out, lse = sagebwd.attention(*leaves, **given_of(), return_lse=True, recompute_qk=True)
        kept = [StorageWeakRef(t.untyped_storage()) for t in (out, lse)]
        del out, lse
        assert all(t.expired() for t in kept)
    finally:
        gc.enable()
