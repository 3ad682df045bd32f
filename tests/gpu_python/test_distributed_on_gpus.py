"""`sagebwd.distributed` over NCCL: against one GPU and FP64."""

import pytest
from inputs import relative, torch
from on_gpus import GPUS, MORE, needs_gpus, ranks_of, run

import sagebwd
from sagebwd import distributed

pytestmark = needs_gpus

NAMES = ("out", "lse", "dq", "dk", "dv")
MESHES = [("ring", 2), ("ulysses", 2), *(([("ring", 4), ("ulysses", 4), ("both", 4)])
                                         if GPUS >= 4 else [])]  # fmt: skip
CASES = [
    (dict(heads=8, heads_kv=2, tokens=4096, d=128), dict(causal=True), True),
    (dict(heads=8, heads_kv=1, tokens=3001, d=64, dtype=torch.float16), dict(causal=True), False),
    (dict(heads=4, heads_kv=4, tokens=2100, d=64, batch=2, layout="bshd"),
     dict(layout="bshd"), True),
    (dict(heads=4, heads_kv=2, tokens=2048, d=256), dict(causal=True, precision="qk16"), False),
    (dict(heads=4, heads_kv=2, tokens=2048, d=128), dict(
        causal=True, precision="gradients16", deterministic=False), True),
    (dict(heads=4, heads_kv=2, tokens=2048, d=64), dict(smooth_k=False, granularity="block"), True),
]  # fmt: skip


def errors(rank, method, ranks):
    """Gives the errors of the ranks together and of one GPU, for each case and result."""
    found = []
    for case in CASES:
        results = ranks_of.together(rank, method, ranks, *case)
        if rank == 0:
            expected, whole = ranks_of.exactly(*case), ranks_of.alone(*case)
            found.append([(relative(x, exact), relative(y, exact))
                          for x, y, exact in zip(results[0], whole, expected)])  # fmt: skip
    return found


def repeated(rank, method, ranks):
    """Whether each of 20 equal calls gives the first one's bits."""
    case = dict(heads=8, heads_kv=2, tokens=8192, d=128), dict(causal=True), True
    results = ranks_of.together(rank, method, ranks, *case, 20)
    if rank:
        return None
    return [all(map(torch.equal, results[0], other)) for other in results[1:]]


def judged(rank, method, ranks):
    return errors(rank, method, ranks), repeated(rank, method, ranks)


@pytest.fixture(scope="module", params=MESHES, ids=lambda mesh: f"{mesh[0]}-{mesh[1]}")
def mesh_results(request, tmp_path_factory):
    """Ranks that begin once for both tests find this: the method, its errors, and its repeats."""
    method, ranks = request.param
    return method, *run(tmp_path_factory.mktemp("mesh"), ranks, judged, method, ranks)[0]


def test_ranks_together_give_what_one_gpu_gives(mesh_results):
    method, found, _ = mesh_results
    for case, of_case in zip(CASES, found):
        print(method, case, [f"{x:.5f}/{y:.5f}" for x, y in of_case])
        for name, (error, of_one) in zip(NAMES, of_case):
            assert error < of_one + MORE, (name, case)


def test_the_same_inputs_give_the_same_bits(mesh_results):
    assert mesh_results[2] == [True] * 19


def failing(rank, method):
    from sagebwd.distributed import passes

    mesh = ranks_of.mesh_of(method, 2)
    said = []
    for name in ("forward", "backward"):
        original = getattr(passes.Passes, name)

        def fails(self, *given):
            if rank == 1:
                raise MemoryError("no room")
            return original(self, *given)  # noqa: B023

        for function in (fails, original):
            setattr(passes.Passes, name, function)
            (q, k, v, _), _ = ranks_of.draw(tokens=512, d=64)
            own = [distributed.shard(t, mesh, dim=2, method=method).detach().requires_grad_()
                   for t in (q, k, v)]  # fmt: skip
            try:
                distributed.attention(*own, mesh=mesh, method=method).sum().backward()
                torch.cuda.synchronize()
                said.append("no error")
            except Exception as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_rank_that_fails_fails_everywhere(method, tmp_path):
    own = "MemoryError: no room"
    for rank, said in enumerate(run(tmp_path, 2, failing, method)):
        expected = own if rank == 1 else f"RuntimeError: rank 1 could not go on: {own}"
        assert said == [expected, "no error"] * 2


def of_a_mesh_of_one(rank):
    mesh = ranks_of.mesh_of("ring", 1)
    (q, k, v, dout), dlse = ranks_of.draw(tokens=700, d=64)

    def run(call):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        results = call(*leaves)
        return *results, *torch.autograd.grad(results, leaves, (dout, dlse))

    return all(map(torch.equal, run(lambda *qkv: distributed.attention(
        *qkv, mesh=mesh, causal=True, return_lse=True)), run(lambda *qkv: sagebwd.attention(
            *qkv, causal=True, return_lse=True))))  # fmt: skip


def test_a_mesh_of_one_gives_the_bits_of_attention(tmp_path):
    assert run(tmp_path, 1, of_a_mesh_of_one) == [True]
