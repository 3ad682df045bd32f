"""Masks whose blocks are found once, on a simulated GPU, beside those that each call finds."""

import functools
import itertools
import re

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402

import simulator_needed  # noqa: E402, F401

from test_intervals import made  # noqa: E402
from test_linear_branch import drawn, kernels_for_lists  # noqa: E402, F401
from test_mask import MASKS, QUERIES  # noqa: E402
from test_mixed import on_the_simulator  # noqa: E402, F401

pytestmark = pytest.mark.usefixtures("on_the_simulator")


class Operators(TorchDispatchMode):
    """Counts what finds the blocks of masks."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found += function is torch.ops.sagebwd.mask_bits.default
        return function(*args, **(kwargs or {}))


@pytest.fixture
def compiler():
    """PyTorch's compiler."""
    torch.compiler.reset()
    return functools.partial(torch.compile, fullgraph=True, backend="aot_eager")


def results(q, k, v, **given):
    out, lse = sagebwd.attention(q, k, v, return_lse=True, **given)
    weights = drawn(*out.shape, seed=9, dtype=out.dtype)
    return out, lse, *torch.autograd.grad(out, (q, k, v), weights)


@pytest.mark.parametrize("name, given", [*zip(MASKS, itertools.cycle(
    [{}, {"causal": True, "precision": "gradients16"}]))], ids=str)  # fmt: skip
def test_it_gives_the_bits_of_the_mask_itself(name, given):
    mask = MASKS[name][0]
    kept = masks.block_mask(mask, 2, 2, QUERIES, QUERIES, device="cpu")
    assert isinstance(kept, sagebwd.BlockMask)
    found = results(*made(QUERIES), mask=kept, **given)
    assert all(map(torch.equal, found, results(*made(QUERIES), mask=mask, **given)))


SLOPES = torch.tensor([0.05, 0.01])
SCORES = {
    "softcap": "5.0 * tanh(s / 5.0)",
    "alibi": masks.trace_score("s + slope[h] * float(k - q)", {"slope": SLOPES}),
}


@pytest.mark.parametrize("score", SCORES)
def test_beside_a_function_of_the_score(score, compiler):
    mask = MASKS["prefixes of heads"][0]
    kept = masks.block_mask(mask, 2, 2, QUERIES, QUERIES)
    given = [results(*made(QUERIES), mask=one, score=SCORES[score]) for one in (kept, mask)]
    assert all(map(torch.equal, *given))
    out = compiler(lambda *qkv: sagebwd.attention(*qkv, mask=kept, score=SCORES[score]))(
        *(t.detach() for t in made(QUERIES)))  # fmt: skip
    assert torch.equal(out, given[0][0])


def test_calls_do_not_find_the_blocks_again():
    mask = masks.trace_mask("doc[b, q] == doc[b, k]", {"doc": torch.arange(400).view(2, 200) // 70})
    kept = masks.block_mask(mask, 2, 2, QUERIES, QUERIES)
    with Operators() as operators:
        for _ in range(2):
            results(*made(QUERIES), mask=kept)
        assert operators.found == 0
        results(*made(QUERIES), mask=mask)
        assert operators.found == 1


def test_changed_tensors_are_seen_after_refresh():
    lengths = torch.tensor([200], dtype=torch.int32)
    kept = masks.block_mask(masks.trace_mask("k < length[0]", {"length": lengths}), 2, 2, QUERIES,
                            QUERIES)  # fmt: skip
    q, k, v = made(QUERIES)
    before = sagebwd.attention(q, k, v, mask=kept)
    lengths.fill_(70)
    assert torch.equal(sagebwd.attention(q, k, v, mask=kept), before)
    bits = kept.bits.data_ptr()
    assert kept.refresh() is kept and kept.bits.data_ptr() == bits
    assert torch.equal(sagebwd.attention(q, k, v, mask=kept),
                       sagebwd.attention(q, k, v, mask="k < 70"))  # fmt: skip
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        before.sum().backward()


def test_one_that_inference_mode_has_made_or_refreshed_trains():
    lengths = torch.tensor([200])
    with torch.inference_mode():
        mask = masks.trace_mask("k < length[0]", {"length": lengths.int()})
        kept = masks.block_mask(mask, 2, 2, QUERIES, QUERIES)
        found = sagebwd.attention(*made(QUERIES), mask=kept)
    trained = results(*made(QUERIES), mask=kept)
    assert torch.equal(found, trained[0])
    with torch.inference_mode():
        mask.operands["length"].fill_(70)
        kept.refresh()
    wanted = results(*made(QUERIES), mask="k < 70")
    assert all(map(torch.equal, results(*made(QUERIES), mask=kept), wanted))


def test_sizes_that_do_not_change_the_mask_may_differ():
    q, k, v = made(QUERIES, batch=3, heads=4)
    kept = masks.block_mask("q >= k", 1, 1, QUERIES, QUERIES, device="cpu")
    assert torch.equal(sagebwd.attention(q, k, v, mask=kept),
                       sagebwd.attention(q, k, v, mask="q >= k"))  # fmt: skip


@pytest.mark.parametrize("sizes", [(3, 2, 200, 200), (1, 2, 200, 200), (2, 1, 200, 200),
                                   (2, 2, 201, 200), (2, 2, 200, 199)])  # fmt: skip
def test_calls_of_other_sizes_are_refused(sizes):
    kept = masks.block_mask(MASKS["prefixes of heads"][0], *sizes)
    said = re.escape(f"= {sizes}, and the call has (2, 2, 200, 200): make one by")
    with pytest.raises(sagebwd.SpecError, match=f"^mask is a BlockMask for .* {said}"):
        sagebwd.attention(*made(QUERIES), mask=kept)


@pytest.mark.parametrize("name, kept", [("text", False), ("documents", False), ("function", True),
                                        ("documents", True)])  # fmt: skip
def test_compiled(name, kept, compiler):
    mask = MASKS[name][0]
    if kept:
        mask = masks.block_mask(mask, 2, 2, QUERIES, QUERIES, device="cpu")

    def attend(*qkv):
        return sagebwd.attention(*qkv, mask=mask) * 1.0

    compiled = compiler(attend)
    found, expected = (run(*(t.detach() for t in made(QUERIES))) for run in (compiled, attend))
    assert torch.equal(found, expected)
    leaves = made(QUERIES)
    gradients = [torch.autograd.grad(run(*leaves).sum(), leaves) for run in (compiled, attend)]
    assert all(map(torch.equal, *gradients))


def test_a_function_with_tensors_is_traced_outside_of_compiled_code(compiler):
    lengths = masks.operand("length", torch.tensor([70], dtype=torch.int32))
    sees = lambda b, h, q, k: k < lengths[0]  # noqa: E731
    compiled = compiler(lambda *qkv: sagebwd.attention(*qkv, mask=sees))
    with pytest.raises(Exception, match="mask is a function that indexes length: in compiled code"):
        compiled(*made(QUERIES))


def test_the_operators_follow_pytorchs_rules():
    q, k, v = (t.detach()[:, :, :100].contiguous() for t in made(QUERIES))
    spec = "precision=gradients16 causal=none mask=doc[b,q]==doc[b,k]"
    tables = torch.arange(2 * 100, dtype=torch.int32) // 30
    given = q, k, tables, [2, 100], "bhsd", spec
    bits = torch.ops.sagebwd.mask_bits(*given)
    torch.library.opcheck(torch.ops.sagebwd.mask_bits.default, given)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    torch.library.opcheck(torch.ops.sagebwd.masked_forward.default,
                          (*leaves, tables, [2, 100], bits, None, "bhsd", spec))  # fmt: skip


@pytest.mark.parametrize("mask, sizes, message", [
    (5, (1, 1, 9, 9), "mask is an int; pass a function of"),
    (masks.trace_score("s + 1.0"), (1, 1, 9, 9), "mask is"),
    ("q + k", (1, 1, 9, 9), "a mask is a bool"),
    ("doc[q] == 1", (1, 1, 9, 9), "no tensor of that name is given"),
    ("q >= k", (1, 1, 0, 9), "queries=0: pass a whole number of at least 1"),
])  # fmt: skip
def test_refusals(mask, sizes, message):
    with pytest.raises((sagebwd.SpecError, TypeError), match=message):
        masks.block_mask(mask, *sizes, device="cpu")
