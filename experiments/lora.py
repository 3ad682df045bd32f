"""Fine-tunes a trained model by LoRA with several attentions, and judges them by the noise.

    python -m experiments.train --corpus a.bin --attention sdpa --save base.pt
    python -m experiments.corpus FOLDER --tokenizer a.bin.tokenizer.json --out b.bin
    python -m experiments.lora base.pt --corpus b.bin --out lora

The base stays as it is; adapters of the attention layers' matrices learn other text. Runs of one
seed have the same adapters and batches. Every result is evaluated by every attention, and the bands
are those of `study`. Runs that --out has are not repeated.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sagebwd.benchmark.environment import environment, write_json

from . import command, study_summary
from .attentions import AttentionChoice, check_runs_on
from .checkpoints import load_weights, read_checkpoint
from .command import Failure, torch
from .config import TrainConfig, add_common_arguments
from .corpus import Bytes
from .data import Corpus
from .study_plan import Arm
from .study_worker import figures
from .training import Trainer, check


@dataclass(frozen=True)
class Base:
    """This checkpoint is fine-tuned."""

    path: Path
    weights: dict
    config: TrainConfig
    summary: dict  #: what a record says of it

    @staticmethod
    def open(path: Path) -> Base:
        saved, config, choice = read_checkpoint(path)
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        summary = {"checkpoint": path.name, "sha256": digest, "step": saved["step"],
                   "attention": choice.label(), "corpus": saved["corpus"]}  # fmt: skip
        return Base(path, saved["model"], config, summary)


def tokenizer_of(config: TrainConfig) -> str:
    """How to make a corpus for a model."""
    if config.model.vocab == Bytes.vocab:
        return "make it with corpus --tokenizer bytes, as the base's was"
    return "make it with corpus --tokenizer FILE, the .tokenizer.json beside the base's corpus"


@dataclass(frozen=True)
class Adapters:
    rank: int
    alpha: float

    def add_to(self, model, seed: int) -> list:
        """Freezes the model, and gives its attention layers adapters; their weights."""
        generator = torch.Generator().manual_seed(seed)
        model.requires_grad_(False)
        found = []
        for block in model.blocks:
            for name in ("qkv", "out"):
                adapted = _adapted(getattr(block.attention, name), self, generator)
                setattr(block.attention, name, adapted)
                found += [adapted.down, adapted.up]
        return found


def _adapted(linear, adapters: Adapters, generator):
    """linear(x) + alpha / rank * up down x; up begins as zero, so that nothing changes at first."""
    from torch import nn
    from torch.nn.functional import linear as product

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear
            down = torch.randn(adapters.rank, linear.in_features, generator=generator,
                               device="cpu")  # fmt: skip
            self.down = nn.Parameter(down.to(linear.weight) / math.sqrt(linear.in_features))
            self.up = nn.Parameter(linear.weight.new_zeros(linear.out_features, adapters.rank))

        def forward(self, x):
            low = product(product(x, self.down), self.up)
            return self.linear(x) + adapters.alpha / adapters.rank * low

    return Adapted()


def trainer_of(base: Base, config: TrainConfig, choice: AttentionChoice, corpus: Corpus,
               adapters: Adapters) -> Trainer:  # fmt: skip
    """A trainer of the adapters alone."""
    trainer = Trainer(config, choice, corpus)
    load_weights(trainer.model, base.weights, base.path)
    weights = adapters.add_to(trainer.model, config.seed)
    fused = trainer.device.type == "cuda"
    trainer.optimiser = torch.optim.AdamW(weights, lr=config.lr, betas=(0.9, 0.95),
                                          weight_decay=0.0, fused=fused)  # fmt: skip
    return trainer


def arms_of(base: Base, choices: list[AttentionChoice], adapters: Adapters, options) -> list[Arm]:
    """As a study has them: seed by seed, so that what is there can be judged early."""
    model = base.config.model
    per_step = options.batch * options.tokens
    return [Arm(f"lora-{choice.stem().removeprefix('train-')}-{seed}", choice.label(), per_step,
                options.steps, seed, model.qk_norm, options.lr,
                f"LoRA of rank {adapters.rank}", model.head_dim, options.tokens, options.batch,
                options.val_sequences)
            for seed in range(options.seeds) for choice in choices]  # fmt: skip


def config_of_arm(arm: Arm, base: Base, device: str) -> TrainConfig:
    return TrainConfig(
        model=base.config.model, seed=arm.seed, steps=arm.steps, batch=arm.batch,
        tokens=arm.tokens, lr=arm.lr, warmup=max(2, arm.steps // 10), weight_decay=0.0,
        eval_every=max(1, arm.steps // 10), log_every=max(1, arm.steps // 100),
        val_sequences=arm.val_sequences, device=device, autocast=base.config.autocast,
    )  # fmt: skip


def run(arm: Arm, base: Base, corpus: Corpus, adapters: Adapters, device: str,
        evaluated_by: list[AttentionChoice]) -> dict:  # fmt: skip
    """The record of one run."""
    started = time.perf_counter()
    config = config_of_arm(arm, base, device)
    trainer = trainer_of(base, config, AttentionChoice.parse(arm.attention), corpus, adapters)
    before = trainer.validate()[0]
    if not before < math.log(base.config.model.vocab):
        raise Failure(
            f"the base's loss of --corpus is {before:.2f} nats, no better than chance: the text "
            f"was tokenized otherwise: {tokenizer_of(base.config)}")
    trained = trainer.run(None, lambda row: command.progress(arm.name, row["step"], arm.steps))
    record = {"arm": asdict(arm), "regime": arm.regime(), "base": base.summary,
              "adapters": asdict(adapters), "corpus": corpus.summary(), "status": trained.status,
              "diverged": trained.diverged, "val_loss_before": before,
              "trained_weights": sum(p.numel() for p in trainer.model.parameters()
                                     if p.requires_grad),
              **figures(trained.rows)}  # fmt: skip
    if trained.status == "finished":
        by = {choice.label(): trainer.validate(choice)[0] for choice in evaluated_by}
        record |= {"final_val_loss_by": by, "final_val_loss_by_sdpa": by["sdpa"]}
    return record | {"seconds": round(time.perf_counter() - started, 2)}


def there(arm: Arm, base: Base, corpus: Corpus, adapters: Adapters, out: Path) -> dict | None:
    """The record that --out has of a run; ValueError where it is of another one."""
    path = out / f"{arm.name}.json"
    try:
        record = study_summary.read_record(path)
    except FileNotFoundError:
        return None
    if not record or "base" not in record:
        raise ValueError(f"{path} is no record of a run: remove it, or name another --out")
    given = {"arm": asdict(arm), "base": base.summary, "adapters": asdict(adapters),
             "corpus": corpus.summary()}  # fmt: skip
    if wrong := study_summary.differing({name: record.get(name) for name in given}, given):
        raise ValueError(f"{path.name} in --out is of another run, with {wrong}: name another "
                         "--out")  # fmt: skip
    return record


def table(records: list[dict]) -> str:
    """Mean loss of every attention's adapters, by every attention that evaluates them."""
    by_attention: dict[str, list[dict]] = {}
    for record in records:
        if "final_val_loss_by" in record:
            by_attention.setdefault(record["arm"]["attention"], []).append(record)
    if not by_attention:
        return "no run finished"
    evaluators = list(next(iter(by_attention.values()))[0]["final_val_loss_by"])
    lines = [f"{'adapters by':36}{'before':>9}" + "".join(f"  by {e}" for e in evaluators)]
    for attention, found in by_attention.items():
        before = sum(r["val_loss_before"] for r in found) / len(found)
        means = (sum(r["final_val_loss_by"][e] for r in found) / len(found) for e in evaluators)
        cells = (f"{mean:{5 + len(e)}.4f}" for mean, e in zip(means, evaluators))
        lines.append(f"{attention:36}{before:9.4f}" + "".join(cells))
    return "\n".join(lines)


def _said(record: dict) -> str:
    said = f"{record['arm']['name']}: {record['status']}"
    if record["final_val_loss"] is not None:
        said += (f", validation loss {record['val_loss_before']:.4f} to "
                 f"{record['final_val_loss']:.4f}")  # fmt: skip
    return said


def _arguments():
    parser = command.parser("lora", __doc__)
    add = parser.add_argument
    add("base", type=Path, metavar="CHECKPOINT", help="a trained model, as train --save wrote it")
    add_common_arguments(parser)
    add("--attention", nargs="+", metavar="NAME[:OPTION,...]", help="attentions beside sdpa "
        "(default: sdpa-other and sagebwd, which is emulated without a GPU)")  # fmt: skip
    add("--seeds", type=int, default=3, metavar="N", help="runs of each attention (default: 3)")
    add("--steps", type=int, default=200, metavar="N", help="training steps (default: 200)")
    add("--batch", type=int, default=16, metavar="N", help="sequences of a step (default: 16)")
    add("--tokens", type=int, metavar="N", help="tokens per sequence (default: the base's)")
    add("--lr", type=float, default=1e-3, metavar="X",
        help="highest learning rate (default: 0.001)")  # fmt: skip
    add("--val-sequences", type=int, default=64, metavar="N",
        help="held-out sequences per validation (default: 64)")  # fmt: skip
    add("--rank", type=int, default=16, metavar="N", help="rank of the adapters (default: 16)")
    add("--alpha", type=float, default=32.0, metavar="X",
        help="the adapters' part counts alpha / rank times (default: 32)")  # fmt: skip
    return parser


def _prepared(options) -> tuple[Base, Corpus, Adapters, list[AttentionChoice], list[Arm]]:
    """Checks that what the options ask for can run here, and opens it."""
    for name in ("seeds", "rank"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name} {getattr(options, name)}: it must be at least 1")
    if not 0 < options.alpha < math.inf:
        raise ValueError(f"--alpha {options.alpha}: it must be above 0")
    corpus = Corpus.open(options.corpus)
    command.check_outputs(options)
    device = command.check_device(options.device)
    ours = "sagebwd" if device.type == "cuda" else "emulated"
    lines = ["sdpa", *(options.attention or ("sdpa-other", ours))]
    choices = [AttentionChoice.parse(line) for line in dict.fromkeys(lines)]
    for choice in choices:
        check_runs_on(choice, device)
    base = Base.open(options.base)
    if corpus.vocab != base.config.model.vocab:
        raise ValueError(f"--corpus has {corpus.vocab} kinds of tokens, and the base "
                         f"{base.config.model.vocab}: {tokenizer_of(base.config)}")
    if corpus.header["sha256"] == base.summary["corpus"]:
        raise ValueError("--corpus is what the base was trained on: fine-tune on other text")
    if options.tokens is None:
        options.tokens = base.config.tokens
    adapters = Adapters(options.rank, options.alpha)
    arms = arms_of(base, choices, adapters, options)
    config = config_of_arm(arms[0], base, options.device)
    check(config, corpus, 1)
    trainer_of(base, config, choices[0], corpus, adapters)  # the weights fit
    return base, corpus, adapters, choices, arms


def main(arguments: list[str] | None = None) -> int:
    parser = _arguments()

    def work(options) -> int:
        with command.wrong_use(parser):
            given = _prepared(options)
        with command.alone(options.out, study_summary.NAME):
            return performed(options, *given)

    def performed(options, base, corpus, adapters, choices, arms) -> int:
        with command.wrong_use(parser):
            known = {arm: there(arm, base, corpus, adapters, options.out) for arm in arms}
            with contextlib.suppress(study_summary.NoRecords):  # broken ones are better known now
                study_summary.records_of(options.out)
            study_summary.check_summary(options.out)
        # SDPA evaluates all of them, and all that are not exact evaluate, too.
        evaluators = [c for c in choices if c.name != "sdpa-other"]
        records = []
        for arm in arms:
            record = known[arm]
            if record is None:
                record = run(arm, base, corpus, adapters, options.device, evaluators)
                record["environment"] = environment()
                write_json(options.out / f"{arm.name}.json", record)
                print(_said(record), file=sys.stderr)
            records.append(record)
        judged, own = study_summary.write(options.out), table(records)
        if others := len(study_summary.records_of(options.out)) - len(records):
            judged = f"all runs that --out has, {len(records) + others}:\n\n{judged}"
            own = f"the runs of this command, {len(records)}:\n{own}"
        print(judged, own, sep="\n\n")
        if any(record["status"] == "finished" for record in records):
            return 0
        print(f"every run diverged: pass a lower --lr than {options.lr:g}", file=sys.stderr)
        return 1

    return command.run(parser, arguments, work,
                       again="the same command goes on, and repeats no run that --out has")


if __name__ == "__main__":
    sys.exit(main())
