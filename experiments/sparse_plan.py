"""The arms of sparse_video, in which order they run, and what a limit of time leaves of them."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace

from .runner import differing


@dataclass(frozen=True)
class Way:
    """One way to attend."""

    text: str
    branches: str = "both"  #: 'dense', 'sparse', 'linear' or 'both'
    router: str = "pooled"  #: 'pooled', 'learned' or 'random'
    alpha: str = "block"
    linear: str = "complement"
    #: How exact blocks are computed: 'int8' by `block_sparse_attention`; 'bf16' by PyTorch on
    #: gathered blocks; 'mixed' has the former's forward and the latter's backward.
    how: str = "int8"
    how_at_validation: str = "int8"
    routing: str = "hard"

    @property
    def needs_density(self) -> bool:
        return self.branches in ("sparse", "both")


#: By the letters of the design. All but (d) take the router of (e), where they have a learned one.
ARMS = {
    "a": Way("dense", "dense"),
    "b": Way("sparse branch alone, pooled router", "sparse"),
    "c": Way("linear branch alone", "linear"),
    "d": Way("SLA2, pooled router"),
    "e": Way("SLA2, learned router", router="learned"),
    "f": Way("SLA2, random lists", router="random"),
    "g": Way("(e) trained in bf16, INT8 at validation", router="learned", how="bf16"),
    "h-head": Way("(e), alpha by head", router="learned", alpha="head"),
    "h-estimated": Way("(e), alpha estimated", router="learned", alpha="estimated"),
    "i": Way("(e), backward in bf16", router="learned", how="mixed"),
    "j": Way("(e), linear branch sees all keys", router="learned", linear="all"),
    "k": Way("(e), straight-through routing", router="learned", routing="straight-through"),
}


@dataclass(frozen=True)
class Run:
    """One training of a way to attend."""

    arm: str
    density: float  #: 0 where the arm has none
    seed: int

    def label(self) -> str:
        return f"{self.arm}:{self.density:g}:{self.seed}" if self.density else (
            f"{self.arm}:{self.seed}")  # fmt: skip


@dataclass(frozen=True)
class SparseConfig:
    """Model, data and schedule. The defaults are 21 million parameters and 8192 tokens."""

    frames: int = 32
    size: int = 64
    patch: int = 4
    dim: int = 384
    layers: int = 8
    head_dim: int = 64
    block_size: tuple[int, int] = (128, 64)
    batch: int = 2
    pretrain_steps: int = 6000
    pretrain_lr: float = 5e-4
    stage_one_steps: int = 100
    stage_one_lr: float = 1e-2
    steps: int = 500
    lr: float = 1e-4
    evals: int = 4
    validation: int = 16
    calibration: int = 4
    densities: tuple[float, ...] = (0.05, 0.03, 0.1)
    seeds: int = 3
    temperature: float = 0.1
    how: str = "int8"
    compile: bool = False
    toy: bool = False

    @property
    def tokens(self) -> int:
        return self.frames * (self.size // self.patch) ** 2

    def to_dict(self) -> dict:
        return {name: list(x) if isinstance(x, tuple) else x for name, x in asdict(self).items()}


#: Seconds on a CPU, to see that all parts work; its figures mean nothing.
TOY = SparseConfig(frames=4, size=16, dim=32, layers=2, head_dim=16, block_size=(16, 8),
                   pretrain_steps=6, stage_one_steps=3, steps=3, evals=1, validation=4,
                   calibration=2, densities=(0.25, 0.13), seeds=2, how="bf16",
                   toy=True)  # fmt: skip


def groups(config: SparseConfig) -> list[list[Run]]:
    """All runs, the more important groups first. The first two are what the verdict needs."""
    first, *others = config.densities
    seeds = range(config.seeds)

    def of(arms: str, density: float, seeds) -> list[Run]:
        return [Run(arm, density if ARMS[arm].needs_density else 0.0, seed)
                for seed in seeds for arm in arms.split()]  # fmt: skip

    found = [of("a b c d e f", first, seeds[:1]), of("d e", first, seeds[1:])]
    if others:
        found[1] += of("d e", others[0], seeds)
    found += [of("g h-head h-estimated i j", first, seeds[:1]), of("a b c f", first, seeds[1:])]
    for density in others:
        found += [of("d e", density, seeds), of("b f", density, seeds[:1])]
    found += [of("k", first, seeds[:1]), of("g h-head h-estimated i j", first, seeds[1:])]
    for density in others:
        found += [of("g h-head h-estimated i j b f", density, seeds)]
    seen: set[Run] = set()
    for group in found:
        group[:] = [run for run in group if not (run in seen or seen.add(run))]
    return [group for group in found if group]


@dataclass
class Costs:
    """Seconds: of one step of training dense and with SLA2 and of stage 1, of a validation, and of
    preparing an arm."""

    dense: float
    sparse: float
    stage_one: float
    validation: float
    setup: float

    def of(self, run: Run, steps: int, evals: int) -> float:
        step = self.dense if ARMS[run.arm].branches == "dense" else self.sparse
        if ARMS[run.arm].routing != "hard":  # PyTorch's own products of all blocks
            step += 2 * self.stage_one
        setup = self.setup if ARMS[run.arm].branches == "both" else 0.0
        return setup + steps * step + (evals + 1) * self.validation


@dataclass
class Plan:
    """A plan says what is run, and what is cut and why."""

    runs: list[Run]
    steps: int
    stage_one_steps: int
    cut: list[str] = field(default_factory=list)

    def to_dict(self) -> dict:
        return {"runs": [run.label() for run in self.runs], "steps": self.steps,
                "stage_one_steps": self.stage_one_steps, "cut": self.cut}  # fmt: skip


def plan_of(config: SparseConfig, seconds: float | None, costs: Costs | None,
            before: dict | None = None, done: Collection[str] = ()) -> Plan:  # fmt: skip
    """All of it, if there is no limit of time. Otherwise first fewer steps, down to a tenth, so
    that the two first groups take less than 0.7 of the time; then the runs that fit, in order.

    Runs whose labels are in `done` take no time. `before` is the plan, as a dict, that runs were
    trained by: its steps stay. If it has no steps but those of stage 1, routers alone were."""
    every = groups(config)
    plan = Plan([], config.steps, config.stage_one_steps)
    if seconds is not None:
        plan.steps, plan.stage_one_steps = steps_that_fit(config, every, seconds, costs)
    if before:
        plan.steps = before.get("steps", plan.steps)
        plan.stage_one_steps = before["stage_one_steps"]
    if (plan.steps, plan.stage_one_steps) != (config.steps, config.stage_one_steps):
        plan.cut.append(f"{plan.steps} steps instead of {config.steps}, and in stage 1 "
                        f"{plan.stage_one_steps} instead of {config.stage_one_steps}")  # fmt: skip
    if seconds is None:
        plan.runs = [run for group in every for run in group]
        return plan
    left, routed = 0.95 * seconds, set()
    for group in every:
        for run in group:
            if run.label() in done:
                plan.runs.append(run)
                if ARMS[run.arm].router == "learned":
                    routed.add(run.density)
                continue
            cost = costs.of(run, plan.steps, config.evals)
            if ARMS[run.arm].needs_density and run.density not in routed:
                cost += plan.stage_one_steps * costs.stage_one
            if cost > left:
                plan.cut.append(f"{run.label()} ({ARMS[run.arm].text})")
                continue
            left -= cost
            routed.add(run.density)
            plan.runs.append(run)
    return plan


def steps_that_fit(config: SparseConfig, every: list[list[Run]], seconds: float,
                   costs: Costs) -> tuple[int, int]:  # fmt: skip
    """Steps of each arm and of stage 1."""
    needed = [run for group in every[:2] for run in group]
    learned = len({run.density for run in needed if ARMS[run.arm].router == "learned"})

    def total(steps: int, stage_one: int) -> float:
        return learned * stage_one * costs.stage_one + sum(
            costs.of(run, steps, config.evals) for run in needed)  # fmt: skip

    for tenths in range(10, 0, -1):
        found = (max(1, config.steps * tenths // 10),
                 max(1, config.stage_one_steps * max(4, tenths) // 10))  # fmt: skip
        if total(*found) <= 0.7 * seconds:
            break
    return found


def at(config: SparseConfig, **changed) -> SparseConfig:
    """The configuration with what a command line gives; ValueError for impossible values."""
    config = replace(config, **{name: x for name, x in changed.items() if x is not None})
    for name in ("pretrain_steps", "stage_one_steps", "steps", "batch", "seeds", "evals"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name.replace('_', '-')} {getattr(config, name)}: it must be at "
                             "least 1")  # fmt: skip
    for name in ("stage_one_lr", "temperature"):
        if not 0 < getattr(config, name) < 1e3:
            raise ValueError(f"{name.replace('_', '-')} {getattr(config, name)}: pass a positive "
                             "number")  # fmt: skip
    if not config.densities or not all(0 < density <= 1 for density in config.densities):
        raise ValueError(f"densities {config.densities}: pass shares above 0 and at most 1")
    return config


def verdict(runs: dict[str, dict], stage_one: dict[str, dict], densities) -> dict[str, object]:
    """Whether (e) is below (d) in every seed, and in its stage 1 in all layers except one; whether
    (f) is above both. None where runs are missing."""
    found: dict[str, object] = {}
    for density in densities:
        finals = {arm: {run["seed"]: run["final"] for run in runs.values()
                        if run["arm"] == arm and run["density"] == density}
                  for arm in "def"}  # fmt: skip
        both = finals["d"].keys() & finals["e"].keys()
        layers = stage_one.get(f"{density:g}", {})
        wins = None
        if "d" in layers and "e" in layers:
            wins = sum(e["error"] < d["error"] for d, e in zip(layers["d"], layers["e"]))
        worst = [value for arm in "de" for value in finals[arm].values()]
        found[f"{density:g}"] = {
            "e_below_d_in_seeds": f"{sum(finals['e'][s] < finals['d'][s] for s in both)} of "
            f"{len(both)}" if both else None,
            "e_below_d_in_layers": None if wins is None else f"{wins} of {len(layers['e'])}",
            "f_above_both": min(finals["f"].values()) > max(worst)
            if finals["f"] and worst else None,
        }  # fmt: skip
    return found


def differences(there: dict, given: dict) -> str:
    """Which of the given values are others there, as in 'steps 9 there, 3 given'."""
    found = ({name.replace("_", "-"): x.get(name) for name in given} for x in (there, given))
    return "; ".join(differing(*found, "{name} {there} there, {given} given"))
