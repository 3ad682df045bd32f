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


class Process:
    """`python balance_runs.py` with templates of its own. It compiles at once."""

    def __init__(self, job: dict, templates: Path, script: Path = SCRIPT) -> None:
        # Standard error goes to a file, so that a long message does not block.
        self.errors = tempfile.TemporaryFile("w+")
        self.child = subprocess.Popen(
            [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self.errors, text=True,
            # A tile of another architecture may spill here; the record says so.
            env=os.environ | {"SAGEBWD_TEMPLATE_DIR": str(templates.resolve()),
                              "SAGEBWD_ALLOW_SPILLS": "1", "SAGEBWD_TUNE": "off"},
        )  # fmt: skip
        self.say(job)

    def say(self, what) -> None:
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

    def failure(self) -> str:
        """Why it ended early."""
        status = self.child.wait()
        self.errors.seek(0)
        lines = self.errors.read().strip().splitlines()
        return f"a process that runs kernels ended with {status}: {lines[-1] if lines else ''}"


@dataclass
class Found:
    """What a process has said."""

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


def talk(process: Process, plain: dict | None, shown: Callable[[int, int], None]) -> Found:
    """Lets a process use the GPU once it has compiled. Gives what it found; RuntimeError if it ends
    early. `plain`: results to compare with. `shown` is called with how much is done of how much."""
    found = Found()
    for text in process.child.stdout:
        if not text.startswith("{"):
            continue  # of a library
        said = json.loads(text)
        event = said.pop("event")
        if event == "compiled":
            found.built[said["head_dim"], said["causal"], said["plan"]] = said
        elif event == "ready":
            process.say(plain)
        elif event == "here":
            found.here = said
        elif event == "result":
            found.results[said["cell"], said["plan"]] = said
        elif event == "measured":
            shown(said["done"], said["total"])
        elif event == "end":
            found.end = said
            return found
    raise RuntimeError(process.failure())
