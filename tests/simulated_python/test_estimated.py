"""The kernels of an estimated alpha on a simulated GPU, whose memory is that of PyTorch's CPU
tensors, against the formula in FP64."""


import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from torch.utils.checkpoint import checkpoint  # noqa: E402

from sagebwd.core import forms  # noqa: E402
from sagebwd.sla import estimated_kernels, linear_kernels, mixing  # noqa: E402

import simulator_needed  # noqa: E402, F401


@pytest.fixture(autouse=True)
def on_the_simulator(monkeypatch):
    """CPU tensors of 16 bits take the kernels that they would take on a GPU. Memory that these
    leave unwritten is NaN. Gives the kernels' names."""
    ran = []

    def take(q, k, v, mask, sizes):
        return q.dtype in (torch.bfloat16, torch.float16) and mask.dtype == torch.bool

    def run(operation, device, kernel, *given):
        ran.append(kernel)
        return run_there(operation, 0, kernel, *given)

    monkeypatch.setattr(linear_kernels, "take", take)
    run_there = linear_kernels.run
    monkeypatch.setattr(linear_kernels, "run", run)
    monkeypatch.setattr(estimated_kernels, "forward", estimated_kernels._forward)
    monkeypatch.setattr(estimated_kernels, "backward", estimated_kernels._backward)
    operation = forms.operation
    monkeypatch.setattr(forms, "operation", lambda device, *told, **of: operation(0, *told, **of))
    monkeypatch.setattr(forms, "stream_of", lambda device: 0)
    torch.use_deterministic_algorithms(True)
    assert torch.ones(3).new_empty(3).isnan().all()
    yield ran
    torch.use_deterministic_algorithms(False)


THREE = ["estimated_rest", "estimated_dq", "estimated_dk"]


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Case:
    """Keys lie around centres, each for 40 tokens, so that means of blocks differ."""

    def __init__(self, dtype, channels, sizes, heads=4, heads_kv=2, queries=300, keys=333, batch=2,
                 of_mask=(2, 4), offset=0.5, mask=None, size_of_drest=1.0):  # fmt: skip
        self.sizes, self.scale = sizes, channels**-0.5
        q = drawn(batch, heads, queries, channels, seed=0)
        k = drawn(batch, heads_kv, keys, channels, seed=1) + offset
        centres = drawn(batch, heads_kv, -(-keys // 40), channels, seed=2)
        k += centres.repeat_interleave(40, 2)[:, :, :keys]
        self.q, self.k = (t.to(dtype).requires_grad_() for t in (q, k))
        lists, blocks = -(-queries // sizes[0]), -(-keys // sizes[1])
        if mask is None:
            mask = drawn(*of_mask, lists, blocks, seed=3) > 0.3
            mask[..., 0, :] = False
            if lists > 1:
                mask[..., 1, :] = True
        self.mask = mask if isinstance(mask, torch.Tensor) else torch.full(
            (*of_mask, lists, blocks), mask)  # fmt: skip
        self.drest = drawn(batch, heads, queries, seed=4) * size_of_drest

    def rest(self, q=None, k=None):
        given = (self.q if q is None else q, self.k if k is None else k)
        return mixing.estimated_rest(*given, self.mask, self.sizes, self.scale)

    def found(self):
        rest = self.rest()
        return (rest, *torch.autograd.grad(rest, (self.q, self.k), self.drest))

    def expected(self):
        """Gives the same in FP64, of one block of keys after the other."""
        q, k = (t.detach().double().requires_grad_() for t in (self.q, self.k))
        group, terms = q.shape[1] // k.shape[1], []
        mask = self.mask
        if mask.shape[1] == k.shape[1]:
            mask = mask.repeat_interleave(group, 1)
        of_query = torch.arange(q.shape[2]) // self.sizes[0]
        for j, block in enumerate(k.split(self.sizes[1], 2)):
            mean = block.mean(2).repeat_interleave(group, 1)
            term = torch.einsum("bhnd,bhd->bhn", q, mean) * self.scale
            weight = block.shape[2] * (~mask[..., j]).double()
            terms.append(term + weight.log()[..., of_query])
        terms = torch.stack(terms)
        left = (terms > -torch.inf).any(0)
        rest = terms.where(left, 0).logsumexp(0).where(left, 0)
        grads = torch.autograd.grad(rest, (q, k), self.drest.double())
        return (rest.detach().masked_fill(~left, -torch.inf), *grads)


#: The greatest errors: of rest, absolute; of dq and dk, relative.
LIMITS = {torch.bfloat16: (0.002, 0.005, 0.006), torch.float16: (0.0003, 0.001, 0.004)}


def compare(case):
    found, expected = case.found(), case.expected()
    (rest, *grads), (wanted, *wanted_grads) = found, expected
    at_most = LIMITS[case.q.dtype]
    left = wanted.isfinite()
    assert rest.dtype == torch.float32 and torch.equal(rest.isfinite(), left)
    assert (rest[~left] == -torch.inf).all()
    assert ((rest - wanted)[left]).square().mean().sqrt() < at_most[0] if left.any() else True
    for grad, exact, of, most in zip(grads, wanted_grads, (case.q, case.k), at_most[1:]):
        assert grad.shape == of.shape and grad.dtype == of.dtype and grad.isfinite().all()
        error = float((grad - exact).norm())
        assert error <= most * float(exact.norm())
    return found


BF16, FP16 = torch.bfloat16, torch.float16
CASES = {
    "D64": Case(BF16, 64, (128, 64)),
    "D64, fp16, lists of key heads": Case(FP16, 64, (64, 64), of_mask=(1, 2)),
    "D64, one list a head": Case(BF16, 64, (64, 128), of_mask=(1, 4), queries=129, keys=128),
    "D128, shared lists": Case(BF16, 128, (128, 64), of_mask=(1, 1)),
    "D128, fp16": Case(FP16, 128, (128, 128), heads_kv=4, of_mask=(2, 1)),
    "D128, fp16, 64 x 128": Case(FP16, 128, (64, 128), heads_kv=1, of_mask=(1, 1), batch=1),
    "short": Case(BF16, 64, (128, 64), queries=1, keys=1, of_mask=(1, 1), mask=False),
    "short, fp16": Case(FP16, 128, (64, 64), queries=63, keys=65, of_mask=(1, 1)),
    "two tiles of means": Case(BF16, 64, (128, 64), 2, 1, 700, 64 * 70 + 5, 1, (1, 1)),
    "three of 128 channels": Case(BF16, 128, (64, 64), 1, 1, 65, 64 * 130, 1, (1, 1)),
    "many parts": Case(FP16, 64, (64, 128), 2, 2, 64 * 35 + 1, 500, 1, (1, 2)),
    "nothing listed": Case(BF16, 64, (128, 64), mask=False),
    "large mean": Case(BF16, 128, (128, 64), offset=40.0),
    "large mean, fp16": Case(FP16, 64, (128, 64), offset=40.0),
    "large gradients": Case(FP16, 64, (128, 64), size_of_drest=2e4),
    "small gradients": Case(BF16, 64, (128, 64), size_of_drest=1e-20),
}


@pytest.mark.parametrize("name", CASES)
def test_rest_and_its_gradients(on_the_simulator, name):
    compare(CASES[name])
    assert on_the_simulator == THREE


def test_everything_listed(on_the_simulator):
    """Nothing is left, whatever the gradient is."""
    case = Case(BF16, 64, (128, 64), mask=True)
    case.drest.fill_(torch.inf)
    rest, dq, dk = case.found()
    assert (rest == -torch.inf).all() and not dq.any() and not dk.any()
    assert on_the_simulator == THREE


def test_a_wrong_sign_or_weight_would_show():
    """The limits are far below what the shortest block, the mean and each list change."""
    case = CASES["D64"]
    rest, dq, dk = case.expected()
    left = rest.isfinite()
    for change in ("mask", "keys", "mean"):
        other = Case(BF16, 64, (128, 64))
        if change == "mask":
            other.mask[..., 2, 4] ^= True
        elif change == "keys":
            with torch.no_grad():
                other.k[:, :, -1] += 8
        else:
            with torch.no_grad():
                other.k += 0.25
        found = other.expected()
        both = left & found[0].isfinite()
        assert (found[0] - rest)[both].square().mean().sqrt() > 4 * LIMITS[BF16][0]
        assert (found[1] - dq).norm() > 4 * LIMITS[BF16][1] * dq.norm()


def test_views_give_the_same_bits():
    """With channels side by side kernels read q where it lies; else a copy."""
    case = CASES["D64"]
    expected = case.found()
    for form in (lambda t: torch.cat([t.transpose(1, 2)] * 2, -1)[..., :64].transpose(1, 2),
                 lambda t: torch.cat([t.flatten()[:3], t.flatten()])[3:].view(t.shape),
                 lambda t: t.transpose(2, 3).contiguous().transpose(2, 3)):  # fmt: skip
        q, k = (form(t.detach()).requires_grad_() for t in (case.q, case.k))
        drest = case.drest.transpose(0, 2).contiguous().transpose(0, 2)
        rest = case.rest(q, k)
        found = (rest, *torch.autograd.grad(rest, (q, k), drest))
        assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_masks_lie_anywhere():
    case = CASES["D64"]
    expected = case.found()
    kept = case.mask
    try:
        case.mask = torch.cat([kept, kept], -1)[..., : kept.shape[3]]
        assert not case.mask.is_contiguous()
        assert all(torch.equal(x, y) for x, y in zip(case.found(), expected))
        case.mask = kept[:1].expand(2, -1, -1, -1)
        one = [t[:1] for t in case.found()]
        assert all(torch.equal(x, y[:1]) for x, y in zip(one, expected))
    finally:
        case.mask = kept


def test_a_checkpoint_and_hooks():
    case = CASES["D64"]
    expected = case.found()
    rest = checkpoint(case.rest, case.q, case.k, use_reentrant=False)
    found = torch.autograd.grad(rest, (case.q, case.k), case.drest)
    assert all(torch.equal(x, y) for x, y in zip(found, expected[1:]))
    turned = (lambda t: t.detach().mT.contiguous(), lambda t: t.mT)
    with torch.autograd.graph.saved_tensors_hooks(*turned):
        rest = case.rest()
    found = torch.autograd.grad(rest, (case.q, case.k), case.drest)
    assert all(torch.equal(x, y) for x, y in zip(found, expected[1:]))


def test_gradients_are_differentiated_once():
    case = CASES["D64"]
    found = torch.autograd.grad(case.rest(), (case.q, case.k), case.drest, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiated twice"):
        torch.autograd.grad(found[1].sum(), case.q)


@pytest.mark.parametrize("where", ["q", "k"])
def test_a_nan_shows_and_stays_in_its_head(where):
    case = Case(BF16, 64, (128, 64))
    with torch.no_grad():
        getattr(case, where)[1, 1, 5, 7] = torch.nan
    rest, dq, dk = case.found()
    heads = [1] if where == "q" else [2, 3]
    for b in range(2):
        for h in range(4):
            hit = b == 1 and h in heads
            assert rest[b, h].isnan().any() == hit and dq[b, h].isnan().any() == hit
        for h in range(2):
            assert dk[b, h].isnan().any() == (b == 1 and h == heads[0] // 2)
    if where == "q":
        assert rest.isnan().sum() == 1


def test_other_masks_and_blocks_have_no_kernels(on_the_simulator):
    case = CASES["D64"]
    one, many = torch.zeros(1, 1, 1, 1).bool(), torch.zeros(1, 1, 5, 9).bool()
    for mask, sizes in ((case.mask.float(), (128, 64)), (one, (300, 333)), (many, (64, 40))):
        mixing.estimated_rest(case.q, case.k, mask, sizes, case.scale).sum().backward()
    assert on_the_simulator == []
