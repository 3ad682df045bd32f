"""Runs a pack that was built elsewhere, offline: without NVRTC, and with an empty cache.

    sagebwd prebuild --arch sm_90a --head-dim 64,128 --dtype bf16 --out FILE   # where NVRTC is
    python bench/offline_pack.py FILE                                          # where the GPU is

Runs `sagebwd verify` (random problems against FP64) with the pack alone, then asks for a kernel
that is not in it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tempfile
from pathlib import Path

from harness import Record, parse, parser, run

#: The specs of the pack above: the defaults of sm_90a.
PRESENT = ["--head-dim", "64,128", "--dtype", "bf16", "--causal", "none,top-left",
           "--granularity", "row", "--precision", "six-of-seven", "--group-kv", "128"]
ABSENT = ["--head-dim", "64", "--dtype", "fp16", "--causal", "none", "--granularity", "row",
          "--precision", "six-of-seven", "--group-kv", "128"]


def counters_of(text: str) -> dict[str, int]:
    """Reads what SAGEBWD_STATS=1 prints at exit."""
    for line in text.splitlines():
        if line.startswith("sagebwd: memory_hits="):
            words = line.removeprefix("sagebwd: ").split()
            return {name: int(value) for name, value in (word.split("=") for word in words)}
    return {}


def without_folders(text: str) -> str:
    """The text without the paths of this machine, because records are committed."""
    return re.sub(r"/[^ ,]*/", "", text)


def verify(tool: Path, pack: Path, words: list[str], cases: int) -> dict:
    with tempfile.TemporaryDirectory() as cache:
        done = run(
            [tool, "verify", "--cases", cases, *words, "--json"], timeout=300,
            SAGEBWD_CACHE_DIR=cache, SAGEBWD_CACHE_PACKS=str(pack), SAGEBWD_OFFLINE="1",
            SAGEBWD_NVRTC=f"{cache}/there is no NVRTC", SAGEBWD_STATS="1",
        )
        kept = sorted(path.name for path in Path(cache).glob("*.kernel"))
    report = json.loads(done.output) if done.output.strip() else {}
    return {
        "exit_code": done.status,
        "cases": report.get("cases"),
        "wrong": report.get("wrong"),
        "counters": counters_of(done.errors),
        "kernels_in_directory": len(kept),
        "error": without_folders(
            next((line for line in done.errors.splitlines() if "SAGEBWD_OFFLINE" in line), "")
        ),
    }


def main(arguments: list[str] | None = None) -> int:
    options = parser(__doc__, "offline-pack.json", "sagebwd")
    options.add_argument("pack", type=Path)
    options.add_argument("--cases", type=int, default=40)
    options = parse(options, arguments, gpu=False)
    content = options.pack.read_bytes()
    record = Record(options.out, cases=options.cases)
    record.set(pack={"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()})

    present = verify(options.program, options.pack, PRESENT, options.cases)
    counters = present["counters"]
    present["passed"] = (
        present["exit_code"] == 0 and present["wrong"] == 0 and present["cases"] == options.cases
        and counters.get("pack_hits", 0) > 0 and counters.get("compiles") == 0
        and present["kernels_in_directory"] == 0
    )  # fmt: skip
    record.set(present=present)
    absent = verify(options.program, options.pack, ABSENT, 1)
    absent["passed"] = absent["exit_code"] == 1 and "sagebwd prebuild" in absent["error"]
    record.set(absent=absent)
    print(f"{present['cases']} cases, {present['wrong']} wrong, "
          f"{counters.get('pack_hits')} kernels from the pack, {counters.get('compiles')} compiled")
    print(f"a kernel that is not in it: {absent['error']}")
    return record.finish(present["passed"] and absent["passed"])


if __name__ == "__main__":
    sys.exit(main())
