"""Copies of a monitor, and of a model that holds one: by copy, pickle, torch.save and averages."""

import copy
import json
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402, F401
from test_monitor import Model, nobody_watches_afterwards  # noqa: E402, F401

import sagebwd  # noqa: E402
from sagebwd.monitoring import monitor as module  # noqa: E402
from sagebwd.numerics import emulation  # noqa: E402

pytestmark = [pytest.mark.usefixtures("kernels_on_the_cpu", "tiny_tensors"),
              pytest.mark.filterwarnings("error::sagebwd.MonitorWarning")]  # fmt: skip


def through_a_file(x, path):
    torch.save(x, path / "saved.pt")
    return torch.load(path / "saved.pt", weights_only=False)


COPIES = {"copy": lambda x, path: copy.deepcopy(x),
          "pickle": lambda x, path: pickle.loads(pickle.dumps(x)),
          "file": through_a_file}  # fmt: skip
copied = pytest.mark.parametrize("how", COPIES)


class Holding(Model):
    """A model with a monitor of its own."""

    def __init__(self, **given):
        super().__init__(layers=1)
        self.monitor = sagebwd.Monitor(self, every=1, **given)


def step(model, tokens=24):
    model(torch.randn(2, tokens, 64, requires_grad=True)).sum().backward()


@copied
def test_a_model_that_holds_a_running_monitor(how, tmp_path):
    """The copy's monitor is of the copy, has not been started, and has the records until then."""
    model = Holding()
    with model.monitor:
        step(model)
        other = COPIES[how](model, tmp_path)
        step(other, 16)
        step(model)
    assert [r["queries"] for r in model.monitor.records] == [24, 24]
    assert [r["queries"] for r in other.monitor.records] == [24]
    with other.monitor:
        step(model, 40)
        step(other, 8)
    assert [r["queries"] for r in other.monitor.records] == [24, 8]
    assert [r["queries"] for r in model.monitor.records] == [24, 24]
    assert [r["step"] for r in other.monitor.records] == [1, 2]
    assert 0 < other.monitor.overhead < 1


def test_an_average_of_weights_of_a_model_that_holds_one():
    model = Holding()
    with model.monitor:
        average = torch.optim.swa_utils.AveragedModel(model)
        step(model)
        average.update_parameters(model)
        step(average, 16)
    assert [r["queries"] for r in model.monitor.records] == [24]


@copied
def test_a_copy_draws_the_same_heads(how, tmp_path):
    torch.manual_seed(0)
    monitor = sagebwd.Monitor(every=1, seed=3)
    other, drawn = COPIES[how](monitor, tmp_path), []
    for each in (monitor, other):
        model = Model(layers=1)
        with each:
            for _ in range(4):
                step(model)
        drawn.append([(r["sequence"], r["head"]) for r in each.records])
    assert drawn[0] == drawn[1]


@copied
def test_paths_are_kept(how, tmp_path):
    model = Holding(to=tmp_path / "records.jsonl")
    other = COPIES[how](model, tmp_path)
    for each in (model, other):
        with each.monitor:
            step(each)
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == 2


def said_in_a_step(monitor):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monitor:
            step(Model(layers=1))
    return " ".join(str(warning.message) for warning in caught)


@copied
def test_functions_are_shared_or_said_to_be_lost(how, tmp_path):
    """A file holds no lambda."""
    got, asked = [], []
    monitor = sagebwd.Monitor(lambda call: asked.append(call) or True, every=1,
                              to=lambda record: got.append(record))  # fmt: skip
    other = COPIES[how](monitor, tmp_path)
    said = said_in_a_step(other)
    if how == "copy":
        assert not said and len(got) == len(asked) == 1
        return
    assert "could not hold its model_or_calls (of type function)" in said and not other.records
    other = COPIES[how](sagebwd.Monitor(every=1, to=lambda record: got.append(record)), tmp_path)
    other = COPIES[how](other, tmp_path)  # what was lost can be saved again
    assert "could not hold its to (of type function)" in said_in_a_step(other)
    assert len(other.records) == 1 and not got


@copied
def test_functions_of_a_module_are_kept(how, tmp_path):
    other = COPIES[how](sagebwd.Monitor(every=1, to=[print, json.dumps]), tmp_path)
    with other:
        step(Model(layers=1))
    assert len(other.records) == 1


def test_a_copy_neither_logs_nor_warns_of_what_its_model_has_to_say():
    got = []
    monitor = sagebwd.Monitor(every=1, to=lambda record: got.append(record))
    with monitor:
        step(Model(layers=1))
        other = copy.deepcopy(monitor)
    assert len(got) == 1
    with other:
        pass
    assert len(got) == 1


def test_the_rank_is_that_of_the_start_and_not_of_when_it_was_made(monkeypatch, tmp_path):
    monitors = [sagebwd.Monitor(every=1, to=tmp_path / "{rank}.jsonl") for _ in range(2)]
    drawn = []
    for rank, monitor in enumerate(monitors):
        monkeypatch.setattr(module, "_rank", lambda: rank)  # noqa: B023
        model = Model(layers=1)
        with monitor:
            for _ in range(6):
                step(model)
        assert [r["rank"] for r in monitor.records] == [rank] * 6
        assert len((tmp_path / f"{rank}.jsonl").read_text().splitlines()) == 6
        drawn.append([(r["sequence"], r["head"]) for r in monitor.records])
        fresh = sagebwd.Monitor(every=1)
        with fresh:
            for _ in range(6):
                step(model)
        assert drawn[-1] == [(r["sequence"], r["head"]) for r in fresh.records]
    assert drawn[0] != drawn[1]


def test_a_default_device_loses_no_record():
    """'meta' stands in for 'cuda'."""
    inputs = [torch.randn(1, 2, 24, 64).bfloat16().requires_grad_() for _ in range(3)]
    with torch.device("meta"), sagebwd.Monitor(every=1) as monitor:
        emulation.emulated_attention(*inputs).float().sum().backward()
    assert len(monitor.records) == 1
