"""Whether each row of generator/ptxas.cpp still changes something with the NVRTC at hand.

    python bench/ptxas_rows.py                     # all rows; writes bench/results/ptxas.json
    python bench/ptxas_rows.py --only dkv-wide dq-more --kernels 2

Kernels of operations drawn by --seed are compiled with the option of their row and without it. A
row with a kernel that its option keeps from spilling is "needed"; one whose kernels only have
other machine code is "other code", and a measurement on a GPU must say which code is faster; one
that changes nothing is "idle" and can be deleted. No GPU is needed.
"""

from __future__ import annotations

import ctypes
import json
import random
import re
import struct
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import Record, parse, parser, progress, run_json

ARCHS = ("sm_80", "sm_86", "sm_87", "sm_89", "sm_90a", "sm_100", "sm_103", "sm_110", "sm_120")
KINDS = ("quantize", "mean_scores", "forward", "backward_dq", "backward_dkv", "backward")
HEAD_DIMS = ("40", "64", "72", "96", "128", "136", "256")
MASKS = ((), ("--causal", "top-left"), ("--window-left", "100"))
PRECISIONS = ("six-of-seven", "qk16", "dv16", "gradients16")
MORE = ((), (), ("--packed",), ("--granularity", "block"), ("--smooth-q",),
        ("--no-deterministic",), ("--dtype", "fp16"), ("--no-rotate",), ("--dp-sums", "fp16"),
        ("--dp-sums", "fp16", "--smooth-q"), ("--dp-sums", "fp16", "--granularity", "block"),
        ("--block-size", "128x128"))  # fmt: skip
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


class Nvrtc:
    """libnvrtc, as far as compiling one source takes it."""

    OPTIONS = ("--std=c++17", "--ftz=false", "--prec-div=true", "--prec-sqrt=true", "--fmad=true",
               "--ptxas-options=-v", "--device-as-default-execution-space")  # fmt: skip

    def __init__(self, path: str):
        for builtins in Path(path).resolve().parent.glob("libnvrtc-builtins.so*"):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(path)

    def _text(self, program, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(max(1, size.value))
        getattr(self._library, f"nvrtcGet{what}")(program, text)
        return text.raw[: size.value]

    def compile(self, source: str, arch: str, options: list[str]) -> dict:
        program = ctypes.c_void_p()
        self._library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"kernel.cu", 0, None, None
        )
        words = [f"--gpu-architecture={arch}", *self.OPTIONS, *options]
        given = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
        status = self._library.nvrtcCompileProgram(program, len(words), given)
        log = self._text(program, "ProgramLog").decode()
        cubin = self._text(program, "CUBIN") if status == 0 else b""
        self._library.nvrtcDestroyProgram(ctypes.byref(program))
        if status:
            raise RuntimeError(f"NVRTC gave {status}: {log}")
        code = machine_code(cubin)
        return {"registers": int(REGISTERS.findall(log)[-1]),
                "spill_bytes": sum(map(int, SPILLS.findall(log)[-1])),
                "code_bytes": len(code), "code": code}  # fmt: skip


def machine_code(cubin: bytes) -> bytes:
    """The .text section; the file around it names the source's hash."""
    (sections,) = struct.unpack_from("<Q", cubin, 0x28)
    count, of_names = struct.unpack_from("<HH", cubin, 0x3C)
    table = [struct.unpack_from("<IIQQQQIIQQ", cubin, sections + 64 * i) for i in range(count)]
    names = cubin[table[of_names][4] :]
    return next(cubin[s[4] : s[4] + s[5]] for s in table if names[s[0] :].startswith(b".text."))


def kernels_of_rows(options, only: set[str]):
    """(row, arch, emitted kernel), at most `options.kernels` of each row."""
    draw, found, seen = random.Random(options.seed), {}, set()
    for done in range(options.draws):
        progress(done + 1, options.draws, "operations drawn")
        arch, kind = draw.choice(ARCHS), draw.choice(KINDS)
        words = ["--head-dim", draw.choice(HEAD_DIMS), "--precision", draw.choice(PRECISIONS),
                 *draw.choice(MASKS), *draw.choice(MORE)]  # fmt: skip
        if kind == "mean_scores":
            words.append("--smooth-q")
        if kind == "backward":
            words.append("--no-deterministic")
        for more in ((), ("--pass", "backward")) if kind == "quantize" else ((),):
            try:
                emitted, _ = run_json([options.program, "emit", "--json", "--kernel", kind,
                                       "--arch", arch, *dict.fromkeys(words), *more],
                                      timeout=60)  # fmt: skip
            except Exception:  # combinations that there are not
                continue
            row = emitted["ptxas_row"]
            rows = found.setdefault(row, [])
            if row and (not only or row in only) and len(rows) < options.kernels and (
                (arch, emitted["name"]) not in seen
            ):
                seen.add((arch, emitted["name"]))
                rows.append((row, arch, emitted))
    return [kernel for rows in found.values() for kernel in rows]


def verdict(kernels: list[dict]) -> str:
    if any(k["without"]["spill_bytes"] > k["with"]["spill_bytes"] for k in kernels):
        return "needed"
    return "other code" if any(k["differs"] for k in kernels) else "idle"


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "ptxas.json", "sagebwd")
    options.add_argument("--only", nargs="+", default=[], metavar="ROW")
    options.add_argument("--kernels", type=int, default=4, help="of each row (default: 4)")
    options.add_argument("--draws", type=int, default=1500, help="operations (default: 1500)")
    options.add_argument("--jobs", type=int, default=2)
    options = parse(options, arguments, gpu=False)
    doctor, _ = run_json([options.program, "doctor", "--json"], timeout=60)
    nvrtc = Nvrtc(doctor["nvrtc"]["path"])
    record = Record(options.out, seed=options.seed, kernels=options.kernels, draws=options.draws,
                    compiled_with=doctor["nvrtc"]["identity"])  # fmt: skip

    def both(kernel):
        row, arch, emitted = kernel
        results = [nvrtc.compile(emitted["source"], arch, words)
                   for words in (emitted["options"], [])]  # fmt: skip
        differs = results[0].pop("code") != results[1].pop("code")
        return row, {"kernel": emitted["name"], "arch": arch, "option": emitted["options"][0],
                     "with": results[0], "without": results[1], "differs": differs}  # fmt: skip

    chosen, rows = kernels_of_rows(options, set(options.only)), {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for done, (row, compared) in enumerate(pool.map(both, chosen), 1):
            progress(done, len(chosen), "kernels compiled twice")
            rows.setdefault(row, []).append(compared)
    for row, kernels in sorted(rows.items()):
        record.add("rows", {"row": row, "verdict": verdict(kernels), "kernels": kernels})
        spills = [[k[side]["spill_bytes"] for k in kernels] for side in ("with", "without")]
        print(f"{row:20} {verdict(kernels):11} spilled bytes {spills[0]}, without the row "
              f"{spills[1]}")
    table = (Path(__file__).parent.parent / "generator/ptxas.cpp").read_text()
    all_rows = set(re.findall(r'^      \{"([a-z0-9_-]+)",', table, re.MULTILINE))
    missing = set(options.only) - set(rows)
    not_drawn = sorted(missing or (all_rows - set(rows) if not options.only else ()))
    record.set(not_drawn=not_drawn)
    if not_drawn:
        print("no kernel was drawn for " + ", ".join(not_drawn))
    return record.finish(
        not missing and all(verdict(kernels) != "idle" for kernels in rows.values())
    )


if __name__ == "__main__":
    sys.exit(main())
