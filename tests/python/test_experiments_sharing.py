"""Training on sequences that processes share: as one process does, over gloo."""

import contextlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

import distributed_ranks as ranks_of  # noqa: E402
import warm  # noqa: E402
from corpus_cases import corpus_of  # noqa: E402

from experiments import sharing, train  # noqa: E402
from experiments.attentions import AttentionChoice  # noqa: E402
from experiments.config import ModelConfig, TrainConfig  # noqa: E402
from experiments.data import Corpus  # noqa: E402
from experiments.parallel import Group  # noqa: E402
from experiments.training import Trainer  # noqa: E402
from sagebwd import distributed  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")

# 75 tokens: in a ring of two one process has 43 of them and the other 32.
TOKENS, STEPS = 75, 6
TINY = ["--device", "cpu", "--model", "toy", "--steps", str(STEPS), "--batch", "1",
        "--tokens", str(TOKENS), "--dim", "128", "--layers", "2", "--head-dim", "32",
        "--hidden", "64", "--warmup", "2", "--lr", "0.01", "--eval-every", "3",
        "--log-every", "1", "--val-sequences", "2", "--tokens-per-step", str(4 * TOKENS)]
EXACT = ["--attention", "sdpa", "--no-autocast"]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    return ["--corpus", str(corpus_of(tmp_path_factory.mktemp("corpus"))), *TINY]


def called(words):
    """The exit code of a training, and what it says."""
    said, before = io.StringIO(), torch.are_deterministic_algorithms_enabled()
    with contextlib.redirect_stderr(said):
        try:
            code = train.main(words)
        except SystemExit as stopped:
            code = stopped.code
    torch.use_deterministic_algorithms(before)
    return code, said.getvalue()


def trained(rank, ranks, *calls):
    """(exit code, what is said) of each call, in one of these ranks."""
    os.environ["WORLD_SIZE"] = str(ranks)
    return [called(words) for words in calls]


def rows_in(folder):
    (path,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_time(rows):
    return [row | {"tokens_per_second": 0} for row in rows]


def check_same(found, expected, rel):
    for a, b in zip(found, expected, strict=True):
        assert a["tokens"] == b["tokens"] == a["step"] * 4 * TOKENS and a["lr"] == b["lr"]
        for name in ("train_loss", "val_loss", "grad_norm", "max_score", "gamma_q"):
            is_there = b[name] is not None
            assert a[name] == (pytest.approx(b[name], rel=rel) if is_there else None), name


@pytest.fixture(scope="module")
def alone(given, tmp_path_factory):
    """Rows of one process, of exact attention."""
    folder = tmp_path_factory.mktemp("alone")
    assert called([*given, *EXACT, "--out", str(folder)])[0] == 0
    return rows_in(folder)


# ---- as one process ------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranks", "count", "how", "line"), [
    (2, 2, "ddp", "sdpa"), (4, 2, "fsdp", "sdpa"), (2, 2, "fsdp", "sdpa:front")])  # fmt: skip
def test_ulysses_trains_as_one_process(given, alone, ranks, count, how, line, tmp_path):
    words = [*given, *EXACT, "--attention", line, "--out", str(tmp_path / "out"), "--parallel", how,
             "--context-parallel", str(count), "--context-method", "ulysses"]  # fmt: skip
    (tmp_path / "ranks").mkdir()
    for result in ranks_of.run(tmp_path / "ranks", ranks, trained, ranks, words):
        assert result[0][0] == 0, result
    check_same(scores_of_one(rows_in(tmp_path / "out"), alone, ranks // count), alone, 2e-4)
    stem = AttentionChoice.parse(line).stem()
    record = json.loads((tmp_path / f"out/{stem}.json").read_text())
    assert record["processes"] == ranks and record["config"]["context_parallel"] == count
    assert record["config"]["context_method"] == "ulysses"


def scores_of_one(rows, expected, teams):
    """The rows, with the scores of one team: of several each looks at a sequence."""
    if teams == 1:
        return rows
    for a, b in zip(rows, expected, strict=True):
        assert a["max_score"] == b["max_score"] or b["max_score"] <= a["max_score"] * 1.0001
    return [a | {"max_score": b["max_score"]} for a, b in zip(rows, expected)]


class Gather(torch.autograd.Function):
    """The tensors of all ranks of a group, one behind the other in a new dimension."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, x.contiguous(), group=group)
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous()
        torch.distributed.all_reduce(gradient, group=ctx.group)
        return gradient[torch.distributed.get_rank(ctx.group)], None


def exact_attention(q, k, v, *, mesh, method, causal):
    """Of the tokens that `shard` gives each rank, in the plainest way: each has all tokens."""
    assert causal and method == "ring"
    places = distributed.shard(torch.arange(TOKENS), mesh, dim=0)
    group = mesh.get_group()
    lengths = [torch.zeros((), dtype=torch.long) for _ in range(mesh.size())]
    torch.distributed.all_gather(lengths, torch.tensor(len(places)), group=group)

    def whole(x, dim):
        rest = x.new_zeros(*x.shape[:dim], TOKENS - x.shape[dim], *x.shape[dim + 1 :])
        parts = Gather.apply(torch.cat((x, rest), dim), group)
        return torch.cat([p.narrow(dim, 0, int(n)) for p, n in zip(parts, lengths)], dim)

    keys = whole(places.float(), 0)
    s = q @ whole(k, 2).mT * q.shape[-1] ** -0.5
    s = s.masked_fill(keys > places[:, None], -torch.inf)
    return s.softmax(-1) @ whole(v, 2)


def trained_exactly(rank, ranks, *calls):
    distributed.attention = exact_attention
    sharing.is_pytorchs = lambda choice: False
    return trained(rank, ranks, *calls)


@pytest.mark.parametrize(("ranks", "count", "how"), [(4, 4, "fsdp"), (4, 2, "ddp")])
def test_a_ring_trains_as_one_process(given, alone, ranks, count, how, tmp_path):
    """Positions, targets, losses and gradients, by an attention that rounds as one process."""
    words = [*given, *EXACT, "--out", str(tmp_path / "out"), "--parallel", how,
             "--context-parallel", str(count)]  # fmt: skip
    (tmp_path / "ranks").mkdir()
    for result in ranks_of.run(tmp_path / "ranks", ranks, trained_exactly, ranks, words):
        assert not isinstance(result, str) and result[0][0] == 0, result
    check_same(scores_of_one(rows_in(tmp_path / "out"), alone, ranks // count), alone, 2e-4)


def where_it_is_not_finite(rank, path):
    """What is said of attention that is not a number in one of two processes."""
    original = sharing.Shared.attention

    def attention(self, choice):
        attend = original(self, choice)
        return lambda q, k, v: attend(q, k, v) * (torch.nan if rank == 1 else 1)

    sharing.Shared.attention = attention
    config = TrainConfig(
        model=ModelConfig(dim=64, layers=2, head_dim=16, hidden=64), steps=2, batch=1, tokens=48,
        val_sequences=2, device="cpu", context_parallel=2, context_method="ulysses")  # fmt: skip
    choice, corpus = AttentionChoice.parse("sdpa"), Corpus.open(path)
    return Trainer(config, choice, corpus, Group(rank, 2, 2))._first_non_finite(0)


def test_where_one_process_is_not_finite_all_say_so(given, tmp_path):
    said = ranks_of.run(tmp_path, 2, where_it_is_not_finite, given[1])
    assert said == ["first non-finite output: blocks.0.attention.out"] * 2


# ---- checkpoints ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ring(given, tmp_path_factory):
    """A folder of what two processes trained in a ring with the emulation, and the words."""
    folder = tmp_path_factory.mktemp("ring")
    (folder / "ranks").mkdir()
    words = [*given, "--attention", "emulated", "--context-parallel", "2"]
    calls = (
        [*words, "--out", str(folder / "whole"), "--save", str(folder / "{step}.pt"),
         "--save-every", "4"],
        [*words, "--out", str(folder / "resumed"), "--resume", str(folder / "4.pt")],
        [*words, "--out", str(folder / "ulysses"), "--resume", str(folder / "4.pt"),
         "--context-method", "ulysses"],
    )  # fmt: skip
    results = ranks_of.run(folder / "ranks", 2, trained, 2, *calls)
    assert not any(isinstance(result, str) for result in results), results
    return folder, words, results


def test_a_ring_resumes_bit_for_bit(ring):
    folder, _, results = ring
    for result in results:
        assert [code for code, _ in result] == [0, 0, 0], result
    rows = without_time(rows_in(folder / "whole"))
    assert without_time(rows_in(folder / "resumed")) == rows
    assert "except for roundings" not in results[0][1][1]
    # Another method goes on with the same weights.
    said = "--context-parallel 2 (ring), and goes on with --context-parallel 2 (ulysses)"
    assert said in results[0][2][1] and said not in results[1][2][1]
    ulysses = without_time(rows_in(folder / "ulysses"))
    assert ulysses[:4] == rows[:4] and ulysses[4:] != rows[4:]
    check_same(ulysses, rows, 0.02)


def test_one_process_goes_on_where_two_were(ring, given, tmp_path):
    folder, _, _ = ring
    words = [*given, "--attention", "emulated", "--resume", str(folder / "4.pt")]
    code, said = called([*words, "--out", str(tmp_path)])
    assert code == 0 and "goes on with --context-parallel 1: the same run except" in said
    rows = rows_in(folder / "whole")
    check_same(rows_in(tmp_path), rows, 0.02)
    # The step behind the checkpoint has the same weights: only attention is rounded otherwise.
    found, expected = (rows_in(at)[4]["train_loss"] for at in (tmp_path, folder / "whole"))
    assert 0 < abs(found / expected - 1) < 1e-3


# ---- errors --------------------------------------------------------------------------------------

#: By what is wrong: the words, and what every process says with exit code 2.
WRONG = {
    "ranks": (["--context-parallel", "2"],
              "--context-parallel 2: it must divide the number of processes, which is 3"),
    "method": (["--context-method", "ulysses"],
               "--context-method ulysses: pass --context-parallel, too, which is 1"),
    "heads": (["--context-parallel", "3", "--context-method", "ulysses"],
              "3 processes cannot share the model's 4 heads"),
    "tokens": (["--context-parallel", "3", "--tokens", "5", "--tokens-per-step", "0"],
               "--tokens 5: --context-parallel 3 with ring needs at least 6"),
    "products": (["--context-parallel", "3", "--attention", "emulated:precision=s+pv+dp"],
                 "has the precisions of kernels"),
    "sdpa": (["--context-parallel", "3", "--attention", "sdpa"],
             "PyTorch's ring runs on GPUs alone"),
    "least": (["--context-parallel", "0"], "--context-parallel 0: it must be at least 1"),
    "batches": (["--context-parallel", "3", "--tokens-per-step", "100"],
                "a multiple of 75, which is --batch 1 times --tokens 75 times 1 team of 3 proc"),
    "held out": (["--val-sequences", "2"], "--val-sequences 2: 3 processes share them"),
    "absent": (["--context-parallel", "3", "--resume", "absent.pt"], "there is no such file"),
}  # fmt: skip


def test_wrong_use_is_an_error_on_every_process(given, tmp_path):
    calls = [[*given, "--attention", "emulated", "--out", str(tmp_path / "out"), *words]
             for words, _ in WRONG.values()]  # fmt: skip
    (tmp_path / "ranks").mkdir()
    for result in ranks_of.run(tmp_path / "ranks", 3, trained, 3, *calls):
        for (code, said), (words, expected) in zip(result, WRONG.values(), strict=True):
            assert code == 2 and expected in said, (words, said)
    assert not (tmp_path / "out").exists()


def test_another_number_of_teams_goes_on_with_the_same_batches(ring, given, tmp_path):
    """Two processes that share no sequence are two teams: without --tokens-per-step they would take
    a batch each."""
    folder, *_ = ring
    (tmp_path / "ranks").mkdir()
    words = [*given, "--attention", "emulated", "--out", str(tmp_path / "out"),
             "--resume", str(folder / "4.pt")]  # fmt: skip
    calls = [*words, "--tokens-per-step", "0"], words
    for result in ranks_of.run(tmp_path / "ranks", 2, trained, 2, *calls):
        (refused, said), (code, _) = result
        assert refused == 2 and code == 0, said
        assert "the options say tokens_per_step 150 (not 300); pass the options of its run" in said
    found, expected = (rows_in(at)[4]["train_loss"] for at in (tmp_path / "out", folder / "whole"))
    assert 0 < abs(found / expected - 1) < 1e-3


@pytest.mark.parametrize(
    ("line", "given", "said"),
    [("emulated", dict(device="cuda"), "pass --attention sagebwd"),
     ("sdpa", dict(device="cuda", tokens=1536), "needs a multiple of 1024"),
     ("sdpa", dict(device="cuda", tokens=2048), None), ("sagebwd", dict(device="cuda"), None),
     ("sdpa", dict(context_method="ulysses"), None)],
)  # fmt: skip
def test_what_processes_can_share(line, given, said):
    config = TrainConfig(**dict(model=ModelConfig(), device="cpu", context_parallel=2) | given)
    expected = pytest.raises(ValueError, match=said) if said else contextlib.nullcontext()
    with expected:
        sharing.check_attention(config, AttentionChoice.parse(line))


def test_pytorchs_chunks_are_ours():
    """Where PyTorch's ring is taken, `shard` cuts sequences up as PyTorch does."""
    from sagebwd.distributed import sharding

    for count in (2, 3, 4, 8):
        tokens = 3 * sharing.UNIT * count
        each = tokens // (2 * count)
        for at in range(count):
            place = sharding.Place(None, [], object(), None, at, count, 0, 1)
            late = 2 * count - 1 - at
            assert sharding.spans_of(tokens, place) == [
                (at * each, (at + 1) * each), (late * each, (late + 1) * each)]  # fmt: skip


# ---- torchrun ------------------------------------------------------------------------------------


def test_an_interrupt_of_torchrun_leaves_a_checkpoint_and_says_how_to_go_on(given, tmp_path):
    """torchrun hands every signal on in the same way; what one process makes of each of them is in
    test_experiments_signals.py."""
    sent = signal.SIGTERM
    words = [*given, *EXACT, "--out", str(tmp_path), "--save", str(tmp_path / "{step}.pt"),
             "--context-parallel", "2", "--context-method", "ulysses", "--steps", "50"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
               "-m", "experiments.train", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    with warm.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while "/50 train" not in (line := process.stderr.readline()):
            assert line, "it ended by itself"
        path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        for child in path.read_text().split():  # as Slurm and terminals; torchrun sends it, too
            os.kill(int(child), sent)
        process.send_signal(sent)
        said = process.stderr.read()
    assert process.returncode
    (checkpoint,) = tmp_path.glob("*.pt")
    (step,) = re.findall(r"train: interrupted by SIGTERM at step (\d+) of 50; .* To go on:\n", said)
    assert checkpoint.name == f"{step}.pt"
    (told,) = re.findall(r"^ +(torchrun .*)", said, re.MULTILINE)
    assert shlex.split(told) == [
        "torchrun", "--nproc-per-node", "2", "-m", "experiments.train", *words,
        "--resume", str(checkpoint)]  # fmt: skip


def test_a_signal_to_one_process_stops_all():
    group = types.SimpleNamespace(world=2, maximum=lambda x: x.clamp_min(signal.SIGTERM))
    trainer = types.SimpleNamespace(group=group, device="cpu")
    before = signal.getsignal(signal.SIGTERM)
    with train.Signals(trainer) as signals:
        assert signals.came() and signals.number == signal.SIGTERM
        signal.raise_signal(signal.SIGINT)  # the first that comes here
    assert signal.getsignal(signal.SIGTERM) is before


def test_what_is_said_of_an_interrupt():
    """The words to go on have no other --resume."""
    trainer = types.SimpleNamespace(group=Group(), config=TrainConfig(steps=50), step=7, saved=None)
    options, words = types.SimpleNamespace(save=None), ["--a", "b", "--resume=x", "--resume", "y"]
    assert train.how_to_go_on(trainer, options, words) == (
        "interrupted at step 7 of 50; nothing was saved, as there was no --save FILE")
    options.save = "a.pt"
    assert "as a second interrupt does not wait" in train.how_to_go_on(trainer, options, words)
    trainer.saved = "a b.pt", 5
    assert train.how_to_go_on(trainer, options, words).endswith(
        "train --a b --resume 'a b.pt'")  # fmt: skip
    trainer.group = Group(1, 2)
    assert train.how_to_go_on(trainer, options, words) == ""
