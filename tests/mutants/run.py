#!/usr/bin/env python3
"""Tells what the tests catch: each mutant of table.py, and the first test that fails with it.

    python tests/mutants/run.py TREE [--jobs N] [--minutes M] [--out FILE] [--only WORD]
                                   [--missed FILE] [--check]

TREE is a checkout that is built in TREE/build (cmake -G Ninja, tests and Python on). Each worker
has a copy of it beside it, whose path is as long, so that the paths in what is built can be
replaced. There the commands are run again that depend on the changed file, and then the tests:
those closest to it first, what takes minutes last. Tests that fail without a mutant are left out.

A mutant that does not compile is `not built`, one for which time ran out `unfinished`. --check only
tells which mutants a tree has.
"""

import argparse
import json
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from table import MUTANTS

GTESTS = ("generator", "templates", "cache", "runtime")
AT_ONCE = 4  # processes of one mutant's tests
HEAVY = "CompileTest.*:*DefaultKernels*:*SumsOfDqInFp16*:On/*"
NOT_HERE = ["--ignore=tests/gpu_python", "--deselect",
            "tests/tools/test_run.py::test_what_is_built_here_is_built_again_without_network"]  # fmt: skip
#: Suites in the order in which they are asked, by the folder of the changed file. The generator's
#: tests hold every source's text, so that they see each change of a template, harmless ones too.
ORDER = {
    "templates": "simulated templates layering catches runtime tools package compile",
    "generator": "generator templates runtime simulated layering tools package compile",
    "cache": "cache runtime sanitized tools package generator simulated",
    "runtime": "runtime generator package simulated tools cache templates sanitized",
    "python": "package simulated_python tools layering",
}


class Stopped(Exception):
    """Time ran out."""


class Tree:
    """A built checkout."""

    def __init__(self, root, python):
        self.root, self.build, self.python = root, root / "build", python

    def suites(self):
        """The command of each suite, which stops at the first failure. Folders of Python tests are
        a command for each file."""
        commands = {}
        for name in GTESTS:
            commands[name] = [f"{self.build}/bin/{name}_tests", "--gtest_fail_fast"]
        commands["compile"] = [f"{self.build}/bin/templates_tests", "--gtest_fail_fast"]
        pytest = [self.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        for suite, folder in (("package", "tests/python"), ("tools", "tests/tools")):
            files = sorted((self.root / folder).glob("test_*.py"))
            commands[suite] = [[*pytest, str(file.relative_to(self.root)), *NOT_HERE]
                               for file in files]  # fmt: skip
        commands["layering"] = [*pytest, "tests/layering_test.py"]
        simulate = f"{self.build}/simulator/simulate"
        commands["simulated_python"] = [simulate, *pytest, "tests/simulated_python"]
        ctest = ["ctest", "--test-dir", str(self.build), "--stop-on-failure", "-j", str(AT_ONCE)]
        commands["simulated"] = [*ctest, "-R", "^Simulated", "-E", "Catches|Python"]
        commands["catches"] = [*ctest, "-R", "CatchesBroken"]
        commands["sanitized"] = [*ctest, "-L", "sanitized"]
        return commands

    def run(self, suite, known=(), place=None, until=None, all_failures=False):
        """The tests that fail, at most one a command unless all are wanted, without `known` ones."""
        command = self.suites()[suite]
        if isinstance(command[0], str):
            return self.run_one(suite, command, known, place, until, all_failures)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            found = pool.map(lambda one: self.run_one(suite, one, known, place, until,
                                                      all_failures), command)  # fmt: skip
            return [name for failed in found for name in failed]

    def run_one(self, suite, command, known, place, until, all_failures):
        if suite in GTESTS or suite == "compile":
            chosen = HEAVY if suite == "compile" else "*"
            left_out = [HEAVY] if suite == "templates" else []
            command = [*command, f"--gtest_filter={chosen}-{':'.join([*left_out, *known])}"]
        elif command[0] == "ctest":
            left_out = "|".join(f"^{re.escape(name)}$" for name in known)
            if left_out and "-E" in command:
                command[command.index("-E") + 1] += "|" + left_out
            elif left_out:
                command += ["-E", left_out]
        else:
            command += [word for name in known for word in ("--deselect", name)]
        if all_failures:
            command = [w for w in command if w not in ("--gtest_fail_fast", "-x",
                                                       "--stop-on-failure")]  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": f"{self.build}/python", "VIRTUAL_ENV": ""}
        if place:
            environment["SAGEBWD_CACHE_DIR"] = f"{place}/cache"
        with tempfile.TemporaryFile("w+") as log:
            process = subprocess.Popen(command, cwd=self.root, env=environment, stdout=log,
                                       stderr=subprocess.STDOUT, text=True,
                                       start_new_session=True)  # fmt: skip
            try:
                code = process.wait(None if until is None else max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                raise Stopped from None
            log.seek(0)
            said = log.read()
        if code == 0 or (command[0] == self.python and code == 5):
            return []
        found = re.findall(r"^\[  FAILED  \] ([^\s,]+)", said, re.M)
        found += re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
        found += re.findall(r"^\s*\d+ - (\S+) \(", said, re.M)
        found = [name for name in dict.fromkeys(found) if not name.isdigit()]
        return found or [f"{suite} (exit code {code})"]

    def commands(self):
        text = subprocess.check_output(["ninja", "-C", self.build, "-t", "commands"], text=True)
        return [line for line in text.splitlines() if not line.startswith("ninja:")]

    def users_of(self, file):
        """Objects that were compiled from a header or a source."""
        text = subprocess.check_output(["ninja", "-C", self.build, "-t", "deps"], text=True)
        users = []
        for block in text.split("\n\n"):
            lines = block.splitlines()
            if lines and any(line.strip().endswith(file) for line in lines[1:]):
                users.append(lines[0].split(":")[0])
        return users


def copy_of(tree, root):
    """A copy there, with its own paths in whatever was built."""
    assert len(str(root)) == len(str(tree.root)), f"{tree.root} is too short for its copies"
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(tree.root, root, symlinks=True,
                    ignore=shutil.ignore_patterns(".git", "fresh", "logs"))  # fmt: skip
    old, new = str(tree.root).encode(), str(root).encode()
    for folder, folders, files in os.walk(root / "build"):
        for name in [*folders, *files]:
            path = Path(folder, name)
            if path.is_symlink():
                target = os.readlink(path)
                if str(tree.root) in target:
                    path.unlink()
                    path.symlink_to(target.replace(str(tree.root), str(root)))
            elif path.is_file():
                data = path.read_bytes()
                if old in data:
                    times = path.stat()
                    path.write_bytes(data.replace(old, new))
                    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    return Tree(root, tree.python)


class Worker:
    def __init__(self, tree, original, commands):
        self.tree, self.commands = tree, commands
        self.original = original
        self.saved = {}
        self.why = ""

    def save(self, path):
        if path not in self.saved:
            self.saved[path] = path.read_bytes(), path.stat().st_mode

    def restore(self):
        for path, (data, mode) in self.saved.items():
            path.unlink(missing_ok=True)
            path.write_bytes(data)
            path.chmod(mode)
        self.saved = {}

    def rebuild(self, file, until):
        """Whether what depends on the file could be made again."""
        changed = {str(self.original.root / file), f"../{file}"}
        ran = False
        if file.endswith((".h", ".cpp")): # sources may be compiled as one
            changed |= set(self.original.users_of(file))
        for command in self.commands:
            words = set(re.split(r"[\s;&]+|-o |=", command))
            embeds = file.startswith("templates/") and "write_embedded_templates" in command
            if not embeds and not changed & words:
                continue
            if "--gtest_list" in command or "gtest_discover" in command.lower():
                command = command.split("&& cd")[0]
            own = command.replace(str(self.original.root), str(self.tree.root))
            outputs = re.findall(r"(?:-o|-DOUTPUT=| qc?)\s*(\S+)", own)
            for output in outputs:
                path = self.tree.build / output
                if path.is_file():
                    self.save(path)
                    if output.endswith(".a"):
                        path.unlink()
            changed |= set(outputs) | {str(self.tree.build / output) for output in outputs}
            changed |= {output.replace(str(self.tree.root), str(self.original.root))
                        for output in outputs}  # fmt: skip
            own = re.sub(r"\bccache\b ", "", own)
            done = subprocess.run(["bash", "-c", own], cwd=self.tree.build, capture_output=True,
                                  text=True, check=False)  # fmt: skip
            if done.returncode != 0:
                self.why = f"{own[-200:]}: {done.stderr[-800:]}"
                return False
            ran = True
            if time.monotonic() > until:
                raise Stopped
        self.why = "no command depends on the file"
        return ran

    def verdict(self, mutant, known, until):
        file, old, new = mutant
        path = self.tree.root / file
        self.save(path)
        place = tempfile.mkdtemp(prefix="sagebwd-mutant-")
        try:
            path.write_text(path.read_text().replace(old, new))
            if not file.endswith(".py") and not self.rebuild(file, until):
                return "not built", self.why
            for suite in ORDER[file.split("/")[0]].split():
                failed = self.tree.run(suite, known.get(suite, ()), place, until)
                if failed:
                    return "caught", f"{suite}: {failed[0]}"
            return "NOT CAUGHT", ""
        except Stopped:
            return "unfinished", ""
        finally:
            self.restore()
            shutil.rmtree(place, ignore_errors=True)


def missing_in(root):
    """Mutants that a tree does not have, and those that it has."""
    there, missing = [], []
    for mutant in MUTANTS:
        path = root / mutant[0]
        found = path.read_text().count(mutant[1]) if path.exists() else 0
        (there if found == 1 else missing).append(mutant)
    return missing, there


def shown(mutant):
    lines = [line.strip() for line in (mutant[1], mutant[2])]
    return f"{mutant[0]}: {lines[0]!r} -> {lines[1]!r}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="", help="mutants of files with this in their name")
    parser.add_argument("--missed", type=Path, help="an --out: what it does not call caught")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    until = time.monotonic() + 60 * given.minutes
    tree = Tree(given.tree.resolve(), given.python)
    missing, mutants = missing_in(tree.root)
    mutants = [m for m in mutants if given.only in m[0]]
    if given.missed:
        caught = {(r["file"], r["old"], r["new"]) for r in json.loads(given.missed.read_text())
                  if r["verdict"] == "caught"}  # fmt: skip
        mutants = [m for m in mutants if m not in caught]
    print(f"{len(mutants)} mutants, {len(missing)} are not of this tree")
    for mutant in missing:
        print("  not of this tree:", shown(mutant))
    if given.check:
        return 0

    commands = tree.commands()
    jobs = min(given.jobs, len(mutants))
    workers = [None] * jobs
    used = {suite for m in mutants for suite in ORDER[m[0].split("/")[0]].split()}
    known, waiting = {}, queue.Queue()
    for suite in sorted(used, key=["simulated", "compile", "package", "tools"].__contains__)[::-1]:
        waiting.put(suite)

    def prepare(number):
        name = f"m{number:0{len(tree.root.name) - 1}}"
        workers[number] = Worker(copy_of(tree, tree.root.with_name(name)), tree, commands)
        while True:
            try:
                suite = waiting.get_nowait()
            except queue.Empty:
                return
            try: # what takes longer than a third of the time is not asked
                limit = time.monotonic() + 20 * given.minutes
                known[suite] = workers[number].tree.run(suite, until=min(until, limit),
                                                        all_failures=True)  # fmt: skip
            except Stopped:
                known[suite] = None

    def in_threads(work):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    in_threads(prepare)
    for suite, failing in sorted(known.items()):
        if failing is None:
            print(f"  too long for this time, left out: {suite}")
        elif failing:
            print(f"  fails without a mutant, left out: {suite}: {', '.join(failing)}")
    asked = {suite: failing for suite, failing in known.items() if failing is not None}
    for area, order in ORDER.items():
        ORDER[area] = " ".join(suite for suite in order.split() if suite in asked)

    todo = queue.Queue()
    for mutant in mutants:
        todo.put(mutant)
    results, lock = [], threading.Lock()

    def work(number):
        while True:
            try:
                mutant = todo.get_nowait()
            except queue.Empty:
                return
            start = time.monotonic()
            if start > until:
                verdict, by = "unfinished", ""
            else:
                verdict, by = workers[number].verdict(mutant, asked, until)
            with lock:
                results.append({"file": mutant[0], "old": mutant[1], "new": mutant[2],
                                "verdict": verdict, "by": by})  # fmt: skip
                print(f"{verdict:10} {time.monotonic() - start:4.0f} s  {shown(mutant)}  {by}",
                      flush=True)  # fmt: skip

    in_threads(work)
    counts = {}
    for result in results:
        counts[result["verdict"]] = counts.get(result["verdict"], 0) + 1
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    if given.out:
        given.out.write_text(json.dumps(results, indent=1))
    for worker in workers:
        shutil.rmtree(worker.tree.root, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
