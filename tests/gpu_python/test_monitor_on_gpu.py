"""sagebwd.Monitor beside the kernels: figures against FP64, the same bits, and what it costs."""

import os
import statistics
import time

import pytest
from inputs import equal, leaves, torch
from torch.utils.checkpoint import checkpoint

import sagebwd
from sagebwd.core import watching
from sagebwd.numerics.exact import exact_attention

pytestmark = pytest.mark.filterwarnings("error::sagebwd.MonitorWarning")


@pytest.fixture(autouse=True)
def nobody_watches_afterwards():
    yield
    left, watching.watchers = watching.watchers, ()
    assert not left


def both_passes(inputs, dout, **options):
    out = sagebwd.attention(*inputs, **options)
    return [out.detach(), *torch.autograd.grad(out, inputs, dout)]


def check(record, inputs, dout, results, **mask):
    """The record's errors are those to FP64."""
    b, head, group = record["sequence"], record["head"], record["heads"]
    of_q, of_k = slice(head, head + group), slice(head // group, head // group + 1)
    q, k, v, do, out, dq, dk, dv = (
        t[b : b + 1, at].detach()
        for t, at in zip((*inputs, dout, *results),
                         (of_q, of_k, of_k, of_q, of_q, of_q, of_k, of_k))
    )  # fmt: skip
    exact = exact_attention(q, k, v, do, **mask).named()
    for name, ours in zip(("O", "dQ", "dK", "dV"), (out, dq, dk, dv)):
        error = float((ours.double() - exact[name]).norm() / exact[name].norm())
        assert record[name] == pytest.approx(error, rel=5e-3), name


@pytest.mark.parametrize("precision", ["highest", "high"])
@pytest.mark.parametrize("options", [
    dict(), dict(causal=True), dict(window_left=100, window_right=20), dict(precision="qk16"),
    dict(precision="gradients16"), dict(precision="gradients16", deterministic=False),
    dict(gradient_kernels="split"), dict(gradient_kernels="fused"), dict(granularity="block"),
    dict(smooth_q=True),
], ids=str)  # fmt: skip
def test_figures_are_those_of_fp64(options, precision):
    inputs, dout = leaves(1000, h=4, hk=2, d=128)
    mask = {n: x for n, x in options.items() if n in ("causal", "window_left", "window_right")}
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)  # with 'high' cuBLAS may use TF32
    try:
        # On Gaussian inputs dQ and dK of `block` are near their limit.
        limits = dict.fromkeys(("dQ", "dK"), 0.07) if "granularity" in options else None
        with sagebwd.Monitor(memory=1 << 24, thresholds=limits) as monitor:
            results = both_passes(inputs, dout, **options)
            record = monitor.latest
    finally:
        torch.set_float32_matmul_precision(before)
    check(record, inputs, dout, results, **mask)
    table = sagebwd.trace(*[t.detach() for t in inputs], dout, causal=mask.get("causal", False))
    if not options:
        assert record["dS"] == pytest.approx(table["dS"]["rel_l2"], rel=0.15)


class Model(torch.nn.Module):
    def __init__(self, layers, width, heads, checkpointed=None):
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.ModuleList(torch.nn.Linear(width, 3 * width) for _ in range(layers))
        self.outer = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 4 * width),
                                torch.nn.GELU(), torch.nn.Linear(4 * width, width))
            for _ in range(layers))  # fmt: skip
        self.heads, self.checkpointed = heads, checkpointed

    def layer(self, inner, outer, x):
        qkv = inner(torch.nn.functional.layer_norm(x, x.shape[-1:])).unflatten(
            -1, (3, self.heads, -1))  # fmt: skip
        out = sagebwd.attention(*qkv.unbind(2), causal=True, layout="bshd")
        x = x + out.flatten(2)
        return x + outer(x)

    def forward(self, x):
        for inner, outer in zip(self.inner, self.outer):
            if self.checkpointed is None:
                x = self.layer(inner, outer, x)
            else:
                x = checkpoint(self.layer, inner, outer, x, use_reentrant=self.checkpointed)
        return x


def trainer(model, tokens, width, batch=2):
    """A step of training."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    x = torch.randn(batch, tokens, width, device="cuda", requires_grad=True)

    def step():
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


KINDS = {
    "eager": dict(), "checkpoint": dict(checkpointed=False),
    "reentrant checkpoint": dict(checkpointed=True), "compiled": dict(backend="inductor"),
    "compiled checkpoint": dict(checkpointed=False, backend="inductor"),
}  # fmt: skip


@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_no_bit_changes(kind, limited):
    def trained(watch):
        torch._dynamo.reset()
        given = dict(KINDS[kind])
        backend = given.pop("backend", None)
        model = Model(3, 256, 4, **given).cuda()
        called = torch.compile(model, backend=backend) if backend else model
        torch.manual_seed(1)
        step = trainer(called, 512, 256)
        monitor = sagebwd.Monitor(called if limited else None, every=1)
        if watch:
            monitor.start()
        for _ in range(4):
            step()
        monitor.stop()
        state = [torch.get_rng_state(), torch.cuda.get_rng_state()]
        return [p.detach().clone() for p in model.parameters()] + state, monitor

    expected, _ = trained(False)
    got, monitor = trained(True)
    assert equal(got, expected)
    assert [(r["step"], r["call"], r["calls"]) for r in monitor.records] == [
        (1, 2, 3), (2, 1, 3), (3, 0, 3), (4, 2, 3)]  # fmt: skip
    assert all(r["dQ"] < 0.03 for r in monitor.records)


def test_packed_sequences():
    lengths = (300, 0, 700, 24)
    first = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
    inputs, dout = leaves(sum(lengths), b=1, layout="bshd")
    inputs = [t.detach()[0].requires_grad_() for t in inputs]
    with sagebwd.Monitor() as monitor:
        results = both_passes(inputs, dout[0], cu_seqlens_q=first, cu_seqlens_k=first, causal=True)
        record = monitor.latest
    begin = int(first[record["sequence"]])
    at = slice(begin, begin + record["queries"])
    assert record["queries"] == lengths[record["sequence"]]
    one = [[t[at].transpose(0, 1)[None] for t in ts] for ts in (inputs, [dout[0]], results)]
    check({**record, "sequence": 0}, one[0], one[1][0], one[2], causal=True)


def test_huge_logits_warn():
    inputs, dout = leaves(512, sigma=9.0)
    with pytest.warns(sagebwd.MonitorWarning, match="qk16.*QK-norm"):
        with sagebwd.Monitor():
            both_passes(inputs, dout)


def test_graphs_are_named_and_left_alone():
    inputs, dout = leaves(512)
    expected = both_passes(inputs, dout)
    with pytest.warns(sagebwd.MonitorWarning, match="CUDA graphs"):
        with sagebwd.Monitor(every=1):
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                both_passes(inputs, dout)
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph):
                results = both_passes(inputs, dout)
            graph.replay()
    assert equal(results, expected)


def test_memory_is_bounded():
    inputs, dout = leaves(16384, b=1, h=1, hk=1, d=128)
    both_passes(inputs, dout)

    def peak():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        both_passes(inputs, dout)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    usual = peak()
    with sagebwd.Monitor(memory=1 << 28):
        assert peak() <= usual + (1 << 28) + 16384 * 128 * 4 * 16  # and the tensors in FP32


@pytest.mark.parametrize(("layers", "width", "heads", "tokens", "batch"), [
    (6, 512, 8, 1024, 8), (4, 1024, 8, 8192, 2)])  # fmt: skip
def test_it_takes_less_than_a_hundredth_of_the_time(layers, width, heads, tokens, batch, capsys):
    """At the default interval: what one sampled step takes more, divided by the interval, beside a
    step. Steps with and without a sample are timed in turns, each to its end. The fastest of each
    count: whatever else the machine does only adds."""
    step = trainer(Model(layers, width, heads).cuda(), tokens, width, batch)

    def seconds(of):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        of()
        torch.cuda.synchronize()
        return time.perf_counter() - begin

    monitor = sagebwd.Monitor(every=1)

    def watched():
        with monitor:
            step()

    for _ in range(3):
        step()
        watched()
    pairs = [(seconds(step), seconds(watched)) for _ in range(15)]
    usual, with_sample = map(min, zip(*pairs))
    share = (with_sample - usual) / usual / sagebwd.Monitor().every
    with capsys.disabled():
        print(f"\n{tokens} tokens: a step takes {usual * 1e3:.2f} ms, with a sample "
              f"{with_sample * 1e3:.2f} ms: {share:.3%} at every={sagebwd.Monitor().every}; the "
              f"monitor's own figure {monitor.overhead / sagebwd.Monitor().every:.3%}")
    assert share < 0.01
    assert len(monitor.records) == 18


@pytest.fixture
def one_core():
    """All threads of this process on one core, where times vary least."""
    def place(cores):
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), cores)

    usual = os.sched_getaffinity(0)
    place({max(usual)})
    yield
    place(usual)


@pytest.mark.usefixtures("one_core")
def test_calls_without_a_sample_take_little_more_of_the_host():
    """At most a tenth of the smallest call's time. A tenth of the calls are faster than what is
    compared: on a shared machine the medians of two runs of the same code differ by as much."""
    inputs, dout = leaves(64, b=1, h=1, hk=1)

    def times():
        taken = []
        for _ in range(50):
            begin = time.perf_counter()
            both_passes(inputs, dout)
            taken.append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        return taken

    monitor = sagebwd.Monitor(every=10**9)

    def watched():
        with monitor:
            return times()

    with monitor:
        both_passes(inputs, dout)  # the first step has a sample
    times(), watched()
    turns = [(times(), watched()) for _ in range(20)]
    usual, with_monitor = (statistics.quantiles((t for some in side for t in some), n=10)[0] * 1e6
                           for side in zip(*turns))
    print(f"{usual:.1f} us, and with a monitor {with_monitor:.1f}")
    assert len(monitor.records) == 1 and monitor.state_dict()["steps"] == 1 + 21 * 50
    assert with_monitor < usual * 1.1
