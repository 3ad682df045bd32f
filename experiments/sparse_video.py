"""Trains a video model with SLA2, with its parts and with variants, and compares the losses.

    python -m experiments.sparse_video --minutes 10 --gpus 4 --out results

A dense model is trained on videos of sprites. From its weights each arm goes on with its own
attention, on the same batches. Runs that --out has already are not repeated. With --minutes it
measures steps, cuts what takes too long, and says what was cut; a later call goes on with that.
"""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from sagebwd.benchmark.environment import brief, environment, replacing, write_json

from . import command, runner
from .command import Failure, torch
from .plot import draw_if_possible, saved_beside
from .runner import read_object
from .sparse_plan import (
    ARMS,
    TOY,
    Costs,
    Run,
    SparseConfig,
    at,
    differences,
    plan_of,
    verdict,  # fmt: skip
)

NAME = "sparse-video"
ON_A_CPU = "--device cpu runs this with --toy or --how bf16"


def read_record(path: Path, names: Iterable[str] = ("config", "runs")) -> dict:
    """ValueError that names the file, where it is no record."""
    if (record := read_object(path)) is None:
        raise ValueError(f"{path} is no record of this experiment, which is a {NAME}.json")
    for name in names:
        if name not in record:
            raise ValueError(f"{path} is no record of this experiment: it has no {name!r}")
    for name in ("config", "runs"):
        if not isinstance(record[name], dict):
            raise ValueError(f"{path} is no record of this experiment: its {name!r} is no object")
    return record


class Record:
    """The record holds what is known so far, in files that are rewritten after each run."""

    def __init__(self, out: Path, config: SparseConfig) -> None:
        self.out, self.path, self.config = out, out / f"{NAME}.json", config
        self.data = {"config": config.to_dict(), "environment": environment(), "dense": None,
                     "costs": None, "plan": None, "stage_one": {}, "runs": {},
                     "verdict": None}  # fmt: skip
        if not self.path.exists():
            return
        before = read_record(self.path, self.data)
        if before["config"] != self.data["config"]:
            found = differences(before["config"], self.data["config"])
            raise ValueError(f"{self.path} is of another configuration ({found}): name another "
                             "--out")  # fmt: skip
        self.data |= {name: before[name] for name in self.data if name != "environment"}

    def missing(self) -> list[str]:
        """The labels of the full plan's runs that are not there."""
        every = plan_of(self.config, None, None).runs
        return [label for label in (run.label() for run in every) if label not in self.data["runs"]]

    def shortened(self) -> list[str]:
        """The list says what stays shorter than was asked for, as it was cut for want of time."""
        found = [self.data["dense"]["cut"]] if self.data["dense"] else []
        if self.data["runs"] and (steps := self.data["plan"]["steps"]) < self.config.steps:
            found.append(f"runs of {steps} steps instead of {self.config.steps}")
        return [what for what in found if what]

    def write(self) -> None:
        data = self.data
        data["verdict"] = verdict(data["runs"], data["stage_one"], data["config"]["densities"])
        write_json(self.path, data)
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["run", "arm", "density", "seed", "step", "validation_loss"])
        for label, run in data["runs"].items():
            for step, loss in run["curve"]:
                writer.writerow([label, run["arm"], run["density"], run["seed"], step,
                                 f"{loss:.6f}"])  # fmt: skip
        with replacing(self.path.with_suffix(".csv")) as partial:
            partial.write_text(text.getvalue())


def measured(place, model, density: float) -> Costs:
    """Seconds of each kind of step, the fastest of a few."""
    from .graphed import GraphedStep

    def timed(function, rounds: int = 3, before: int = 1) -> float:
        for _ in range(before):
            function()
        found = []
        for _ in range(rounds):
            start = place.wait()
            function()
            found.append(place.wait() - start)
        return min(found)

    def of_arm(arm: str) -> float:
        trained = place.model()
        for i, layer in enumerate(trained.layers()):
            layer.attend = place.attention(arm, density if arm != "a" else 0, i)
        train = place.stepper(trained, place.optimizer(trained.parameters(), 0.0, 0.0))
        return timed(lambda: train(1, 0), before=GraphedStep.EAGER + 1)

    def setup() -> None:
        run = Run("d", density, 0)
        place.held_out_report(place.arm_modules(run, model, None), model)

    short, long = (timed(lambda n=n: place.stage_one(model, density, n), 1) for n in (1, 3))
    return Costs(of_arm("a"), of_arm("e"), max(0.0, (long - short) / 2),
                 timed(lambda: place.validation(model), 1), timed(setup, 1))  # fmt: skip


def perform(config: SparseConfig, options, progress) -> Record:
    from . import sparse_workers
    from .sparse_train import Workplace

    record = Record(options.out, config)
    data, device = record.data, command.check_device(options.device, ON_A_CPU)
    place = Workplace(config, device, progress)
    checkpoints = options.checkpoints or options.out / "checkpoints"

    missing = record.missing()
    if not missing:
        return record
    steps_of_routers = sparse_workers.check(checkpoints, config)
    unfinished = sparse_workers.Unfinished(checkpoints / "dense-unfinished.pt", config, device)

    def left() -> float | None:
        if not options.minutes:
            return None
        return 60 * options.minutes - (place.wait() - progress.started)

    def dense():
        model, data["dense"] = place.pretrain(options.minutes and 0.4 * left(), unfinished)
        record.write()
        return {"model": model.state_dict(), "record": data["dense"]}

    path = checkpoints / "dense.pt"
    if data["runs"] and not path.exists():
        raise Failure(f"{path}, the dense model of the runs in {options.out}, is not there: name "
                      "the --checkpoints that have it, or another --out")  # fmt: skip
    found = sparse_workers.saved(path, sparse_workers.of_dense(config), dense, device)
    if data["runs"] and json.dumps(found["record"]) != json.dumps(data["dense"]):
        raise Failure(f"{path} is not the dense model that the runs in {options.out} are of: name "
                      "other --checkpoints, or another --out")  # fmt: skip
    data["dense"], model = found["record"], place.model()
    model.load_state_dict(found["model"])
    unfinished.path.unlink(missing_ok=True)
    costs = measured(place, model, config.densities[0]) if options.minutes else None
    trained = steps_of_routers and {"stage_one_steps": steps_of_routers}
    plan = plan_of(config, options.minutes and options.gpus * left(), costs,
                   data["plan"] if data["runs"] else trained, data["runs"])  # fmt: skip
    data["plan"] = plan.to_dict()
    if costs:
        data["costs"] = vars(costs)
    if data["dense"] and data["dense"]["cut"]:
        data["plan"]["cut"].insert(0, data["dense"]["cut"])
    record.write()
    steps, order = data["plan"]["steps"], data["plan"]["runs"]
    tasks = sparse_workers.tasks_of(
        [run_of(label) for label in order if label not in data["runs"]], steps,
        lambda run: run.arm in data["stage_one"].get(f"{run.density:g}", {}),
        costs and (lambda label: costs.of(run_of(label), steps, config.evals)), left())  # fmt: skip

    def heard(run: Run, found) -> None:
        if found is None:
            data["plan"]["cut"].append(f"{run.label()} ({ARMS[run.arm].text}): the time was over")
            return
        data["runs"][run.label()], report = found
        data["runs"] = {label: data["runs"][label] for label in order if label in data["runs"]}
        of_density = data["stage_one"].setdefault(f"{run.density:g}", {})
        if report:
            of_density[run.arm] = report
        record.write()

    given = config, device, checkpoints, data["plan"]["stage_one_steps"]
    if options.gpus == 1:
        sparse_workers.one_by_one(sparse_workers.Bench(*given, progress), tasks, heard)
    else:
        gpus = runner.gpus_of(options.device, options.gpus)
        sparse_workers.side_by_side(gpus, given, tasks, progress, heard)
    record.write()
    return record


def run_of(label: str) -> Run:
    """A `Run.label()` undone."""
    arm, *density, seed = label.split(":")
    return Run(arm, float(density[0]) if density else 0.0, int(seed))


def table(record: dict) -> str:
    """The last loss of each arm at each density, its spread, and what stage 1 found."""
    lines = [f"{'arm':44} {'density':>8} {'seeds':>5} {'loss':>9} {'spread':>8} {'ms/step':>8}"
             f" {'mass':>6} {'best':>6} {'error':>6}"]  # fmt: skip
    found: dict[tuple, list] = {}
    for run in record["runs"].values():
        found.setdefault((run["density"], run["arm"]), []).append(run)
    for (density, arm), runs in sorted(found.items()):
        finals = [run["final"] for run in runs]
        line = (f"{arm + ': ' + ARMS[arm].text:44} {density:8g} {len(runs):5} "
                f"{sum(finals) / len(finals):9.5f} {max(finals) - min(finals):8.5f} "
                f"{runs[0]['ms_per_step']:8.1f}")  # fmt: skip
        layers = record["stage_one"].get(f"{density:g}", {}).get(arm)
        for name in ("mass", "best_mass", "error") if layers else ():
            line += f" {sum(layer[name] for layer in layers) / len(layers):6.3f}"
        lines.append(line)
    lines += [f"cut: {what}" for what in (record["plan"] or {}).get("cut", ())]
    return "\n".join([*lines, *map("verdict: {}".format, verdicts(record["verdict"] or {}))])


def verdicts(found: dict) -> list[str]:
    """A sentence for each density; of runs that are missing it says nothing."""
    lines = []
    for density, of in found.items():
        said = []
        if seeds := of["e_below_d_in_seeds"]:
            said.append(f"the learned router's loss is below the pooled one's in {seeds} seeds")
        if layers := of["e_below_d_in_layers"]:
            said.append(f"its output after stage 1 is nearer to full attention in {layers} layers")
        if (above := of["f_above_both"]) is not None:
            said.append(f"random lists have a higher loss than both: {'yes' if above else 'no'}")
        lines.append(f"at density {density} " + ("; ".join(said) or "too few runs are done"))
    return lines


def draw(path: Path) -> Path:
    """The picture of a record: curves at the first density, and last losses of all arms."""
    from matplotlib.figure import Figure

    record = read_record(path)
    first = record["config"]["densities"][0]
    figure = Figure(figsize=(13, 5))
    curves, finals = figure.subplots(1, 2)
    runs = record["runs"].values()
    for index, arm in enumerate(ARMS):
        of_arm = [r for r in runs if r["arm"] == arm and r["density"] in (0, first)]
        style = dict(color=f"C{index % 10}", linestyle="-" if index < 10 else "--")
        for number, run in enumerate(of_arm):
            curves.plot(*zip(*run["curve"]), label=None if number else f"{arm}: {ARMS[arm].text}",
                        **style)  # fmt: skip
        for run in (r for r in runs if r["arm"] == arm):
            place = [0, *record["config"]["densities"]].index(run["density"])
            finals.plot(index + 0.2 * (place - 1), run["final"], marker="osD^v"[place],
                        color=style["color"])  # fmt: skip
    curves.set_xlabel("step")
    curves.set_ylabel("validation loss")
    curves.set_title(f"density {first:g}")
    if record["runs"]:
        curves.legend(fontsize=7)
    finals.set_xticks(range(len(ARMS)), list(ARMS), rotation=60)
    marks = ", ".join(f"{mark} {density:g}" for mark, density in zip(
        ("square", "diamond", "triangle"), record["config"]["densities"]))  # fmt: skip
    finals.set_title(f"last loss of each seed (circle: no density, {marks})", fontsize=9)
    return saved_beside(path, figure)


def config_of(options) -> SparseConfig:
    import sagebwd

    config = at(TOY if options.toy else SparseConfig(), steps=options.steps, seeds=options.seeds,
                batch=options.batch, pretrain_steps=options.pretrain_steps,
                stage_one_steps=options.stage_one_steps, how=options.how, compile=options.compile,
                stage_one_lr=options.stage_one_lr, temperature=options.temperature,
                densities=options.densities and tuple(options.densities))  # fmt: skip
    if config.how == "int8" and not hasattr(sagebwd, "block_sparse_attention"):
        raise ValueError("this build has no block_sparse_attention: pass --how bf16")
    if config.how == "int8" and options.device == "cpu":
        raise ValueError("the INT8 kernels need a GPU: pass --how bf16, or --toy")
    return config


def tell_shortened(options, short: list[str]) -> None:
    """That what --out has stays what it is."""
    other = " and other --checkpoints" if options.checkpoints else ""
    print(f"{options.out} holds {', and '.join(short)}, for want of time, and goes on with these: "
          f"for all steps name another --out{other}, and more --minutes or none", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("sparse_video", __doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("results"),
        help=f"folder of {NAME}.json, .csv and .png; finished runs in it are not repeated "
        "(default: results)")  # fmt: skip
    add(
        "--checkpoints",
        type=Path,
        metavar="FOLDER",
        help="where the dense model and the routers are kept (default: OUT/checkpoints)",
    )
    cuda = torch is not None and torch.cuda.is_available()
    add("--device", default="cuda" if cuda else "cpu",
        help="cuda, cuda:N or cpu (default: cuda if there is a GPU)")  # fmt: skip
    add("--gpus", type=int, default=1, metavar="N", help="runs at once, each on a GPU of its own "
        "(default: 1)")  # fmt: skip
    add("--minutes", type=float, metavar="X", help="cut what does not fit into this time")
    add("--toy", action="store_true", help="a tiny model, to see that everything works. "
        "It has defaults of its own, among them --how bf16")  # fmt: skip
    for name, text in (("steps", "training steps of each arm"), ("seeds", "seeds of each arm"),
                       ("batch", "videos per step"), ("pretrain-steps", "of the dense model"),
                       ("stage-one-steps", "of the learned router")):  # fmt: skip
        default = getattr(SparseConfig(), name.replace("-", "_"))
        add(f"--{name}", type=int, metavar="N", help=f"{text} (default: {default})")
    add("--densities", type=float, nargs="+", metavar="X", help="shares of key blocks that are "
        "exact, the most important first (default: 0.05 0.03 0.1)")  # fmt: skip
    for name, text in (("stage-one-lr", "of the router and alpha in stage 1"),
                       ("temperature", "of soft lists")):  # fmt: skip
        default = getattr(SparseConfig(), name.replace("-", "_"))
        add(f"--{name}", type=float, metavar="X", help=f"{text} (default: {default:g})")
    add("--how", choices=("int8", "bf16"), help="the exact blocks: by INT8 kernels, or in bf16 by "
        "PyTorch, where (g) and (i) are (e) (default: int8)")  # fmt: skip
    add("--compile", action="store_true", help="compile everything except attention")
    add("--draw", type=Path, metavar="RECORD.json", help="only draw the picture of a record")

    def work(options) -> int:
        with command.wrong_use(parser):
            if options.draw:
                try:
                    print(draw(options.draw))
                except (LookupError, TypeError, AttributeError, ValueError) as error:
                    if str(options.draw) in str(error):
                        raise
                    raise ValueError(f"{options.draw} is no whole record of this experiment: "
                                     f"{brief(error)}") from error  # fmt: skip
                except ImportError as error:
                    raise Failure(f"this needs matplotlib ({error}): pip install "
                                  "matplotlib") from error  # fmt: skip
                return 0
        with command.wrong_use(parser):
            command.check_outputs(options)
            config = config_of(options)
            runner.check_minutes(options.minutes)
            command.check_device(options.device, ON_A_CPU)
            runner.gpus_of(options.device, options.gpus)
            short = Record(options.out, config).shortened()
        if short:
            tell_shortened(options, short)
        from .sparse_train import Progress

        with command.alone(options.out, NAME):
            record = perform(config, options, Progress(options.minutes))
        print(table(record.data))
        draw_if_possible(draw, record.path, "sparse_video --draw")
        if record.shortened() != short:
            tell_shortened(options, record.shortened())
        if missing := record.missing():
            print(f"not done: {', '.join(missing)}\nThe same command goes on with these runs; "
                  "without --minutes it does them all.", file=sys.stderr)  # fmt: skip
        return 1 if missing else 0

    return command.run(parser, arguments, work,
                       again="the same command goes on, and repeats no run that --out has")


if __name__ == "__main__":
    sys.exit(main())
