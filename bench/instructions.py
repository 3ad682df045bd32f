"""How many instructions each kernel executes per score, and the highest speed that this allows on
each GPU. It is a static model that needs NVRTC and nvdisasm, and no GPU.

    python bench/instructions.py                              # all; writes bench/results
    python bench/instructions.py --arch sm_80,sm_89 --head-dim 64 --out /tmp/a.json   # some
    python bench/instructions.py --json | jq '.kernels[0]'
    ncu --csv --page raw --metrics smsp__inst_executed.sum -k 'regex:^sagebwd_(forward|backward)' \\
        PROGRAM > executed.csv      # a program that calls sagebwd.attention once
    python bench/instructions.py --check-ncu executed.csv --seq-kv 4096

It compiles the default kernels with `sagebwd build` into an empty cache and reads the machine code.
It follows one iteration of each main loop (sass.py says which loop and which path), and adds the
share of the work that is done once per 256 tokens. "Per score and thread" means the instructions of
a warp's iteration x 32 lanes / the scores of that iteration. A bound is the speed that the busiest
pipe allows if nothing else limits it. SMs, clocks and lanes are in gpus.py. The model assumes that
shared memory delivers separate bytes to each lane, even for a broadcast. TFLOPS count 4 D
operations per score in the forward and 10 D in the backward, as FlashAttention-2 does. The bound of
FlashAttention-2's 16-bit products is listed as well.

--check-ncu compares with what Nsight Compute has counted. The sizes are those of the launch: as
many keys as queries unless --seq-kv says otherwise.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpus import GPUS, Gpu
from harness import Record, parse, parser, progress, run, run_json
from sass import PIPES, Executed, Function, Loop, SassError, change_of_units, functions, main_loop

#: Matrix products with HEAD_DIM multiplications per score, by kind of kernel.
PRODUCTS = {"forward": 2, "backward_dq": 3, "backward_dkv": 4, "backward": 5}
#: Those whose blocks own keys and walk over queries.
OWN_KEYS = ("backward_dkv", "backward")
BOUNDS = ("issue", "fma", "alu", "xu", "shared", "tensor")
#: Tokens that share the scales of their channels (generator/spec.h: channel_tokens).
UNIT_TOKENS = 256


# ---- kernels -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel: its entry in the cache, and its machine code."""

    name: str
    fields: dict  #: of its spec and tile, as `sagebwd` spells them
    compiler: str
    registers: int
    spill_bytes: int
    cubin: bytes

    def __getitem__(self, field: str) -> int:
        return int(self.fields[field])

    @property
    def kind(self) -> str:
        return self.fields["kind"]


def sides(kind: str, precision: str, block_q: int, block_kv: int,
          family: str = "mma") -> tuple[int, int]:
    """The rows that a block owns and its warps share (queries, or keys for dK and dV), and the rows
    of the other kind that it works on in each step."""
    if kind in OWN_KEYS:
        return block_kv, block_q
    # If dS is in 16 bits, dQ is summed over this many keys at a time for every tile.
    if (kind, precision) == ("backward_dq", "gradients16"):
        return block_q, 128 if family == "ws" else 64
    return block_q, block_kv


def multiplications_a_score(kernel: Kernel) -> int:
    """Products of the main loop. In ws there are 16 more, which write the starting values of the
    forward's S and of a split backward's dP."""
    started = kernel.kind in ("forward", "backward_dq", "backward_dkv")
    start = 16 if started and kernel.fields["family"] == "ws" else 0
    return kernel["head_dim"] * PRODUCTS[kernel.kind] + start


def scores_of_step(kernel: Kernel) -> int:
    """The scores that one warp works on in each step."""
    owned, walked = sides(kernel.kind, kernel.fields["precision"], kernel["block_q"],
                          kernel["block_kv"], kernel.fields["family"])
    return owned // kernel["warps"] * walked


def kept_kernels(folder: Path) -> Iterator[Kernel]:
    """The attention kernels among a cache directory's files: a header in JSON, then a cubin."""
    for path in sorted(folder.glob("*.kernel")):
        content = path.read_bytes()
        start = content.index(b"\x7fELF")
        # The checksum before the first key may have any bytes, so the search begins at the key.
        header = json.loads(content[re.search(rb'\{"[a-z_]+":', content).start() : start])
        if header["fields"]["kind"] in PRODUCTS:
            yield Kernel(header["kernel"], header["fields"], header["compiler"],
                         header["registers"], header["spill_bytes"], content[start:])


def compiled(tool: Path, arch: str, words: list[str]) -> list[Kernel]:
    """Compiles the default kernels of an architecture, those that it has without `deterministic`,
    and those of split backwards."""
    with tempfile.TemporaryDirectory() as cache:
        for more in [], ["--no-deterministic"], ["--gradient-kernels", "split"]:
            done = run([tool, "build", "--arch", arch, *words, *more, "--json"],
                       SAGEBWD_CACHE_DIR=cache, SAGEBWD_CACHE_PACKS="", SAGEBWD_TUNE="off")
            if done.status != 0:
                raise RuntimeError(
                    f"sagebwd build --arch {arch} failed: {done.errors or done.output}")
        return list(kept_kernels(Path(cache)))


def words_of(tool: Path, option: str) -> list[str]:
    """The values that `sagebwd build` knows of an option."""
    text = " ".join(run([tool, "build", "--help"]).output.split())
    found = re.search(rf"--{option} KIND[^:]*: (.*?) \(default", text)
    if not found:
        raise RuntimeError(f"sagebwd build --help does not list the values of --{option}")
    return found.group(1).split(", ")


def find_nvdisasm() -> Path | None:
    """nvdisasm on the PATH, or in NVIDIA's package for this Python."""
    if on_path := shutil.which("nvdisasm"):
        return Path(on_path)
    folder = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    folders = [folder, *(Path(p) / "nvidia" for p in sys.path if p.endswith("site-packages"))]
    return next((f for folder in folders for f in sorted(folder.glob("*/bin/nvdisasm"))), None)


NO_NVDISASM = ("no nvdisasm on the PATH or among this Python's packages: pip install "
               "nvidia-cuda-nvdisasm, or install a CUDA toolkit, or name it with --nvdisasm")


def disassemble(nvdisasm: Path, cubin: bytes) -> list[Function]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = run([nvdisasm, "-c", file.name])
    if done.status != 0:
        raise RuntimeError(f"nvdisasm failed: {done.errors or done.output}")
    return functions(done.output)


# ---- the model -----------------------------------------------------------------------------------


def outside_of_loop(function: Function, loop: Loop) -> int:
    """The instructions of a warp outside whole iterations of the loop: before it, and after it."""
    before, last = function.path(0, loop.first), function.path(loop.first, None)
    if not before or not last:
        raise SassError(f"{function.name}: no path through its main loop")
    return len(before) - 1 + len(last) - int(loop.body.total())


def clocks(gpu: Gpu, kernel: Kernel, body: Executed, scores: int) -> dict[str, float]:
    """The fewest clocks of one SM per score, for each pipe that it may have to wait for."""
    lanes = {pipe: 32 * count for pipe, count in body.by_pipe().items()}
    imads = 32 * body.total(lambda i: i.base == "IMAD")
    tensor = body.total(lambda i: 2 * i.macs / gpu.tensor_rate(i.name) if i.macs else 0)
    shared = body.total(lambda i: i.shared_read_bytes + i.shared_write_bytes)
    busy = {
        "issue": sum(lanes.values()) / gpu.issue_lanes,
        "fma": max((lanes["fma"]) / gpu.fp32_lanes, imads / gpu.imad_lanes),
        "alu": lanes["alu"] / gpu.alu_lanes,
        "xu": lanes["xu"] / gpu.xu_lanes,
        "shared": shared / gpu.shared_bytes,
        "tensor": tensor,
    }
    return {name: round(busy[name] / scores, 5) for name in BOUNDS}


def row_of(kernel: Kernel, nvdisasm: Path) -> dict:
    """One kernel's figures: per score and thread, per warp, and clocks on each GPU."""
    function = next(f for f in disassemble(nvdisasm, kernel.cubin) if f.name == kernel.name)
    step = scores_of_step(kernel)
    loop = main_loop(function, step * multiplications_a_score(kernel))
    fields, scores = kernel.fields, step * loop.steps
    walked = sides(kernel.kind, fields["precision"], kernel["block_q"], kernel["block_kv"],
                   fields["family"])[1]
    change = change_of_units(function, loop)
    body = Executed(loop.body.counts.copy())
    body.add(change.elements(), loop.steps * walked / UNIT_TOKENS)
    return {
        "arch": fields["arch"],
        "kernel": kernel.kind,
        "head_dim": kernel["head_dim"],
        "causal": fields["causal"],
        "precision": fields["precision"],
        "name": kernel.name,
        "compiler": kernel.compiler,
        "block_q": kernel["block_q"],
        "block_kv": kernel["block_kv"],
        "family": fields["family"],
        "warps": kernel["warps"],
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "per_score": round(32 * body.total() / scores, 3),
        "pipes": {p: round(32 * n / scores, 3) for p, n in body.by_pipe().items()},
        "shared_read_bytes": round(body.total(lambda i: i.shared_read_bytes) / scores, 2),
        "shared_write_bytes": round(body.total(lambda i: i.shared_write_bytes) / scores, 2),
        "warp": {"scores_of_step": step, "steps_of_turn": loop.steps,
                 "turn": round(body.total(), 1), "change_of_units": change.total(),
                 "outside": outside_of_loop(function, loop)},
        "unknown_instructions": body.unknown(),
        "clocks": {gpu.name: clocks(gpu, kernel, body, scores)
                   for gpu in GPUS if gpu.arch == fields["arch"]},
    }  # fmt: skip


def bounds_of(rows: list[dict]) -> list[dict]:
    """TFLOPS that the busiest pipe of each kernel allows, for each GPU and pass."""
    found = []
    keys = sorted({(r["head_dim"], r["causal"], r["precision"]) for r in rows}, reverse=True)
    for gpu in GPUS:
        for key in keys:
            own = {r["kernel"]: r["clocks"][gpu.name] for r in rows if gpu.name in r["clocks"]
                   and (r["head_dim"], r["causal"], r["precision"]) == key}  # fmt: skip
            for name, products, kinds in (("forward", 2, ["forward"]),
                                          ("backward", 5, ["backward_dq", "backward_dkv"]),
                                          ("fused", 5, ["backward"])):
                if any(kind not in own for kind in kinds):
                    continue
                spent = sum(max(own[kind].values()) for kind in kinds)
                found.append({
                    "gpu": gpu.name, "head_dim": key[0], "causal": key[1], "precision": key[2],
                    "pass": name, "bound_by": [max(own[k], key=own[k].get) for k in kinds],
                    "tflops": round(gpu.tops(2 * products * key[0] / spent), 1),
                    "flash_attention_2": round(gpu.flash_attention_2, 1),
                })  # fmt: skip
    return found


# ---- what Nsight Compute has counted -------------------------------------------------------------


def counted(path: Path) -> Iterator[dict]:
    """Name, grid and executed instructions of each launch in a CSV of ncu's, raw or in details."""
    lines = [line for line in path.read_text().splitlines() if line.startswith('"')]
    metric = "smsp__inst_executed.sum"
    for row in csv.DictReader(lines):
        value = row.get(metric) if metric in row else (
            row.get("Metric Value") if row.get("Metric Name") == metric else None)  # fmt: skip
        if not value or not row.get("ID"):  # the units under a raw page's head, other metrics
            continue
        grid = tuple(int(n) for n in re.findall(r"\d+", row["Grid Size"]))
        yield {"name": row["Kernel Name"].partition("(")[0], "cc": row.get("CC", ""), "grid": grid,
               "executed": float(value.replace(",", ""))}


def steps_of_blocks(row: dict, blocks: int, seq_kv: int | None, heads: int) -> int:
    """The tiles that all blocks along the grid's x axis process."""
    own, walked = sides(row["kernel"], row["precision"], row["block_q"], row["block_kv"],
                        row.get("family", "mma"))
    dkv = row["kernel"] in OWN_KEYS
    length = blocks * own if seq_kv is None or dkv else seq_kv
    tiles = -(-length // walked)
    if row["causal"] == "none":
        return blocks * tiles * (heads if dkv else 1)
    seen = (tiles - b * own // walked if dkv else min(tiles, -(-(b + 1) * own // walked))
            for b in range(blocks))  # fmt: skip
    return sum(max(0, n) for n in seen) * (heads if dkv else 1)


def check(path: Path, rows: list[dict], seq_kv: int | None, heads: int) -> list[dict]:
    """Each launch of a kernel that the record knows: executed, predicted, and the difference."""
    found = []
    for launch in counted(path):
        digits = launch["cc"].replace(".", "")
        row = next((r for r in rows if r["name"] == launch["name"]
                    and (not digits or re.fullmatch(rf"sm_{digits}[a-z]?", r["arch"]))), None)
        if row is None:
            continue
        x, y, z = launch["grid"]
        warp = row["warp"]
        turns = steps_of_blocks(row, x, seq_kv, heads) / warp["steps_of_turn"]
        predicted = row["warps"] * y * z * (x * warp["outside"] + turns * warp["turn"])
        found.append({"name": row["name"], "grid": launch["grid"], "executed": launch["executed"],
                      "predicted": predicted,
                      "percent": round(100 * (predicted / launch["executed"] - 1), 2)})
    if not found:
        raise RuntimeError(
            f"{path.name} has no launch of a kernel in the record, with smsp__inst_executed.sum: "
            "--help shows ncu's command; renew the record if the kernels have changed"
        )
    return found


# ---- the command line ----------------------------------------------------------------------------


def print_rows(rows: list[dict]) -> None:
    print(f"\n{'kernel':36} {'total':>6} " + " ".join(f"{p:>7}" for p in PIPES)
          + "  B read  regs spills")
    for row in rows:
        what = f"{row['arch']:7} {row['kernel']:12} D{row['head_dim']:<3} {row['causal']:8}"
        print(f"{what:36} {row['per_score']:6.2f} "
              + " ".join(f"{row['pipes'][p]:7.2f}" for p in PIPES)
              + f" {row['shared_read_bytes']:7.1f} {row['registers']:5} {row['spill_bytes']:6}"
              + ("" if row["precision"] == "six-of-seven" else f"  {row['precision']}"))


def print_bounds(bounds: list[dict]) -> None:
    print(f"\n{'GPU':12} {'pass':8} {'operation':28} {'bound':>7} {'FA2':>7}  TFLOPS, bound by")
    for row in bounds:
        what = f"D{row['head_dim']} {row['causal']} {row['precision']}"
        print(f"{row['gpu']:12} {row['pass']:8} {what:28} {row['tflops']:7.0f} "
              f"{row['flash_attention_2']:7.0f}  {', '.join(row['bound_by'])}")


def measure(options, nvdisasm: Path) -> tuple[list[dict], list[str]]:
    """Rows of all kernels that were asked for, and what failed."""
    words = ["--head-dim", options.head_dim, "--causal", options.causal, "--precision",
             options.precision or ",".join(words_of(options.program, "precision"))]
    known = [
        arch["name"] for arch in run_json([options.program, "doctor", "--json"])[0]["architectures"]
    ]  # fmt: skip
    archs = options.arch.split(",") if options.arch else known
    if unknown := [arch for arch in archs if arch not in known]:
        raise RuntimeError(f"no architecture {', '.join(unknown)}: there are {', '.join(known)}")
    rows, failures = [], []
    for index, arch in enumerate(archs, 1):
        try:
            rows += [row_of(kernel, nvdisasm) for kernel in compiled(options.program, arch, words)]
        except (RuntimeError, KeyError) as error:
            failures.append(str(error))
        progress(index, len(archs), f"compiling, {arch}")
    kinds = list(PRODUCTS)
    rows.sort(key=lambda r: (archs.index(r["arch"]), r["precision"] != "six-of-seven",
                             kinds.index(r["kernel"]), r["head_dim"], r["causal"]))
    return rows, failures


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "instructions.json", "sagebwd")
    options.description, options.formatter_class = __doc__, argparse.RawDescriptionHelpFormatter
    options.add_argument("--arch", default="", help="a,b: some of all architectures")
    options.add_argument("--head-dim", default="64,128")
    options.add_argument("--causal", default="none,top-left")
    options.add_argument("--precision", default="", help="a,b: some of all precisions")
    options.add_argument("--nvdisasm", type=Path, default=find_nvdisasm(), metavar="FILE")
    options.add_argument("--json", action="store_true", help="print the record instead of tables")
    options.add_argument("--check-ncu", type=Path, metavar="FILE",
                         help="a CSV of ncu's: compare it with the record --out")
    options.add_argument("--seq-kv", type=int, help="keys of that launch, where not its queries")
    options.add_argument("--heads-per-kv-head", type=int, default=1, help="of that launch")
    parsed = parse(options, arguments, gpu=False)
    try:
        if parsed.check_ncu:
            rows = json.loads(parsed.out.read_text())["kernels"]
            found = check(parsed.check_ncu, rows, parsed.seq_kv, parsed.heads_per_kv_head)
            print(json.dumps(found, indent=1) if parsed.json else "\n".join(
                f"{f['name']:60} executed {f['executed']:.4g}, predicted {f['predicted']:.4g}: "
                f"{f['percent']:+.2f} %" for f in found))
            return 0
        if parsed.nvdisasm is None or not parsed.nvdisasm.exists():
            options.error(NO_NVDISASM)
        whole = all(getattr(parsed, name) == options.get_default(name)
                    for name in ("arch", "head_dim", "causal", "precision"))
        if not whole and parsed.out == options.get_default("out"):
            options.error(f"only a record of all kernels goes to {parsed.out.name}: name another "
                          "file with --out")
        rows, failures = measure(parsed, parsed.nvdisasm)
        if failures and parsed.out == options.get_default("out"):
            raise RuntimeError(f"{parsed.out.name} is kept as it was: " + "; ".join(failures))
    except (RuntimeError, OSError) as error:
        print(f"instructions: {error}", file=sys.stderr)
        return 1
    bounds = bounds_of(rows)
    record = Record(parsed.out, head_dim=parsed.head_dim, causal=parsed.causal)
    record.set(kernels=rows, bounds=bounds, failures=failures)
    for failure in failures:
        print(f"instructions: {failure}", file=sys.stderr)
    if not parsed.json:
        print_rows(rows)
        print_bounds(bounds)
        return record.finish(not failures)
    record.close(not failures)
    print(json.dumps(record.content, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
