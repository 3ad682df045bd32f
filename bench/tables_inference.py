"""The tables of forwards for inference."""

from __future__ import annotations

from statistics import fmean, median

from table_parts import lines_of

WHO = {"sagebwd": "sagebwd", "comfy-kitchen": "comfy-kitchen", "cudnn": "cuDNN",
       "fa2": "FlashAttention-2"}  # fmt: skip


def forwards(record: dict) -> list[str]:
    """Milliseconds of a forward and the relative L2 error of its output."""
    lines = []
    for row in record["rows"]:
        if not row["correct"]:
            raise ValueError(f"the row of {row['inputs']}, D {row['head_dim']}, is not correct")
        cells = [f"{row['forward'][who]['median_ms']:.2f} ms, {row['errors'][who]['rel_l2']:.4f}"
                 for who in WHO]  # fmt: skip
        lines.append([str(row["head_dim"]), str(row["tokens"]), row["inputs"], *cells])
    return lines_of(["head dimension", "tokens", "inputs", *WHO.values()], lines)


def of_layers(record: dict) -> list[str]:
    """Over a trained model's layers, and milliseconds with one of them."""
    lines = []
    for who in WHO:
        errors = sorted(row["errors"][who]["rel_l2"] for row in record["layers"])
        cells = [f"{x:.4f}" for x in (errors[0], median(errors), errors[-1])]
        cells += [f"{record['forward'][mask][who]['median_ms']:.2f} ms"
                  for mask in ("causal", "all keys")]  # fmt: skip
        lines.append([WHO[who], *cells])
    return lines_of(["forward", "least error", "median", "largest", "time, causal", "all keys"],
                    lines)  # fmt: skip


def adapted(record: dict) -> list[str]:
    """Held-out losses by each attention, before and after each attention's training."""
    before = record["held_out_before"]
    runs = {name: [run["held_out_by"] for run in record["fine_tunes"] if run["attention"] == name]
            for name in ("sdpa", "sagebwd")}  # fmt: skip
    lines = [["nothing", *(f"{loss:.4f}" for loss in before.values())]]
    lines += [[name, *(f"{fmean(run[who] for run in found):.4f}" for who in before)]
              for name, found in runs.items()]  # fmt: skip
    pairs = {who: [ours[who] - theirs[who] for theirs, ours in zip(*runs.values())]
             for who in before}  # fmt: skip
    lines.append(["sagebwd minus sdpa, seed by seed",
                  *(", ".join(f"{pair:+.4f}" for pair in found) for found in pairs.values())])
    return lines_of(["trained with", *(f"loss by {who}" for who in before)], lines)
