"""What tests of the package share."""

import signal

import pytest


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
    from sagebwd.experiments.compiled import compiled

    made, compile = [], torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: made.append(function) or compile(
        function, backend="eager"))  # fmt: skip
    compiled.cache_clear()
    yield made
    compiled.cache_clear()


# A shell's background job ignores SIGINT, and so would the processes that tests send it to.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
