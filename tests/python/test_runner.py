"""The runner of arms: which processes there are, and what happens where one ends."""

import os
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from experiments import runner  # noqa: E402


def work(pipe):
    """A process that ends at one of its tasks, and fails at another."""

    def do(task, tell):
        if task.name == "ends":
            os._exit(1)
        tell(task.name)
        return 1 // (task.name != "fails")

    runner.do_tasks(pipe, do)


@pytest.mark.usefixtures("forked_workers")
def test_a_task_whose_process_ends_has_failed_and_others_are_done():
    tasks = [SimpleNamespace(name=name) for name in ("first", "ends", "fails", "last")]
    heard = []
    runner.perform(work, (), [None], lambda: tasks.pop(0) if tasks else None,
                   lambda task, *found: heard.append((task.name, *found)))  # fmt: skip
    assert heard == [
        ("first", True, 1), ("ends", False, "the process ended"),
        ("fails", False, "ZeroDivisionError: integer division or modulo by zero"),
        ("last", True, 1)]  # fmt: skip


def test_an_error_of_who_listens_leaves_no_process():
    def heard(*told):
        raise ValueError("enough")

    started, before = [], runner.Worker.start
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError, match="enough"):
        patch.setattr(runner.Worker, "start",
                      lambda worker, task: started.append(worker) or before(worker, task))
        runner.perform(work, (), [None], lambda: SimpleNamespace(name="first"), heard)
    (worker,) = started
    worker.process.join(60)
    assert worker.process.exitcode < 0


def test_gpus_of_processes(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert runner.gpus_of("cpu", 2) == [None, None]
    assert runner.gpus_of("cuda", 2) == ["0", "1"]
    assert runner.gpus_of("cuda:2", 1) == [None]  # the process sees all, and takes that one
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    assert runner.gpus_of("cuda", 2) == ["4", "6"]
    for given, said in ((("cuda", 4), "--gpus 4: this machine has 3"), (("cpu", 0), "at least 1"),
                        (("cuda:0", 2), "--gpus 2 takes GPUs from the first one on")):
        with pytest.raises(ValueError, match=said):
            runner.gpus_of(*given)
