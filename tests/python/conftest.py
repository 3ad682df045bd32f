"""Tests of the package share these fixtures and hooks."""

import gc
import re
import signal
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests/drawn")]
sys.path.append(str(ROOT))  # experiments


@pytest.fixture(autouse=True, scope="module")
def little_is_looked_through_again():
    """The garbage collector passes over what was made before a file's tests, as PyTorch and
    transformers are a million objects, which take half a second each time."""
    gc.collect()
    gc.freeze()
    if dynamo := sys.modules.get("torch._dynamo"):
        dynamo.config.run_gc_after_compile = False  # of which PyTorch 2.6 knows nothing
        # For a log it empties the processor's caches and measures how long a graph's guards take.
        dynamo.guards.profile_guard_manager = lambda *given: 0.0


def pytest_unconfigure():
    gc.unfreeze()  # as a program ends, some libraries complain of what is left


@pytest.fixture
def tiny_tensors():
    """One thread, as tiny tensors cost less than threads do, and PyTorch's own settings before and
    after, whatever a command of a training has set."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def quick_compiler(monkeypatch):
    """The functions that the experiments compiled, by torch.compile without its back end, which
    takes half a minute."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    from experiments.compiled import compiled

    made, compile = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: made.append(function) or compile(
        function, backend="eager"))  # fmt: skip
    compiled.cache_clear()
    yield made
    compiled.cache_clear()


@pytest.fixture(scope="module")
def corpus_file(tmp_path_factory):
    from corpus_cases import corpus_of

    return corpus_of(tmp_path_factory.mktemp("folder of a machine"))


@pytest.fixture
def corpus(corpus_file):
    from experiments.data import Corpus

    return Corpus.open(corpus_file)


@pytest.fixture
def forked_workers(monkeypatch):
    """The processes of experiments/runner.py begin at once: those that it starts import PyTorch
    each, as test_runner.py has them."""
    pytest.importorskip("torch", reason="needs PyTorch")
    import distributed_ranks

    from experiments import runner, study

    for module in runner, study:
        monkeypatch.setattr(module, "multiprocessing", distributed_ranks.FORKING)


#: PyTorch itself, or another package with it, does not do this before 2.7. Keys are the tests that
#: need it.
NEEDS_2_7 = {
    "test_bench_command.py::test_some_backends": "grouped heads on a CPU",
    "test_distributed.py::test_two_ranks_train": "FSDP2 on a CPU",
    "test_distributed_dtensors.py::test_neighbouring": "context_parallel of any number of tokens",
    "test_distributed_errors.py::test_refusals": "torch.func through operators without data",
    "pages_run[docs/use/pytorch.md": "compiling the code of a page",
    "test_experiments_sharing.py::test_a_ring_trains_as_one_process[4-4": "FSDP2 on a CPU",
    "test_experiments_sharing.py::test_ulysses_trains_as_one_process[4-2": "FSDP2 on a CPU",
    "test_experiments_training.py::test_two_processes": "FSDP2 on a CPU",
    "test_tuning.py::test_what_ends": "gloo without a process that has ended",
    "test_transformers_fuse_uses.py::test_sharded_by_fsdp2": "FSDP2 on a CPU",
    "test_transformers_fuse_uses.py::test_one_compiled_graph": "compiling transformers 5",
    "test_transformers_fuse_uses.py::test_a_model_that_was_compiled": "compiling transformers 5",
}  # fmt: skip


def pytest_collection_modifyitems(items):
    torch = sys.modules.get("torch")
    if not torch or [int(n) for n in re.findall(r"\d+", torch.__version__)[:2]] >= [2, 7]:
        return
    for item in items:
        for name, what in NEEDS_2_7.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=f"PyTorch 2.7 is needed for {what}"))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    """ctest runs what is marked `anywhere` without PyTorch alone, where it must not be skipped for
    want of that."""
    report = (yield).get_result()
    if report.skipped and item.get_closest_marker("anywhere") and "PyTorch" in str(report.longrepr):
        report.outcome, report.longrepr = "failed", "it is marked `anywhere` and needs PyTorch"


# Compilers make objects by the hundred thousand, and few of them go in circles.
gc.set_threshold(20_000)

# A shell's background job ignores SIGINT, and so would the processes that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
