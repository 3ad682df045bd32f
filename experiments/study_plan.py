"""The arms of a study, in the order in which they run. A plan is fixed before its results are."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .config import MODELS, TrainConfig

#: Attentions by the names that arms have.
ATTENTIONS = {
    "sdpa": "sdpa",
    "sdpa-other": "sdpa-other",
    "row": "sagebwd",
    "row-front": "sagebwd:front",
    "gradients16": "sagebwd:precision=gradients16",
    "qk16": "sagebwd:precision=qk16",
    "block": "sagebwd:granularity=block",
    "paper": "sagebwd:granularity=block,no-rotate",
    "no-smooth-k": "sagebwd:no-smooth-k",
    "paper-no-smooth-k": "sagebwd:granularity=block,no-smooth-k,no-rotate",
    "smooth-q": "sagebwd:no-smooth-k,smooth-q",
    "smooth-q-k": "sagebwd:smooth-q",
    "emulated": "emulated",
    "dp-int8": "emulated:precision=s+pv+dv+dp+dq+dk",
}
K = 1024
#: Nats above the best rate's loss at which a rate counts as stable.
STABLE_WITHIN = 0.1


@dataclass(frozen=True)
class Arm:
    """One run of a study. A rate of None is the largest stable one that its sweep finds."""

    name: str
    attention: str
    tokens_per_step: int
    steps: int
    seed: int = 0
    qk_norm: bool = True
    lr: float | None = None
    model: str = "26m"
    head_dim: int = 64
    tokens: int = 1024
    batch: int = 32
    val_sequences: int = 256
    sweep: bool = False

    @property
    def trained_tokens(self) -> int:
        return self.steps * self.tokens_per_step

    def config(self, vocab: int, device: str, compile: bool = False,
               graph: bool = False) -> TrainConfig:  # fmt: skip
        model = replace(MODELS[self.model], qk_norm=self.qk_norm, head_dim=self.head_dim,
                        vocab=vocab)  # fmt: skip
        return TrainConfig(
            model=model, seed=self.seed, steps=self.steps, batch=self.batch, tokens=self.tokens,
            tokens_per_step=self.tokens_per_step, lr=self.lr, warmup=max(2, self.steps // 10),
            eval_every=max(1, self.steps // 20), log_every=max(1, self.steps // 100),
            val_sequences=self.val_sequences, device=device, compile=compile, graph=graph,
            # Single losses of so few tokens as toy's vary by 1.5 nats.
            diverged_at=TrainConfig.diverged_at * (2 if self.model == "toy" else 1),
        )  # fmt: skip

    def family(self) -> tuple:
        """Arms whose rates one sweep finds."""
        return self.model, self.head_dim, self.tokens, self.qk_norm

    def regime(self) -> str:
        """Arms must share this to be compared: everything except attention and seed."""
        per_step = self.tokens_per_step
        shown = f"{per_step // K}K" if per_step % K == 0 else str(per_step)
        qk = "QK-norm" if self.qk_norm else "no QK-norm"
        return (f"{self.model}, D {self.head_dim}, {self.tokens} tokens, {qk}, {shown} a step, "
                f"{self.steps} steps, lr {self.lr:g}")  # fmt: skip


def stable_rate(arms: list[tuple[Arm, dict]], family: tuple) -> float | None:
    """The largest rate of bf16's sweep that did not diverge and whose loss is near the best one's;
    None until the whole sweep is there."""
    found = [(arm, record) for arm, record in arms if arm.sweep and arm.family() == family]
    if not found or any(record is None for _, record in found):
        return None
    stable = {arm.lr: record["final_val_loss"] for arm, record in found
              if record["status"] == "finished"}  # fmt: skip
    if not stable:
        raise ValueError("every rate of the sweep diverged: name lower ones")
    best = min(stable.values())
    return max(rate for rate, loss in stable.items() if loss <= best + STABLE_WITHIN)


@dataclass(frozen=True)
class Size:
    """A plan's arms share `common`. Each regime has a name and (tokens per step, steps)."""

    regimes: dict
    common: dict

    def arm(self, regime: str, attention: str, seed: int = 0, qk_norm: bool = True) -> Arm:
        per_step, steps = self.regimes[regime]
        common = dict(self.common)
        prefix = common.pop("prefix", "")
        name = f"{prefix}{regime}{'' if qk_norm else '-no-qk-norm'}-{attention}-{seed}"
        return Arm(name, ATTENTIONS[attention], per_step, steps, seed, qk_norm, **common)

    def arms(self, regime: str, *attentions: str, seeds: int = 1, qk_norm: bool = True,
             ) -> list[Arm]:  # fmt: skip
        return [self.arm(regime, attention, seed, qk_norm) for attention in attentions
                for seed in range(seeds)]  # fmt: skip

    def sweep(self, rates: tuple[float, ...], qk_norm: bool) -> list[Arm]:
        base = self.arm("sweep", "sdpa", 0, qk_norm)
        return [replace(base, name=f"{base.name}-lr-{rate:g}", lr=rate, sweep=True)
                for rate in rates]  # fmt: skip


def pilot() -> list[Arm]:
    """34 million tokens an arm: about a minute each on an H100."""
    size = Size({"sweep": (64 * K, 64), "small": (64 * K, 512), "large": (512 * K, 64),
                 "few-steps": (64 * K, 64)}, {})  # fmt: skip
    return _ordered(size, (1e-3, 2e-3, 4e-3, 8e-3, 16e-3))


def full() -> list[Arm]:
    """200 million tokens an arm, and the decisive arms with a model of 110 million."""
    size = Size({"sweep": (64 * K, 256), "small": (64 * K, 3052), "large": (512 * K, 382),
                 "few-steps": (64 * K, 382)}, {})  # fmt: skip
    big = Size({"sweep": (64 * K, 128), "small": (64 * K, 3052), "large": (512 * K, 382)},
               {"model": "110m", "head_dim": 128, "tokens": 2048, "batch": 8,
                "val_sequences": 128, "prefix": "110m-"})  # fmt: skip
    decisive = big.sweep((5e-4, 1e-3, 2e-3, 4e-3), True)
    for regime in ("large", "small"):
        decisive += big.arms(regime, "sdpa", "sdpa-other", "row", seeds=3)
        decisive += big.arms(regime, "gradients16", "paper", "no-smooth-k")
    decisive += big.sweep((5e-4, 1e-3, 2e-3, 4e-3), False)
    decisive += big.arms("large", "sdpa", seeds=3, qk_norm=False)
    decisive += big.arms("large", "row", qk_norm=False)
    # Planned when all arms of the smaller model were done, in which INT8 let scores grow where
    # there is no QK-norm: which products do that, and whether the paper's scales do it alone.
    after = size.arms("small", "paper", qk_norm=False)
    after += size.arms("small", "gradients16", "qk16", seeds=3, qk_norm=False)
    return _ordered(size, (1e-3, 2e-3, 4e-3, 8e-3, 16e-3)) + decisive + after


def front() -> list[Arm]:
    """33 million tokens an arm: half a minute each on an H200. The model's QK-norm and RoPE beside
    those of attention, and SDPA, at the rate that `full` found for this model: at twice this rate
    the noise of pairs is wider than any effect."""
    size = Size({"small": (64 * K, 500)}, {})
    return [replace(arm, lr=1e-3) for arm in size.arms("small", "row", "row-front", "sdpa", seeds=3)]


def toy() -> list[Arm]:
    """Some seconds on a CPU, to see that everything works."""
    common = {"model": "toy", "head_dim": 32, "tokens": 64, "batch": 4, "val_sequences": 4}
    size = Size({"sweep": (256, 4), "small": (256, 24), "large": (1024, 6)}, common)
    return [*size.sweep((1e-3, 1e-2), True), *size.arms("small", "sdpa", "sdpa-other", seeds=3),
            *size.arms("large", "sdpa"), *size.arms("small", "emulated")]  # fmt: skip


PLANS = {"pilot": pilot, "full": full, "front": front, "toy": toy}


def _ordered(size: Size, rates: tuple[float, ...]) -> list[Arm]:
    """The noise first, then what the paper claims most, then controls."""
    arms = [*size.sweep(rates, True), *size.sweep(rates, False)]
    for regime in ("large", "small", "few-steps"):
        arms += size.arms(regime, "sdpa", "sdpa-other", "row", seeds=3)
    arms += size.arms("large", "gradients16", "paper", "no-smooth-k", "paper-no-smooth-k")
    arms += size.arms("large", "sdpa", "row", seeds=3, qk_norm=False)
    arms += size.arms("large", "paper", "no-smooth-k", "paper-no-smooth-k", qk_norm=False)
    arms += size.arms("few-steps", "dp-int8")
    arms += size.arms("small", "gradients16", "paper", "no-smooth-k", "paper-no-smooth-k")
    arms += size.arms("large", "block", "smooth-q", "smooth-q-k")
    arms += size.arms("large", "gradients16", "smooth-q", qk_norm=False)
    arms += size.arms("small", "sdpa", "row", seeds=3, qk_norm=False)
    arms += size.arms("small", "no-smooth-k", "paper-no-smooth-k", qk_norm=False)
    arms += size.arms("small", "block", "smooth-q", "smooth-q-k")
    return arms
