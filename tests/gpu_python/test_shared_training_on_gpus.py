"""Training on sequences that GPUs share: the memory of a rank, PyTorch's context_parallel, and 500
steps against one GPU's."""

from itertools import pairwise

import pytest
from inputs import relative, torch
from on_gpus import GPUS, MORE, drawn_here, needs_gpus, ranks_of, run

from sagebwd import distributed

pytestmark = needs_gpus


def peak(mesh, method, own):
    """Bytes at the peak of forward and backward, with so many tokens of this rank's own."""
    leaves, dout = drawn_here(own)

    def step():
        out = distributed.attention(*leaves, mesh=mesh, method=method, causal=True)
        torch.autograd.grad(out, leaves, dout)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated()


def peaks_of(rank, ranks, counts):
    mesh = ranks_of.mesh_of("ring", ranks)  # which is that of Ulysses, too
    return {(method, tokens): peak(mesh, method, tokens // ranks)
            for method in ("ring", "ulysses") for tokens in counts}  # fmt: skip


def test_memory_of_a_rank_goes_with_its_share_of_tokens(tmp_path):
    """With more ranks a rank's peak falls as its tokens do, and it grows as the sequence does."""
    counts, tokens = [n for n in (2, 4, 8) if n <= GPUS], (1 << 15, 1 << 16)
    of_ranks = {n: run(tmp_path, n, peaks_of, n, tokens) for n in counts}
    for method in ("ring", "ulysses"):
        peaks = {(n, m): max(of_rank[method, m] for of_rank in of_ranks[n])
                 for n in counts for m in tokens}  # fmt: skip
        print(method, {key: f"{bytes_ / 2**20:.0f} MiB" for key, bytes_ in peaks.items()})
        for n in counts:
            assert peaks[n, 1 << 16] < 2.1 * peaks[n, 1 << 15]
            # q, out, dout and dq have 8 bytes a number, keys a quarter; sums and copies are the
            # rest.
            assert peaks[n, 1 << 16] < 48 * (1 << 16) // n * 8 * 128
        for fewer, more in pairwise(counts):
            assert peaks[more, 1 << 16] < 0.6 * peaks[fewer, 1 << 16]


def through_pytorch(rank, ranks):
    found = []
    for drawn, causal in ((dict(heads=8, heads_kv=8, tokens=4096, d=128), True),
                          (dict(heads=8, heads_kv=8, tokens=3 * 512 * ranks, d=64), True),
                          (dict(heads=8, heads_kv=8, tokens=2048, d=64), False)):  # fmt: skip
        results, calls = ranks_of.through_pytorch(rank, ranks, drawn, causal)
        exact = ranks_of.exactly(drawn, dict(causal=causal), False)
        whole = ranks_of.alone(drawn, dict(causal=causal), False)
        found.append([calls, *((relative(x, exact[i]), relative(whole[i], exact[i]))
                               for i, x in zip((0, 2, 3, 4), results))])  # fmt: skip
    return found


@pytest.mark.parametrize("ranks", [2, 4] if GPUS >= 4 else [2])
def test_pytorchs_context_parallel_takes_us(ranks, tmp_path):
    for calls, *errors_of_case in run(tmp_path, ranks, through_pytorch, ranks)[0]:
        assert calls == 1
        for name, (error, of_one) in zip(("out", "dq", "dk", "dv"), errors_of_case):
            assert error < of_one + MORE, name


def end_of_training(rank, ranks, method, seed=None):
    """The mean loss of the last 50 of 500 steps. Without a seed each rank trains alone, its own."""
    words = "--tokens 2048 --steps 500 --width 256 --head-dim 64 --layers 2".split()
    words += ["--method", method, "--seed", str(rank if seed is None else seed)]
    losses = (ranks_of.train_example(rank, 1, words, teams=ranks) if seed is None
              else ranks_of.train_example(rank, ranks, words))  # fmt: skip
    return sum(losses[-50:]) / 50


@pytest.fixture(scope="module")
def ends_on_one_gpu(tmp_path_factory):
    """Gives the ends of three seeds, at once where there are GPUs. One rank computes the same by
    every method."""
    folder = tmp_path_factory.mktemp("one")
    if GPUS >= 3:
        return run(folder, 3, end_of_training, 3, "ring")
    return [run(folder, 1, end_of_training, 1, "ring", seed)[0] for seed in range(3)]


@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_500_steps_are_those_of_one_gpu_within_the_band_of_seeds(method, ends_on_one_gpu, tmp_path):
    ones, two = ends_on_one_gpu, run(tmp_path, 2, end_of_training, 2, method, 0)[0]
    print(f"{method}: one GPU {ones}, two {two}")
    assert ones[0] < 3.5  # it learns: 5.5 is chance
    assert abs(two - ones[0]) <= max(ones) - min(ones)
