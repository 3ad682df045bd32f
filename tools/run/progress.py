"""Shows how far a build or a test run is: COMMAND 2>&1 | progress.py WHAT LOG

Everything goes to LOG. Ninja's "[3/40]" and ctest's " 3/2016 Test #..." are counted: on a terminal
in one line, which changes, and elsewhere in a line every half minute. Failed tests are named as
they come.
"""

import re
import sys
import time

NINJA = re.compile(r"\[(\d+)/(\d+)\] ")
CTEST = re.compile(r"\s*(\d+)/(\d+) Test +#\d+: (.+?) \.*\s*(\S.*?) +([\d.]+) sec")
EVERY = 30  # seconds


class Shown:
    """The lines of one step. On a terminal the last one is written again and again."""

    def __init__(self, what, out):
        self.what, self.out, self.live = what, out, out.isatty()
        self.begun = self.last = time.monotonic()
        self.failed = 0

    def line(self, text):
        self.out.write(("\r\033[K" if self.live else "") + text + "\n")
        self.out.flush()

    def progress(self, done, all):
        now = time.monotonic()
        if now - self.last < (0.2 if self.live else EVERY):
            return
        self.last = now
        text = f"{done} of {all}" + (f", {self.failed} failed" if self.failed else "")
        if self.live:
            self.out.write(f"\r\033[K{self.what:<46} {text}, {now - self.begun:.0f} s")
            self.out.flush()
        else:
            self.line(f"  {text} after {now - self.begun:.0f} s")

    def end(self):
        if self.live:
            self.out.write("\r\033[K")
            self.out.flush()


def main(what, log):
    shown = Shown(what, sys.stdout)
    with open(log, "w", errors="surrogateescape") as file:
        for line in open(0, errors="surrogateescape"):
            file.write(line)
            if found := CTEST.match(line):
                if "***" in found[4] and "***Skipped" not in found[4] or "Failed" in found[4]:
                    shown.failed += 1
                    shown.line(f"  failed after {float(found[5]):.0f} s: {found[3]}")
                    file.flush()
                shown.progress(found[1], found[2])
            elif found := NINJA.match(line):
                shown.progress(found[1], found[2])
    shown.end()


if __name__ == "__main__":
    main(*sys.argv[1:])
