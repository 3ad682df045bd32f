"""Tests of trainers' own attention functions. Each is skipped by name where the trainer's code is
not found, before anything large is imported."""

import importlib
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "tests/python")]  # checkouts.py, documents.py

pytest.register_assert_rewrite("comparison")
import checkouts  # noqa: E402


def trainer_of(path):
    """The trainer after which a file of tests is named; None for other files."""
    stem = Path(path).stem.removeprefix("test_").replace("_", "-").lower()
    return next((name for name in checkouts.TRAINERS if name.lower() == stem), None)


def missing_for(path):
    folder = os.environ.get(checkouts.VARIABLE)
    if not folder:
        return f"needs a trainer's code: {checkouts.VARIABLE} is not set"
    name = trainer_of(path)
    if name and not checkouts.folder_of(name).is_dir():
        return f"needs a trainer's code: there is no {checkouts.folder_of(name)}"
    return ""


def pytest_collection_modifyitems(items):
    for item in items:  # of the whole session
        path = Path(item.fspath)
        if path.parent == HERE and (why := missing_for(path)):
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def device(monkeypatch):
    """Tensors lie there whose attention kernels compute: on a GPU, or on the CPU as the simulator
    takes them."""
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("sagebwd")
    if torch.cuda.is_available():
        return "cuda"
    if not any(Path(p).name == "simulator"
               for p in os.environ.get("LD_LIBRARY_PATH", "").split(":")):  # fmt: skip
        pytest.skip("needs a CUDA GPU or the simulator (tests/simulator/README.md)")
    import workspaces
    from sagebwd.core import forms, ops

    operation = forms.operation
    monkeypatch.setattr(torch.Tensor, "new_empty", workspaces.aligned(torch.Tensor.new_empty))
    monkeypatch.setattr(ops, "DEVICES", ("cpu", "meta"))
    monkeypatch.setattr(forms, "_forms", {})
    monkeypatch.setattr(forms, "operation", lambda device, *told, **of: operation(0, *told, **of))
    monkeypatch.setattr(forms, "stream_of", lambda device: 0)
    return "cpu"


@pytest.fixture
def tokens(device):
    """Chooses between numbers of tokens: tokens(on_a_gpu, on_the_simulator)."""
    return lambda *numbers: numbers[device == "cpu"]


@pytest.fixture
def imported(request, device, monkeypatch):
    """Imports a module of the trainer: imported(name, bare=packages, missing=packages) as
    `checkouts.Finder` says, and everything else as the trainer would."""
    name = trainer_of(request.path)
    packages = checkouts.TRAINERS[name].packages(name)
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(packages))

    def load(module, bare=(), missing=()):
        finder = checkouts.Finder(packages, bare, missing)
        monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
        return importlib.import_module(module)

    yield load
    tops = {path.stem for path in packages.iterdir()}
    for module in set(sys.modules) - before:
        loader = getattr(getattr(sys.modules[module], "__spec__", None), "loader", None)
        if isinstance(loader, checkouts.Finder) or module.partition(".")[0] in tops:
            del sys.modules[module]


@pytest.fixture
def registry(device):
    """PyTorch's registry of attention implementations, as it is behind the test, too."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.nn.attention, "activate_flash_attention_impl"):
        pytest.skip("needs PyTorch 2.11, whose registry the recipe is for")
    from sagebwd.integrations import _operators

    on_cpu = _operators.Active("CPU") if device == "cpu" else None
    yield
    torch.nn.attention.restore_flash_attention_impl()
    if on_cpu:
        on_cpu.remove()


@pytest.fixture
def page():
    """Python blocks of a page about a trainer, which is where readers take them from."""
    from documents import blocks_of

    def blocks(name):
        text = (ROOT / f"docs/use/trainers/{name}.md").read_text()
        return [block.text for block in blocks_of(name, text) if block.language == "python"]

    return blocks
