"""The processes of bench/balance.py, each with its own templates, and what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

SCRIPT = Path(__file__).resolve().with_name("balance_runs.py")


@dataclass
class Found:
    """The figures that a process has printed so far."""

    built: dict = field(default_factory=dict)  #: by head dimension, causal and plan
    results: dict = field(default_factory=dict)  #: by the cell's label and the plan
    here: dict | None = None
    end: dict | None = None

    def results_by_cell(self) -> dict:
        """{cell: {plan: what can be compared}}, of plans that did not fail."""
        found: dict[str, dict] = {}
        for (cell, plan), result in self.results.items():
            found.setdefault(cell, {})
            if "results" in result:
                found[cell][plan] = result["results"]
        return found


class Process:
    """`python balance_runs.py` with templates of its own. It compiles at once."""

    def __init__(self, job: dict, templates: Path) -> None:
        # Standard error goes to a file, so that a long message does not block.
        self.errors = tempfile.TemporaryFile("w+")
        self.child = subprocess.Popen(
            [sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, text=True,
            # A tile of another architecture may spill here; the record says so.
            env=os.environ | {"SAGEBWD_TEMPLATE_DIR": str(templates.resolve()),
                              "SAGEBWD_ALLOW_SPILLS": "1", "SAGEBWD_TUNE": "off"},
        )  # fmt: skip
        self.found = Found()
        self._say(job)

    def _say(self, what) -> None:
        try:
            self.child.stdin.write(json.dumps(what) + "\n")
            self.child.stdin.flush()
        except BrokenPipeError:
            pass  # its end says why

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_) -> None:
        """Ends the process, which waits for its next line or has been left by an error."""
        if self.child.poll() is None:
            self.child.kill()
        self.child.wait()
        self.child.stdin.close()
        self.child.stdout.close()
        self.errors.close()

    def _read_to(self, last: str, shown: Callable[[int, int], None]) -> None:
        """Reads what it says up to an event; RuntimeError if it ends before."""
        for text in self.child.stdout:
            if not text.startswith("{"):
                continue  # of a library
            said = json.loads(text)
            event = said.pop("event")
            if event == "compiled":
                self.found.built[said["head_dim"], said["causal"], said["plan"]] = said
            elif event == "here":
                self.found.here = said
            elif event == "result":
                self.found.results[said["cell"], said["plan"]] = said
            elif event == "end":
                self.found.end = said
            if "done" in said:
                shown(said["done"], said["total"])
            if event == last:
                return
        raise RuntimeError(self._failure())

    def compile(self, shown: Callable[[int, int], None]) -> None:
        """Waits until it has compiled. `shown` is called with how much is done of how much."""
        self._read_to("ready", shown)

    def run(self, plain: dict | None, shown: Callable[[int, int], None]) -> Found:
        """Lets it use the GPU; what it has found. `plain`: results to compare with."""
        self._say(plain)
        self._read_to("end", shown)
        return self.found

    def _failure(self) -> str:
        status = self.child.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return f"a process that runs kernels ended with {status}: {lines[-1] if lines else ''}"
