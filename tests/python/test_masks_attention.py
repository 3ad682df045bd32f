"""Masks as intervals in `sagebwd.attention`: their arguments, and which functions take them.

The stand-in for kernels computes; tests/simulated_python and tests/gpu_python have kernels.
"""

import pytest
import warm

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import interval_kernels_on_the_cpu, kernels_on_the_cpu  # noqa: E402, F401

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

TOKENS = 48
MADE = {
    "documents": masks.documents(lengths=[20, 28]),
    "documents, not causal": masks.documents(lengths=[20, 28], causal=False),
    "prefix": masks.prefix_lm([17, 5], TOKENS),
    "window and global": masks.window_and_global(TOKENS, 7, 3, causal=False),
    "of each head": masks.from_bool(torch.stack([
        masks.documents(lengths=[n, TOKENS - n]).dense(TOKENS)[0, 0] for n in (9, 40)])[None]),
    "bottom right": masks.padding([TOKENS - 9], TOKENS, queries=30, causal="bottom-right"),
}  # fmt: skip


@pytest.mark.parametrize("name", MADE)
def test_arguments_say_the_mask(name, interval_kernels_on_the_cpu):  # noqa: F811
    mask = MADE[name]
    assert mask.arguments.keys() == {"causal", "startend_row_indices"}
    assert mask.arguments["startend_row_indices"] is mask.startend_row_indices  # a graph's own
    generator = torch.Generator().manual_seed(0)
    queries = 30 if name == "bottom right" else TOKENS
    sizes = (4, queries), (2, TOKENS), (2, TOKENS), (4, queries)
    q, k, v, dout = (torch.randn(2, *size, 64, generator=generator).bfloat16() for size in sizes)
    seen = mask.dense(queries)
    seen = seen if seen.shape[1] == 1 else seen.repeat_interleave(2, 1)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=seen,
                                                             enable_gqa=True)  # fmt: skip
    wanted = right, *torch.autograd.grad(right, leaves, dout.double())
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = sagebwd.attention(*leaves, return_lse=True, **mask.arguments)
    found = out, *torch.autograd.grad(out, leaves, dout)
    parts = sagebwd.attention_forward(q, k, v, **mask.arguments)
    gradients = sagebwd.attention_backward(dout, q, k, v, *parts, **mask.arguments)
    assert all(map(torch.equal, (out, lse, *found[1:]), (*parts, *gradients)))
    for x, y in zip(found, wanted):
        assert (x.double() - y).norm() < 0.03 * y.norm()


def test_the_module_is_there_from_the_package_alone():
    code = "import sagebwd; print(sagebwd.masks.prefix_lm(1, 2).arguments['causal'])"
    assert warm.run(["-c", code], loaded="torch").stdout == "False\n"


# ---- what is said where masks are not taken ------------------------------------------------------

ELSEWHERE = {
    "flash_attn_func": sagebwd.flash_attn_func, "sageattn": sagebwd.sageattn,
    "scaled_dot_product_attention": sagebwd.scaled_dot_product_attention,
    "distributed": sagebwd.distributed.attention,
    "sdpa": lambda *_, **given: sagebwd.sdpa(**given),
}  # fmt: skip
X = torch.zeros(1, 1, 8, 64, dtype=torch.bfloat16)


@pytest.mark.parametrize("argument", ["startend_row_indices", "mask", "score"])
@pytest.mark.parametrize("name", ELSEWHERE)
def test_functions_without_masks_name_the_one_that_has_them(name, argument):
    with pytest.raises(TypeError, match=rf"{argument}.*argument of sagebwd.attention,"):
        ELSEWHERE[name](X, X, X, **{argument: None})


@pytest.mark.parametrize("argument", ["startend_row_indices", "mask"])
def test_functions_with_lists_of_blocks_name_it_too(argument):
    with pytest.raises(TypeError, match=rf"{argument}: sagebwd.attention has it"):
        sagebwd.block_sparse_attention(X, X, X, **{argument: None})


def test_a_mask_is_led_to_intervals_where_they_are_taken():
    mask = torch.ones(8, 8, dtype=torch.bool).tril()
    for function, given in ((sagebwd.attention, ()), (sagebwd.attention_forward, ()),
                            (emulation.emulated_attention, ()), (sagebwd.trace, (X,)),
                            (sagebwd.attention_backward, (X, X[..., 0].float(), X))):  # fmt: skip
        with pytest.raises(TypeError, match=r"pass .*sagebwd.masks.from_bool") as refused:
            function(X, X, X, *given, attn_mask=mask)
        advice = str(refused.value).partition("pass **")[2].partition(" for a mask")[0]
        told = eval(advice, {"sagebwd": sagebwd, "attn_mask": mask})
        said = masks.Intervals(told["startend_row_indices"], told["causal"])
        assert torch.equal(said.dense(8)[0, 0], mask)


@pytest.mark.parametrize("name", ["flash_attn_func", "sageattn"])
def test_a_mask_is_led_to_attention_from_elsewhere(name):
    with pytest.raises(TypeError, match="attention takes a mask= of positions") as refused:
        ELSEWHERE[name](X, X, X, attn_mask=X)
    assert "from_bool" not in str(refused.value)  # its arguments are not taken there
