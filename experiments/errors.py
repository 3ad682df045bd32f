"""Traces the errors of attention over training time and depth, from a run's checkpoints.

    python -m experiments.train --corpus corpus.bin --save run-{step}.pt --save-every 100
    python -m experiments.errors run-*.pt --corpus corpus.bin --out errors
    python -m experiments.errors run-500.pt --corpus corpus.bin --layer 0 7 --json

Each layer's q, k, v and dO are captured on held-out text. Every intermediate tensor is compared
with FP64 for several granularities, with rotation and without, with one product at a time in 16
bits, and so on. The bounds on dS and queries with a common offset are looked at as well.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev

from sagebwd import Spec
from sagebwd.benchmark.environment import replacing, write_json
from sagebwd.numerics.tracing import FIGURES, TENSORS

from . import command
from .attentions import AttentionChoice, check_runs_on
from .capture import capture, statistics
from .checkpoints import load_weights, read_checkpoint
from .command import torch
from .config import TrainConfig, add_captured_arguments, add_common_arguments, differing
from .data import Corpus
from .error_traces import OFFSET, SETTINGS, best_products, mean_errors, rotation, traced_layer
from .train import check_record, origin
from .training import build_model

#: Tensors that every setting changes; dP is never quantised.
SHOWN = tuple(name for name in TENSORS if name != "dP")


@dataclass
class Stage:
    """A checkpoint of the run."""

    path: Path
    step: int
    config: TrainConfig
    weights: dict


def stages_of(paths: list[Path], corpus: Corpus) -> list[Stage]:
    """In the order of steps. ValueError where they are not those of one run on this corpus."""
    found = []
    for path in paths:
        saved, config, _ = read_checkpoint(path)
        if saved["corpus"] != corpus.header["sha256"]:
            raise ValueError(f"{path} was trained on another corpus than --corpus: its held-out "
                             "text may be what the model has seen")  # fmt: skip
        found.append(Stage(path, saved["step"], config, saved["model"]))
        if wrong := differing(found[0].config, config):
            raise ValueError(f"{path} is of another run than {paths[0]}: {', '.join(wrong)}; call "
                             "this once for each run, with another --name")  # fmt: skip
    found.sort(key=lambda stage: stage.step)
    for one, other in zip(found, found[1:]):
        if one.step == other.step:
            raise ValueError(f"{one.path} and {other.path} are both of step {one.step}: one "
                             "checkpoint for each step")  # fmt: skip
    return found


def traced(stage: Stage, choice: AttentionChoice, device: str, sequences, layers: list[int],
           progress) -> dict:  # fmt: skip
    """The layers of one checkpoint have these statistics and errors."""
    config = replace(stage.config, device=device, compile=False, graph=False)
    model = build_model(config, choice)
    load_weights(model, stage.weights, stage.path)
    captured = capture(model, sequences.to(device), config)
    found = []
    for layer in layers:
        found.append({"layer": layer, "statistics": statistics(captured[layer]),
                      **traced_layer(captured[layer])})  # fmt: skip
        progress()
    errors = mean_errors(found)
    return {"checkpoint": stage.path.name, "step": stage.step, "mean_over_layers": errors,
            "best_products": best_products(errors), "rotation": rotation(found),
            "layers": found}  # fmt: skip


# ---- what is written -----------------------------------------------------------------------------


def rounded(found):
    """A record with its numbers to six digits, more than another GPU would repeat."""
    if isinstance(found, dict):
        return {name: rounded(one) for name, one in found.items()}
    if isinstance(found, list):
        return [rounded(one) for one in found]
    return float(f"{found:.6g}") if isinstance(found, float) else found


def write_csv(path: Path, record: dict) -> None:
    with replacing(path) as partial, partial.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", "layer", "setting", "tensor", *FIGURES])
        for stage in record["stages"]:
            for layer in stage["layers"]:
                for setting, tensors in layer["errors"].items():
                    for tensor, x in tensors.items():
                        figures = (f"{x[name]:.6g}" for name in FIGURES)
                        writer.writerow([stage["step"], layer["layer"], setting, tensor, *figures])


def draw(path: Path, record: dict) -> None:
    """Errors over the layers of the last checkpoint, and over steps; one curve for a setting."""
    from matplotlib.figure import Figure

    last = record["stages"][-1]
    depth = [layer["layer"] for layer in last["layers"]]
    steps = [stage["step"] for stage in record["stages"]]
    figure = Figure(figsize=(3.2 * len(SHOWN), 8))
    axes = figure.subplots(2, len(SHOWN), squeeze=False)
    for column, tensor in enumerate(SHOWN):
        for index, setting in enumerate(SETTINGS):
            style = {"color": f"C{index % 10}", "marker": "." if index < 10 else "x",
                     "linestyle": ("-", "--", "-.")[index % 3]}  # fmt: skip
            over_depth = [layer["errors"][setting][tensor]["rel_l2"] for layer in last["layers"]]
            over_steps = [stage["mean_over_layers"][setting][tensor]["rel_l2"]
                          for stage in record["stages"]]  # fmt: skip
            axes[0][column].plot(depth, over_depth, label=setting, **style)
            axes[1][column].plot(steps, over_steps, **style)
        axes[0][column].set_title(tensor)
        axes[0][column].set_xlabel(f"layer, at step {last['step']}")
        axes[1][column].set_xlabel("step, mean over layers")
    for axis in axes.flat:
        axis.set_yscale("log")
        least, largest = axis.get_ylim()
        axis.set_ylim(max(least, largest / 100))  # P of 16-bit scores has next to no error
        axis.grid(alpha=0.3, which="both")
    for row in axes:
        row[0].set_ylabel("relative L2 error")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(SETTINGS))
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    with replacing(path) as partial:
        figure.savefig(partial, dpi=100, format="png")


def table(stage: dict) -> str:
    """Relative L2 errors, mean over layers, and what they say."""
    lines = [f"step {stage['step']:<15}" + "".join(f"{name:>8}" for name in TENSORS)]
    for setting, tensors in stage["mean_over_layers"].items():
        cells = (f"{tensors[name]['rel_l2']:8.4f}" for name in TENSORS)
        lines.append(f"{setting:20}" + "".join(cells))
    helps = []
    for tensor, found in stage["best_products"].items():
        if product := found["product"]:
            helps.append(f"{tensor} {product} ({found['before']:.4f} to "
                         f"{found['left'][product]:.4f})")  # fmt: skip
    lines.append("helps most in 16 bits: " + (", ".join(helps) or "none"))
    lines += [_bias(stage["layers"]), _bounds(stage["layers"]), _rotation(stage["rotation"])]
    return "\n".join(lines)


def _bias(layers: list[dict]) -> str:
    """Signed errors of the tensors that sums over tokens make: the mean over layers, and its
    standard error, which rounding in one direction would exceed."""
    texts = []
    for name in ("row", "block", "16-bit"):
        of_setting = []
        for tensor in ("delta", "dS", "dV"):
            found = [layer["errors"][name][tensor]["bias"] for layer in layers]
            error = stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.inf
            of_setting.append(f"{tensor} {fmean(found):+.1e} +-{error:.1e}")
        texts.append(f"{name} {', '.join(of_setting)}")
    return "bias: " + "; ".join(texts)


def _bounds(layers: list[dict]) -> str:
    sizes = [layer["sizes"] for layer in layers]
    ds, p = (max(size[f"{name}_to_bound_largest"] for size in sizes) for name in ("ds", "p"))
    below = [size["rms_dp"] / size["rms_ds"] for size in sizes if size["rms_ds"]] or [math.nan]
    smallest, largest = min(below), max(below)
    typical = [fmean(size[f"{name}_to_bound_median"] for size in sizes) for name in ("ds", "p")]
    return (f"share of its bound: RMS(dS) of a query at most {ds:.3f}, median {typical[0]:.3f}; "
            f"RMS(P) at most {p:.3f}, median {typical[1]:.3f}; RMS(dS) of a layer is "
            f"{smallest:.3g} to {largest:.3g} times below RMS(dP)")  # fmt: skip


def _rotation(found: dict) -> str:
    said = [f"a mean of all queries has {found['q_offset_mean']:.1%} of q's squares, at most "
            f"{found['q_offset_largest']:.1%} in a head"]  # fmt: skip
    common = f"q_offset>={OFFSET}", f"heads with {OFFSET:.0%} or more"
    for name, which in (("all", "all heads"), common):
        if of := found[name]:
            said.append(f"O with rotation / without, {which}: median {of['ratio_median']:.3f}, "
                        f"worse in {of['worse_with_rotation']} of {of['heads']} heads, at most "
                        f"{of['ratio_largest']:.3f}")  # fmt: skip
    return "; ".join(said)


def write(out: Path, name: str, record: dict) -> list[Path]:
    """Writes the record, the errors as CSV and, with matplotlib, the picture; what was written."""
    paths = [out / f"{name}.json", out / f"{name}.csv"]
    write_json(paths[0], rounded(record))
    write_csv(paths[1], record)
    try:
        draw(out / f"{name}.png", record)
    except ImportError:
        print("no matplotlib here, and so no picture: pip install matplotlib", file=sys.stderr)
        return paths
    return [*paths, out / f"{name}.png"]


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("errors", __doc__)
    parser.add_argument("stages", nargs="+", type=Path, metavar="CHECKPOINT",
                        help="of one run: train --save run-{step}.pt --save-every N writes them")
    add_common_arguments(parser)
    add_captured_arguments(parser, "sdpa", "sdpa")
    parser.add_argument("--name", default="errors",
                        help="stem of the files' names (default: errors)")
    parser.add_argument("--json", action="store_true", help="print the record, not the tables")

    def work(options) -> int:
        with command.wrong_use(parser):
            if options.sequences < 1:
                raise ValueError(f"--sequences {options.sequences}: it must be at least 1")
            choice = AttentionChoice.parse(options.attention)
            corpus = Corpus.open(options.corpus)
            command.check_outputs(options)
            check_runs_on(choice, command.check_device(options.device))
            stages = stages_of(options.stages, corpus)
            config = replace(stages[0].config, device=options.device, compile=False, graph=False)
            count = config.model.layers
            layers = sorted(set(options.layer or range(count)))
            if unknown := [layer for layer in layers if not 0 <= layer < count]:
                raise ValueError(f"no layer {unknown[0]}: the model has {count}, from 0")
            Spec(head_dim=config.model.head_dim)  # what can be traced
            corpus.check(0, config.tokens, options.sequences, "--sequences")
            asked = {"sequences": options.sequences, "traced_layers": layers,
                     "checkpoints": [stage.path.name for stage in stages]}  # fmt: skip
            check_record(options.out / f"{options.name}.json", config, choice, corpus, "stages",
                         **asked)  # fmt: skip
            model = build_model(config, choice)
            for stage in stages:  # all fit the model, before the first one takes its time
                load_weights(model, stage.weights, stage.path)
        sequences = corpus.validation(options.sequences, config.tokens)
        record = origin(config, choice, corpus) | asked | {"settings": SETTINGS, "stages": []}
        done, total = 0, len(stages) * len(layers)

        def progress() -> None:
            nonlocal done
            done += 1
            command.progress("errors", done, total)

        with command.alone(options.out, options.name):
            command.progress("errors", 0, total)
            for stage in stages:
                found = traced(stage, choice, options.device, sequences, layers, progress)
                record["stages"].append(found)
                write_json(options.out / f"{options.name}.json", rounded(record))  # of an interrupt
            paths = write(options.out, options.name, record)
        if options.json:
            print(json.dumps(json.loads(paths[0].read_text()), indent=1))
        else:
            print("\n\n".join(map(table, record["stages"])))
        print(f"written: {', '.join(map(str, paths))}", file=sys.stderr)
        return 0

    return command.run(parser, arguments, work)


if __name__ == "__main__":
    sys.exit(main())
