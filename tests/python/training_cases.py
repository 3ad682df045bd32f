"""Training runs of a second, for tests of the experiments."""

from experiments.attentions import AttentionChoice
from experiments.config import ModelConfig, TrainConfig
from experiments.training import Trainer

TINY = ["--device", "cpu", "--model", "toy", "--steps", "12", "--batch", "2", "--tokens", "48",
        "--dim", "32", "--layers", "2", "--head-dim", "16", "--hidden", "64", "--warmup", "2",
        "--lr", "0.01", "--eval-every", "4", "--log-every", "4", "--val-sequences", "4"]
TINY_CONFIG = TrainConfig(
    model=ModelConfig(dim=32, layers=2, head_dim=16, hidden=64), steps=12, batch=2, tokens=48,
    warmup=2, lr=0.01, eval_every=4, log_every=4, val_sequences=4, device="cpu",
)  # fmt: skip


def attention(line):
    return AttentionChoice.parse(line)


def run_of(corpus, line="sdpa", config=TINY_CONFIG, **how):
    return Trainer(config, attention(line), corpus).run(**how)


def curve_of(run):
    return {row["step"]: row["val_loss"] for row in run.rows if row["val_loss"] is not None}
