"""Says what another NVRTC changes: compare_nvrtc.py PINNED.TSV TRIED.TSV VERSION

Each file has a line per compilation: architecture, kernel, registers, bytes of spills. Prints how
many kernels have other registers, which spill more or less, and the lines that VERSION would need
in tests/templates/known_spills.txt.
"""

import sys
from collections import Counter
from pathlib import Path


def kernels(path):
    """{(architecture, kernel): (registers, spills)} of a report; empty where there is none."""
    if not Path(path).exists():
        return {}
    rows = (line.split("\t") for line in Path(path).read_text().splitlines())
    return {(arch, name): (int(registers), int(spills)) for arch, name, registers, spills in rows}


def listed(version):
    """The kernels whose spills with a version, such as 13.0, the tests know."""
    text = Path("tests/templates/known_spills.txt").read_text()
    rows = (line.partition("#")[0].split() for line in text.splitlines())
    return {(row[1], row[2]) for row in rows if row and row[0] == version}


def main(pinned, tried, version):
    before, after = kernels(pinned), kernels(tried)
    if not before or not after:
        print(f"\nNothing was compiled with {version if not after else 'the pinned version'}; the "
              "logs are beside the reports.")  # fmt: skip
        return 1
    both = sorted(before.keys() & after.keys())
    minor = ".".join(version.split(".")[:2])
    print(f"\n{len(both)} kernels were compiled by both, {len(after.keys() - before.keys())} by "
          f"{version} alone, {len(before.keys() - after.keys())} not by {version}.")  # fmt: skip
    registers = Counter(after[k][0] - before[k][0] for k in both)
    fewer, more = (sum(n for by, n in registers.items() if by * sign > 0) for sign in (-1, 1))
    print(f"Registers: {registers[0]} as before, {fewer} with fewer, {more} with more"
          + (f", by up to {max(registers)}" if more else "") + ".")  # fmt: skip
    changed = [k for k in both if before[k][1] != after[k][1]]
    for arch, name in changed:
        was, now = before[arch, name][1], after[arch, name][1]
        print(f"  {arch} {name}: {was} bytes of spills before, {now} now")
    if not changed:
        print("No kernel spills more or less.")
    needed = sorted(k for k, (_, spills) in after.items() if spills)
    missing = [k for k in needed if k not in listed(minor)]
    if missing:
        print("\nTo be added to tests/templates/known_spills.txt, each with its reason:")
    for arch, name in missing:
        print(f"{minor} {arch} {name} {after[arch, name][1]}")
    for arch, name in sorted(listed(minor) - set(needed)):
        print(f"stale in known_spills.txt: {minor} {arch} {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
