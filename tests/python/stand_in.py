"""Kernels that are the emulation, on CPU tensors: they are handed addresses, as the real ones are.

PyTorch sees the real operation, and the package does the real thing around a launch.
"""

import ctypes
from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from sagebwd import _core, masks  # noqa: E402
from sagebwd.core import options  # noqa: E402
from sagebwd.lists import block_sparse, given  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402
from sagebwd.sla import linear, mixing  # noqa: E402


def at(address, shape, strides, dtype):
    """The tensor of those elements in memory that somebody else owns."""
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides))
    width = torch.empty((), dtype=dtype).element_size()
    memory = (ctypes.c_char * (count * width)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


class Kernels:
    """The package takes this for a `_core.Attention`."""

    def __init__(self, device, text, head_dim=64, dtype=torch.bfloat16):
        spec = options.spec_of_text(text, head_dim=head_dim, dtype=dtype)
        windows = (None if w is None or w < 0 else w for w in (spec.window_left, spec.window_right))
        self.given = dict(causal=spec.causal, granularity=spec.granularity, plan=spec.precision,
                          smooth_k=spec.smooth_k, smooth_q=spec.smooth_q, smooth_v=spec.smooth_v,
                          rotate=spec.rotate, sink_keys=spec.sink_keys,
                          **dict(zip(("window_left", "window_right"), windows)))  # fmt: skip
        self.head_dim, self.dtype, self.packed = head_dim, dtype, spec.packed
        self.max_logits = spec.max_logits
        self.launches = 0

    def build_ahead(self, problem, stream):
        pass

    def pack_intervals(self, problem, numbers, strides, bits, stream):
        """Leaves the bits as they are: the stand-in reads the intervals themselves."""

    def pack_mask(self, problem, tables, sizes, bits, stream):
        """Leaves the bits as they are: the stand-in evaluates the mask itself."""

    def prepare_forward(self, problem, strides, scale, apart=False, value_dim=0):
        return Pass(self, problem, strides, scale, apart, value_dim, "qkvo", "q", self._forward)

    def prepare_backward(self, problem, strides, scale, apart=False, value_dim=0):
        return Pass(self, problem, strides, scale, apart, value_dim, "qkvooqkv", "qq",
                    self._backward)  # fmt: skip

    def _forward(self, given, q, k, v, out, lse, k_mean, largest=None):
        rules, q, k, v, *more = emulation._told(q, k, v, "bhsd", k_mean, (None,) * 3, given)
        *results, found = emulation.forward(q, k, v, rules, k_mean, *more)  # no watcher is told
        for to, result in zip((out, lse), results):
            to.copy_(result)
        if largest is not None:  # of all sequences
            largest.copy_(torch.maximum(largest, found))

    def _backward(self, given, q, k, v, out, dout, dq, dk, dv, lse, dlse, k_mean):
        results = emulation.emulated_backward(dout, q, k, v, out, lse, dlse=dlse, k_mean=k_mean,
                                              **given)  # fmt: skip
        for to, result in zip((dq, dk, dv), results):
            to.copy_(result)


class Pass:
    """The package takes this for a `_core.PreparedPass`. Letters in `like` and `rows` say which of
    q, k, v and out (o) each tensor is like."""

    workspace_bytes = 4096

    def __init__(self, kernels, problem, strides, scale, apart, value_dim, like, rows, compute):
        assert len(strides) == len(like)
        self.kernels, self.compute = kernels, compute
        self.like = [("q" if of in "qo" else "k") for of in like + rows]
        self.sequences, self.apart = problem[0], apart
        batch, heads, heads_kv, seq_q, seq_kv = problem
        if apart:
            seq_q, seq_kv = seq_q // batch, seq_kv // batch
        elif kernels.packed:
            batch = 1
        self.rows = (batch, heads, seq_q)
        self.mean = (self.sequences, heads_kv, kernels.head_dim)
        self.shapes = [
            (*((batch, heads, seq_q) if of in "qo" else (batch, heads_kv, seq_kv)),
             value_dim or kernels.head_dim if of in "vo" else kernels.head_dim)
            for of in like
        ]
        self.strides = strides
        self.given = dict(kernels.given, softmax_scale=scale)

    def __call__(self, *numbers):
        *addresses, workspace, stream = numbers
        assert stream == STREAM
        assert all(address % (16 if i < len(self.shapes) else 4) == 0
                   for i, address in enumerate(addresses))  # fmt: skip
        # Whoever has not allocated what was asked for shall notice.
        ctypes.memset(workspace, 0xFF, self.workspace_bytes)
        kernels, tensors, packing, more = self.kernels, [], (), ()
        if kernels.max_logits and self.compute == kernels._forward:
            *addresses, of_heads = addresses
            more = (at(of_heads, self.rows[1:2], (1,), torch.float32).fill_(-torch.inf),)
        if kernels.packed:
            addresses, packing = addresses[:-4], addresses[-4:]
        *addresses, of_mean = addresses
        _, heads_kv, head_dim = self.mean
        strides = (heads_kv * head_dim, head_dim, 1)
        mean = at(of_mean, self.mean, strides, torch.float32) if of_mean else None
        for address, shape, strides in zip(addresses, self.shapes, self.strides):
            tensors.append(at(address, shape, (*strides, 1), kernels.dtype))
        for address in addresses[len(tensors) :]:
            _, heads, seq_q = self.rows
            strides = (heads * seq_q, seq_q, 1)
            rows = at(address, self.rows, strides, torch.float32) if address else None
            tensors.append(rows)
        with torch.no_grad():
            for parts in self._parts(tensors, mean, *packing) if packing else [[*tensors, mean]]:
                self.compute(self.given, *parts, *more)
        kernels.launches += 1

    def _parts(self, tensors, mean, first_q, first_k, used_q, used_k):
        """The tensors of each packed sequence, short of those without queries or keys."""

        def numbers(address, count):
            return at(address, (count,), (1,), torch.int32).tolist()

        spans = {}
        for of, first, used in (("q", first_q, used_q), ("k", first_k, used_k)):
            firsts = numbers(first, self.sequences + 1)
            lengths = [end - begin for begin, end in pairwise(firsts)]
            if used:
                lengths = [min(pair) for pair in zip(lengths, numbers(used, self.sequences))]
            spans[of] = list(zip(firsts, lengths))
        for i in range(self.sequences):
            if spans["q"][i][1] == 0 or spans["k"][i][1] == 0:
                continue
            batch, parts = i if self.apart else 0, []
            for t, of in zip(tensors, self.like):
                begin, length = spans[of][i]
                begin = 0 if self.apart else begin
                parts.append(None if t is None else t[batch:batch + 1, :, begin:begin + length])
            yield [*parts, None if mean is None else mean[i:i + 1]]


STREAM = 7


@pytest.fixture
def kernels_on_the_cpu(monkeypatch):
    """Gives the stand-ins, by the options' line."""
    from sagebwd.core import forms, ops

    made = {}

    def operation(device, text, **tensors):
        key = (text, *tensors.items())
        return made.setdefault(key, Kernels(device, text, **tensors))

    monkeypatch.setattr(ops, "DEVICES", ("cpu", "meta"))
    monkeypatch.setattr(forms, "operation", operation)
    monkeypatch.setattr(forms, "_forms", {})
    monkeypatch.setattr(forms, "_current_stream", lambda device: STREAM)
    return made


class ListedKernels:
    """Operators with lists of blocks take this for a form of calls; the emulation computes."""

    def __init__(self, bits, q, k, v, softmax_scale, layout, text):
        spec = options.spec_of_text(text, head_dim=q.shape[3], dtype=q.dtype)
        self.layout = layout
        given = {name: getattr(spec, name) for name in (
            "causal", "granularity", "group_kv", "smooth_k", "rotate", "precision", "dp_sums")}
        self.sizes = spec.sparse_q, spec.sparse_kv
        self.rules = emulation.emulation_rules(q, k, v, softmax_scale=softmax_scale, layout=layout,
                                               block_size=self.sizes, **given)  # fmt: skip

    def _listed(self, q, k, packing):
        return block_sparse.tokens_of(packing[0], q, k, self.sizes)

    def forward(self, q, k, v, packing):
        q, k, v = emulation.swapped(self.layout, q, k, v)
        listed, wrong = self._listed(q, k, packing)
        out, lse, _ = emulation.forward(q, k, v, self.rules, listed=listed)
        (out,) = emulation.swapped(self.layout, out.masked_fill(wrong[..., None], torch.nan))
        return out.contiguous(), lse.masked_fill(wrong, torch.nan)

    def backward(self, dout, q, k, v, out, lse, dlse, packing):
        dout, q, k, v, out = emulation.swapped(self.layout, dout, q, k, v, out)
        listed, _ = self._listed(q, k, packing)
        found = emulation.backward(dout, q, k, v, out, lse, dlse, self.rules, listed=listed)
        return tuple(x.contiguous() for x in emulation.swapped(self.layout, *found))


class IntervalKernels(ListedKernels):
    """The same for operators with intervals, which come behind the bits."""

    def _listed(self, q, k, packing):
        _, hidden = emulation.intervals_of(packing[1], q, k)
        return hidden, q.new_zeros(q.shape[:3], dtype=torch.bool)


class MaskKernels(ListedKernels):
    """Evaluates the mask of operators that have one, whose tables come behind the bits."""

    def __init__(self, sizes, bits, q, k, v, softmax_scale, layout, text):
        super().__init__(bits, q, k, v, softmax_scale, layout, text)
        self.mask = options.spec_of_text(text).mask
        self.operands = [(name, tuple(sizes[2 * i : 2 * i + 2])[-indices:])
                         for i, (name, indices, _) in enumerate(_core.expression_facts(self.mask, "")[0])
                         ]  # fmt: skip

    def _listed(self, q, k, packing):
        operands = {name: table.view(shape)
                    for (name, shape), table in zip(self.operands, packing[1:])}  # fmt: skip
        seen = masks.dense(self.mask, operands, *q.shape[:3], k.shape[2])
        return seen, q.new_zeros(q.shape[:3], dtype=torch.bool)


class MixedKernels:
    """The same for SLA2's operators: the linear branch and the mixture are PyTorch's."""

    def __init__(self, bits, alpha, q, k, v, tokens, of_rest, keeps_sums, softmax_scale, layout,
                 text):  # fmt: skip
        exact, _, self.linear = text.rpartition(" linear=")
        self.exact, self.tokens = ListedKernels(bits, q, k, v, softmax_scale, layout, exact), tokens
        self.of_rest = of_rest
        self.smooth_k = options.spec_of_text(text, head_dim=q.shape[3], dtype=q.dtype).smooth_k
        blocks = -(-k.shape[2] // self.exact.sizes[1])
        each = (bits[..., None] >> torch.arange(32)) & 1
        self.mask = each.flatten(-2)[..., :blocks].bool()

    def _mixed(self, q, k, v, sparse_out, lse, rows):
        if self.of_rest:
            rows = torch.sigmoid(lse - rows)
        mask = None if self.linear == "all" else self.mask
        of_linear = linear.linear_branch(q, k, v, mask, self.exact.sizes, self.smooth_k)
        shares = mixing.with_ends(rows, self.mask, q.shape[1], self.exact.sizes[0], q.shape[2],
                                  self.linear)  # fmt: skip
        return mixing.mixed(sparse_out, of_linear, shares)

    def _rows(self, alpha, q):
        rows = given.rows_of(alpha, self.tokens, q.shape[2]) if alpha.shape[2] > 1 else alpha
        return rows.expand(q.shape[:3])

    bytes_of_sums = 0

    def forward(self, q, k, v, bits, alpha):
        sparse_out, lse = self.exact.forward(q, k, v, (bits,))
        out = self._mixed(q, k, v, sparse_out, lse, self._rows(alpha, q))
        return out.masked_fill(lse.isnan()[..., None], torch.nan), sparse_out, lse, q.new_empty(0, dtype=torch.uint8)

    def new_gradients(self, q, k, v):
        return *map(torch.empty_like, (q, k, v)), q.new_empty(q.shape[:3], dtype=torch.float32)

    def backward(self, to, dout, q, k, v, kept, lse, sums, bits, alpha):
        if self.of_rest:
            kept, _ = self.exact.forward(q, k, v, (bits,))
        given = [t.detach().requires_grad_() for t in (q, k, v, kept, lse, self._rows(alpha, q))]
        with torch.enable_grad():
            found = torch.autograd.grad(self._mixed(*given), given, dout, materialize_grads=True)
        exact = self.exact.backward(found[3], q, k, v, kept, lse, found[4], (bits,))
        for place, x, y in zip(to, found, exact):
            place.copy_(x + y)
        to[3].copy_(found[5])


@pytest.fixture
def listed_kernels_on_the_cpu(monkeypatch):
    """Gives the options' lines that kernels for lists were asked for, without what is said of the
    linear branch."""
    from sagebwd.core import ops
    from sagebwd.lists import list_ops
    from sagebwd.sla import estimated_kernels, mixed

    lines = []

    def form_of(q, k, v, bits, *told):
        lines.append(told[-1])
        return ListedKernels(bits, q, k, v, *told), (bits,)

    def mixed_form_of(bits, *rest):
        lines.append(rest[-1].rpartition(" linear=")[0])
        return MixedKernels(bits, *rest), bits

    def rest(q, k, *told):
        return mixing.estimated_rest(q, k, *told), q, k, q

    def with_gradients_of_rest(gradients, drest, q, mask, _, k, __, *told):
        given = q.detach().requires_grad_(), k.detach().requires_grad_()
        with torch.enable_grad():
            found = torch.autograd.grad(mixing.estimated_rest(*given, mask, *told), given, drest)
        return tuple(x + y for x, y in zip(gradients, found))

    monkeypatch.setattr(ops, "DEVICES", ("cpu", "meta"))
    monkeypatch.setattr(list_ops, "_form_of", form_of)
    monkeypatch.setattr(mixed, "_form_of", mixed_form_of)
    monkeypatch.setattr(estimated_kernels, "forward", rest)
    monkeypatch.setattr(estimated_kernels, "added", with_gradients_of_rest)
    return lines


@pytest.fixture
def interval_kernels_on_the_cpu(kernels_on_the_cpu, monkeypatch):
    from sagebwd.core import interval_ops

    def form_of(q, k, v, intervals, bits, *told):
        return IntervalKernels(bits, q, k, v, *told), (bits, intervals)

    monkeypatch.setattr(interval_ops, "_form_of", form_of)


@pytest.fixture
def mask_kernels_on_the_cpu(kernels_on_the_cpu, monkeypatch):
    from sagebwd.core import mask_ops

    def form_of(q, k, v, tables, sizes, bits, *told):
        return MaskKernels(sizes, bits, q, k, v, *told), (bits, *mask_ops.each_of(tables, sizes))

    monkeypatch.setattr(mask_ops, "_form_of", form_of)
