"""Judges the arms of a study by bands of noise, of 95 %.

That of seeds: k runs of another attention that is as good have a mean within
mean +- t s sqrt(1/n + 1/k), for n seeds of SDPA with the standard deviation s.

That of pairs: runs of one seed have the same weights and batches, so that their difference varies
less. A loss is the sum of what its attention, its seed and chance add to it, and what least squares
leave of all runs of the regime is chance: with n runs, a attentions and s seeds it has
n - a - s + 1 degrees of freedom, to which attentions with one seed add none. The difference of two
runs deviates by sqrt(2) of that, and k pairs have a mean within +- t s / sqrt(k), where s is that
deviation. One of those attentions is SDPA itself with another backend. This band judges where there
are at least two degrees of freedom.
"""

from __future__ import annotations

import csv
import math
import re
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import NoReturn

import numpy as np

from sagebwd.benchmark.environment import replacing, write_json

from . import runner
from .attentions import AttentionChoice
from .plot import draw_if_possible, plot_curves
from .runner import read_object

#: Two-sided 95 % quantiles of Student's t, by degrees of freedom from 1.
STUDENT_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
#: Nats: the gap that SageBwd's paper reports at 2.1 million tokens a step. A band that is wider
#: cannot tell whether there is one.
PAPER_GAP = 0.054
NAME = "study"
#: An arm has one of these; that of an arm which failed says why behind a colon.
STATUSES = ("finished", "diverged", "cut", "failed")


class NoRecords(ValueError):
    """A folder without records."""


def records_of(folder: Path) -> list[dict]:
    """The arms' records, in the order of their names. NoRecords if there are none, and ValueError
    if they are of several corpora."""
    found = [record for path in sorted(folder.glob("*.json")) if (record := read_record(path))]
    if not found:
        raise NoRecords(f"{folder} has no records of arms: run a plan with --out {folder}")
    other = next((r for r in found if r["corpus"] != found[0]["corpus"]), None)
    if other:
        first = found[0]
        wrong = differing({"corpus": first["corpus"]}, {"corpus": other["corpus"]})
        raise ValueError(f"{folder} has records of two corpora, such as {first['arm']['name']} and "
                         f"{other['arm']['name']}, with {wrong}: move those of one elsewhere")
    return found


def read_record(path: Path) -> dict | None:
    """None for a file of something else; ValueError that names one which is broken."""
    if (record := read_object(path)) is None:
        refuse(path)
    if "regime" not in record or "arm" not in record:
        return None
    try:
        given = [record["arm"][name] for name in ("name", "attention", "seed", "sweep", "lr")]
        given += [record[name] for name in ("status", "corpus")]
        known = record["status"].partition(":")[0] in STATUSES
        finished = record["status"] == "finished"
        if not known or (finished and not math.isfinite(float(record["final_val_loss"]))):
            refuse(path)
    except (TypeError, KeyError, AttributeError, ValueError):
        refuse(path)
    return record


def refuse(path: Path) -> NoReturn:
    raise ValueError(f"{path} is no record of an arm: remove it, or name another --out") from None


def differing(there: dict, given: dict) -> str:
    """The values in which a record's run is not the one that is asked for; empty if it is."""
    return ", ".join(runner.differing(there, given, "{name} {there} (given: {given})"))


def band_of(losses: list[float]) -> dict | None:
    """Mean, deviation and half the width of the band that one further run falls into."""
    if len(losses) < 3:
        return None
    spread = stdev(losses)
    half = spread * _t(len(losses) - 1) * math.sqrt(1 + 1 / len(losses))
    return {"seeds": len(losses), "mean": fmean(losses), "deviation": spread, "half_width": half}


def _t(freedom: int) -> float:
    return STUDENT_T[min(freedom, len(STUDENT_T)) - 1]


def paired_deviation(losses: dict[str, dict[int, float]]) -> dict | None:
    """The difference of two runs of a seed has this deviation, estimated from losses by attention
    and seed; None without two degrees of freedom."""
    attentions, seeds = [*losses], sorted({seed for found in losses.values() for seed in found})
    runs = [(attention, seed) for attention, found in losses.items() for seed in found]
    if not runs:
        return None
    adds = np.array([[*(attention == a for a in attentions), *(seed == s for s in seeds)]
                     for attention, seed in runs], dtype=float)  # fmt: skip
    values = np.array([losses[attention][seed] for attention, seed in runs])
    values -= values.mean()  # what is left of larger numbers has fewer digits
    explained, _, rank, _ = np.linalg.lstsq(adds, values, rcond=None)
    freedom = len(runs) - int(rank)
    if freedom < 2:
        return None
    chance = float(np.square(values - adds @ explained).sum()) / freedom
    return {"deviation": math.sqrt(2 * chance), "freedom": freedom}


def judged(losses: list[float], pairs: list[float], band: dict | None,
           paired: dict | None) -> dict:  # fmt: skip
    """How far an arm's seeds are from SDPA's, and what that says."""
    if not losses:
        return {"verdict": "cannot tell", "why": "no seed of it finished"}
    result = {}
    if band:
        result["difference"] = fmean(losses) - band["mean"]
        result["half_width"] = (band["deviation"] * _t(band["seeds"] - 1)
                                * math.sqrt(1 / len(losses) + 1 / band["seeds"]))  # fmt: skip
    if paired and pairs:
        result["paired"] = fmean(pairs)
        result["paired_half_width"] = (paired["deviation"] * _t(paired["freedom"])
                                       / math.sqrt(len(pairs)))  # fmt: skip
        return result | _verdict(result["paired"], result["paired_half_width"], "pairs")
    if band:
        return result | _verdict(result["difference"], result["half_width"], "seeds")
    return {"verdict": "cannot tell", "why": "fewer than three seeds of SDPA finished"}


def _verdict(difference: float, half: float, by: str) -> dict:
    if abs(difference) > half:
        how = "worse" if difference > 0 else "better"
        return {"verdict": f"outside, {how}", "by": by}
    if half > PAPER_GAP:
        return {"verdict": "cannot tell", "by": by,
                "why": f"the band of {by} is wider than {PAPER_GAP}, the gap of the paper"}
    return {"verdict": "within", "by": by}


def summarised(records: list[dict]) -> dict:
    """Regime to its band and its arms, sweeps left out."""
    regimes: dict = {}
    for record in records:
        if not record["arm"]["sweep"]:
            arms = regimes.setdefault(record["regime"], {})
            arms.setdefault(record["arm"]["attention"], []).append(record)
    return {regime: _of_regime(arms) for regime, arms in regimes.items()}


def _of_regime(arms: dict[str, list[dict]]) -> dict:
    losses = {attention: {r["arm"]["seed"]: r["final_val_loss"] for r in records
                          if r["status"] == "finished"} for attention, records in arms.items()}
    of_sdpa = losses.get("sdpa", {})
    pairs = {attention: [loss - of_sdpa[seed] for seed, loss in found.items() if seed in of_sdpa]
             for attention, found in losses.items() if attention != "sdpa"}  # fmt: skip
    band, paired = band_of([*of_sdpa.values()]), paired_deviation(losses)
    found = {}
    for attention, records in arms.items():
        own = [*losses[attention].values()]
        finished = [r for r in records if r["status"] == "finished"]
        verdict = {}
        if attention != "sdpa":
            verdict = judged(own, pairs[attention], band, paired)
        if diverged := [r["arm"]["seed"] for r in records if r["status"] == "diverged"]:
            verdict |= {"verdict": "diverged"}
            verdict.pop("why", None)
        found[attention] = {
            "seeds": sorted(losses[attention]), "diverged_seeds": diverged,
            "not_finished": [r["arm"]["name"] for r in records
                             if r["status"] not in ("finished", "diverged")],
            "final_val_loss": fmean(own) if own else None, "pairs": pairs.get(attention),
            "by_sdpa": _mean(finished, "final_val_loss_by_sdpa"),
            "max_score": _largest(r.get("max_score") for r in records),
            "gamma": _largest(x for r in records for x in r.get("gamma") or ()),
            "grad_norm": _largest((r.get("grad_norm") or {}).get("largest_after_warm_up")
                                  for r in records),
            "tokens_per_second": _mean(finished, "tokens_per_second"),
        } | verdict  # fmt: skip
    return {"band": band, "paired": paired, "arms": found, "fronts": _fronts(losses)}


def _fronts(losses: dict[str, dict[int, float]]) -> dict[str, dict[str, float]]:
    """By attention that norms and rotates itself and by seed, its loss minus that of the same
    attention behind the model's norm and RoPE."""
    found = {}
    for attention, own in losses.items():
        if "front" not in attention.partition(":")[2].split(","):
            continue
        without = replace(AttentionChoice.parse(attention), front=False)
        other = losses.get(without.label(), {})
        if seeds := sorted(own.keys() & other.keys()):
            found[attention] = {str(seed): own[seed] - other[seed] for seed in seeds}
    return found


def _mean(records: list[dict], name: str) -> float | None:
    values = [r[name] for r in records if isinstance(r.get(name), (int, float))]
    return fmean(values) if values else None


def _largest(values) -> float | None:
    """Records spell numbers that are not finite as words."""
    return max((float(x) for x in values if x is not None), default=None)


def table(summary: dict) -> str:
    lines = []
    for regime, found in summary.items():
        lines.append(f"\n{regime}")
        if band := found["band"]:
            lines.append(f"  SDPA, {band['seeds']} seeds: {band['mean']:.4f}, deviation "
                         f"{band['deviation']:.4f}; one further run +-{band['half_width']:.4f}")
        if paired := found["paired"]:
            half = paired["deviation"] * _t(paired["freedom"])
            lines.append(f"  pairs: deviation {paired['deviation']:.4f}, {paired['freedom']} "
                         f"degrees of freedom; one pair +-{half:.4f}")
        for attention, differences in found["fronts"].items():
            said = ", ".join(f"seed {seed} {x:+.4f}" for seed, x in differences.items())
            lines.append(f"  {attention}, minus that behind the model's norm and RoPE: {said}")
        lines.append(f"  {'attention':48} {'seeds':>5} {'loss':>8} {'to mean':>8} {'to pair':>8} "
                     f"{'by SDPA':>8} {'|S|':>7} {'gamma':>6} {'norm':>7} {'tokens/s':>9}  verdict")
        for attention, arm in found["arms"].items():
            cells = (f"{len(arm['seeds']):5}", _cell(arm["final_val_loss"], 8, 4),
                     _cell(arm.get("difference"), 8, 4, "+"), _cell(arm.get("paired"), 8, 4, "+"),
                     _cell(arm["by_sdpa"], 8, 4), _cell(arm["max_score"], 7, 1),
                     _cell(arm["gamma"], 6, 2), _cell(arm["grad_norm"], 7, 2),
                     _cell(arm["tokens_per_second"], 9, 0))
            note = arm.get("verdict", "")
            if arm["diverged_seeds"]:
                note += f" (seed {', '.join(map(str, arm['diverged_seeds']))})"
            if arm.get("why"):
                note += f": {arm['why']}"
            lines.append(f"  {attention:48} {' '.join(cells)}  {note}".rstrip())
    return "\n".join(lines).lstrip("\n")


def _cell(value: float | None, width: int, digits: int, sign: str = "") -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{sign}{width}.{digits}f}"


def sweep_table(records: list[dict]) -> str:
    rows = [r for r in records if r["arm"]["sweep"]]
    lines = [f"  {r['regime']}: {r['status']}, {_cell(r.get('final_val_loss'), 0, 4)}"
             for r in sorted(rows, key=lambda r: (r["regime"].split(", lr")[0], r["arm"]["lr"]))]
    return "\n".join(["rates of SDPA:", *lines]) if rows else ""


def check_summary(folder: Path) -> None:
    """ValueError if a summary would take the place of another file."""
    path = folder / f"{NAME}.json"
    wrong = path.exists() and (read_object(path) or {}).keys() != {"corpus", "regimes"}
    if wrong:
        raise ValueError(f"{path} is there, and no summary of a study: name another --out")


def write(folder: Path) -> str:
    """Writes study.json, and curves of each regime as CSV and PNG; the tables."""
    records = records_of(folder)
    check_summary(folder)
    summary = summarised(records)
    write_json(folder / f"{NAME}.json", {"corpus": records[0]["corpus"], "regimes": summary})
    for regime in summary:
        words = re.sub(r"[^a-z0-9.]+", "-", regime.lower())
        _write_curves(folder / f"{NAME}-curves-{words}.csv",
                      [r for r in records if r["regime"] == regime and not r["arm"]["sweep"]])
    return "\n\n".join(filter(None, (sweep_table(records), table(summary))))


def _write_curves(path: Path, records: list[dict]) -> None:
    """The validation losses by step; SDPA is the first column."""
    records = sorted(records, key=lambda r: (r["arm"]["attention"] != "sdpa", r["arm"]["name"]))
    curves = {f"{r['arm']['attention']} seed {r['arm']['seed']}": {
        row[0]: row[r["columns"].index("val_loss")] for row in r["curve"]}
        for r in records if r.get("curve")}  # fmt: skip
    steps = sorted({step for curve in curves.values() for step in curve})
    if not steps:
        return
    with replacing(path) as partial, partial.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *curves])
        for step in steps:
            values = (curve.get(step) for curve in curves.values())
            writer.writerow([step, *("" if v is None else f"{float(v):.6f}" for v in values)])
    draw_if_possible(plot_curves, path, "plot")
