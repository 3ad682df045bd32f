"""Training with CUDA graphs of its batches, against the same without."""

from dataclasses import replace

import pytest
from corpus_cases import corpus_of
from inputs import torch

from experiments.attentions import AttentionChoice
from experiments.config import ModelConfig, TrainConfig
from experiments.data import Corpus
from experiments.graphed import GraphedStep
from experiments.training import Trainer

#: Four batches a step: the third step is the first that replays only.
CONFIG = TrainConfig(
    model=ModelConfig(dim=128, layers=2, head_dim=64, hidden=256), steps=8, batch=2, tokens=128,
    tokens_per_step=4 * 2 * 128, warmup=2, lr=0.01, eval_every=4, log_every=1, val_sequences=4,
    device="cuda",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return Corpus.open(corpus_of(tmp_path_factory.mktemp("text"), 24))


def trained(corpus, line="sagebwd", **changed):
    trainer = Trainer(replace(CONFIG, **changed), AttentionChoice.parse(line), corpus)
    rows = [row | {"tokens_per_second": 0} for row in trainer.run().rows]
    return rows, trainer.model.state_dict()


def check_same(one, other):
    assert one[0] == other[0]
    assert all(torch.equal(one[1][name], other[1][name]) for name in other[1])


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("line", [
    "sdpa", "sagebwd", "sagebwd:granularity=block,no-rotate", "sagebwd:smooth-q", "emulated",
])  # fmt: skip
def test_a_graph_changes_no_bit_of_a_run(corpus, line, compile):
    graphed = trained(corpus, line, compile=compile, graph=True)
    check_same(graphed, trained(corpus, line, compile=compile))
    losses = [row["train_loss"] for row in graphed[0]]
    assert len(set(losses)) == CONFIG.steps and losses[-1] < losses[0] - 0.1


def test_a_graph_follows_a_switch_of_the_attention(corpus):
    switch = dict(switch_at=4, switch_to="sdpa")
    check_same(trained(corpus, graph=True, **switch), trained(corpus, **switch))
    assert trained(corpus, **switch)[0] != trained(corpus)[0]


def test_a_run_with_graphs_resumes_one_without(corpus, tmp_path):
    whole = trained(corpus)
    cut = Trainer(CONFIG, AttentionChoice.parse("sagebwd"), corpus)
    cut.run(until=5)
    cut.save(tmp_path / "a.pt")
    resumed = Trainer(replace(CONFIG, graph=True), AttentionChoice.parse("sagebwd"), corpus)
    resumed.load(tmp_path / "a.pt")
    rows = [row | {"tokens_per_second": 0} for row in resumed.run().rows]
    check_same((rows, resumed.model.state_dict()), whole)


def test_replays_wait_for_earlier_ones():
    """A stop of the training waits for a few of them, not for all that the launch queue takes."""
    def slow(x):
        torch.cuda._sleep(20_000_000)  # about 10 ms
        return x + 1

    step, x, ends = GraphedStep(slow), torch.zeros(1, device="cuda"), []
    for _ in range(30):
        step(x)
        ends.append(torch.cuda.current_stream().record_event())
    behind = [not end.query() for end in ends]
    assert behind[-1] and sum(behind) <= GraphedStep.AHEAD
