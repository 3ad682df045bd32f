"""sagebwd.Monitor's records: their steps, where they go, its state, and ranks."""

import copy
import json
import threading
from itertools import pairwise

import pytest

import sagebwd

torch = pytest.importorskip("torch", reason="needs PyTorch")

from stand_in import kernels_on_the_cpu  # noqa: E402
from test_monitor import Model, make, run, trained  # noqa: E402
from test_monitor_reports import nobody_watches_afterwards  # noqa: E402, F401

pytestmark = [pytest.mark.usefixtures("tiny_tensors", "kernels_on_the_cpu"),
              pytest.mark.filterwarnings("error::sagebwd.MonitorWarning")]  # fmt: skip


def test_steps_count_from_one_where_each_has_several_passes():
    inputs, dout = make()
    with sagebwd.Monitor(every=2) as monitor:
        for _ in range(4):
            for _ in range(3):
                run(inputs, dout)
            monitor.step()
    assert monitor.records[-1]["step"] <= 4


def test_accumulated_gradients():
    inputs, dout = make()
    with sagebwd.Monitor(every=10) as monitor:
        for step in range(1, 21):
            for _ in range(3):
                run(inputs, dout)
            monitor.step(step)
    assert [r["step"] for r in monitor.records] == [1, 11]


def test_records_have_the_number_of_their_own_step(tmp_path):
    (q, k, v), dout = make()
    path = tmp_path / "errors.jsonl"

    def written():
        return [json.loads(line) for line in path.read_text().splitlines()]

    unlimited = dict.fromkeys(("O", "dQ", "dK", "dV", "dS", "logit_range"))
    with sagebwd.Monitor(every=1, to=path, thresholds=unlimited) as monitor:
        monitor.step(0)
        for step in range(1, 4):
            for _ in range(2):
                run((q * 3**step, k, v), dout)
            assert len(monitor.records) == step - 1
            monitor.step(100 * step)
        run((q * 3**4, k, v), dout)
        assert monitor.latest["step"] == 301  # it has not ended
    logits = [r["max_logit"] for r in written()]
    assert [r["step"] for r in written()] == [100, 200, 300, 301]
    assert all(later > earlier for earlier, later in pairwise(logits))


class Writer:
    def __init__(self):
        self.rows = []

    def add_scalar(self, name, value, step):
        self.rows.append((name, value, step))


def test_records_go_where_they_shall(tmp_path):
    path, writer, plain = tmp_path / "errors.{rank}.jsonl", Writer(), []
    with sagebwd.Monitor(every=2, to=[str(path), writer, plain.append]) as monitor:
        for _ in range(3):
            run(*make())
    lines = [json.loads(line) for line in (tmp_path / "errors.0.jsonl").read_text().splitlines()]
    assert lines == list(monitor.records) and [r["step"] for r in lines] == [1, 3]
    assert ("sagebwd/dQ", lines[1]["dQ"], 3) in writer.rows and len(writer.rows) == 2 * 12
    assert plain[0]["sagebwd/O"] == lines[0]["O"] and plain[1]["sagebwd/step"] == 3
    assert all(isinstance(x, (int, float)) for x in plain[0].values())


def test_a_path_stays_where_it_was_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sub").mkdir()
    with sagebwd.Monitor(every=1, to="errors.jsonl"):
        run(*make())
        monkeypatch.chdir(tmp_path / "sub")
        run(*make())
    assert len((tmp_path / "errors.jsonl").read_text().splitlines()) == 2
    assert not list((tmp_path / "sub").iterdir())


def test_a_logger_that_fails_does_not_end_training():
    def fail(record):
        raise OSError("the disk is full")

    with pytest.warns(sagebwd.MonitorWarning, match="OSError: the disk is full"):
        with sagebwd.Monitor(to=fail) as monitor:
            run(*make())
    assert monitor.latest


def test_a_logger_may_call_attention_here_and_in_a_thread():
    """A call of the logger is no step, and threads that it waits for may be training."""
    steps, waited = [], []

    def log(record):
        steps.append(record["sagebwd/step"])
        with torch.enable_grad():
            run(*make())
        thread = threading.Thread(target=run, args=make(), daemon=True)
        thread.start()
        thread.join(20)
        waited.append(thread.is_alive())

    with sagebwd.Monitor(every=2, to=log) as monitor:
        for _ in range(2):
            run(*make())
    assert steps[0] == 1 and not any(waited)
    assert steps == [record["step"] for record in monitor.records]


def test_infinite_figures_are_json(tmp_path):
    inputs, dout = make()
    dout[:, :, 3] = torch.nan
    with pytest.warns(sagebwd.MonitorWarning):
        with sagebwd.Monitor(to=tmp_path / "a.jsonl"):
            run(inputs, dout)
    record = json.loads((tmp_path / "a.jsonl").read_text(), parse_constant=pytest.fail)
    assert record["dQ"] == "nan"


def test_the_table():
    model = Model()
    with sagebwd.Monitor(every=1) as monitor:
        trained(model, steps=4)
        table = monitor.table()
    assert [(r["call"], r["step"]) for r in table] == [(0, 3), (1, 2), (2, 4)]
    head, *lines = str(table).splitlines()
    assert head.split()[:5] == ["step", "call", "seq.", "heads", "O"] and len(lines) == 3
    assert lines[2].split()[:2] == ["4", "2/3"] and f"{table[2]['dQ']:.4f}" in lines[2]


def test_start_stop_and_state():
    inputs, dout = make()

    def heads(monitor, steps):
        monitor.start()
        for _ in range(steps):
            run(inputs, dout)
        monitor.stop()
        return [(r["step"], r["sequence"], r["head"]) for r in monitor.records]

    whole = heads(sagebwd.Monitor(every=2, seed=5), 24)
    first = sagebwd.Monitor(every=2, seed=5)
    heads(first, 11)
    state = json.loads(json.dumps(first.state_dict()))
    second = sagebwd.Monitor(every=2, seed=6)
    second.load_state_dict(state)
    assert heads(second, 13) == whole and len(set(whole)) == 12
    assert len({w[1:] for w in whole}) == 4  # every sequence and key head
    assert heads(first, 13) == whole  # start() goes on
    run(inputs, dout)
    assert len(first.records) == 12


def test_a_monitor_within_itself():
    inputs, dout = make()
    with sagebwd.Monitor(every=1) as monitor:
        with monitor:
            run(inputs, dout)
        run(inputs, dout)
    run(inputs, dout)
    assert [r["step"] for r in monitor.records] == [1, 2]


def test_warnings_are_not_repeated_after_resuming():
    limits = {"O": 0.0}
    with pytest.warns(sagebwd.MonitorWarning):
        with sagebwd.Monitor(every=1, thresholds=limits) as first:
            run(*make())
    second = sagebwd.Monitor(every=1, thresholds=limits)
    second.load_state_dict(first.state_dict())
    with second:
        run(*make())


@pytest.mark.parametrize(("given", "error", "text"), [
    (dict(every=0), sagebwd.SpecError, "every=0"),
    (dict(every=True), TypeError, "every=True"),
    (dict(thresholds={"dO": 1}), sagebwd.SpecError, "'dO'; there are O, dS"),
    (dict(thresholds={"O": "1"}), sagebwd.SpecError, "a number of at least 0"),
    (dict(thresholds=0.1), TypeError, "a float; pass a dict"),
    (dict(to=3), TypeError, "add_scalar"),
    (dict(to="/nowhere/a.jsonl"), FileNotFoundError,
     "to='/nowhere/a.jsonl' cannot be written: there is no folder '/nowhere'; make it first"),
    (dict(to=["/"]), IsADirectoryError, "to='/' cannot be written: it is a folder. Pass a file"),
    (dict(to=__file__ + "/a"), NotADirectoryError, "cannot be written: there is no folder"),
    (dict(to="a\0b"), sagebwd.SpecError, "cannot be written: embedded null byte"),
    (dict(model_or_calls=3), TypeError, "torch.nn.Module"),
    (dict(model_or_calls=[]), TypeError, "torch.nn.Module"),
    (dict(model_or_calls=torch.nn.Linear), TypeError, "is the class Linear; pass a torch.nn.M"),
    (dict(model_or_calls=lambda: True), TypeError, "does not take one argument"),
])  # fmt: skip
def test_wrong_arguments(given, error, text):
    with pytest.raises(error, match=text):
        sagebwd.Monitor(**given)


@pytest.mark.parametrize(("change", "error", "text"), [
    (lambda state: {}, sagebwd.SpecError, "no 'steps', .*'due': pass what Monitor.state_dict"),
    (lambda state: None, TypeError, "state is a NoneType; pass what Monitor.state_dict"),
    (lambda state: state | {"steps": "9"}, TypeError, r"state\['steps'\] is a str: pass what"),
    (lambda state: state | {"records": {}}, sagebwd.SpecError, r"state\['records'\] is a dict"),
    (lambda state: state | {"records": [1]}, sagebwd.SpecError, "has 1, which is no record"),
    (lambda state: state | {"steps": -4}, sagebwd.SpecError, r"state\['steps'\] is -4: pass what"),
    (lambda state: state | {"calls": True}, sagebwd.SpecError, r"state\['calls'\] is True: pass"),
    (lambda state: state | {"random": [3, [1], None]}, sagebwd.SpecError, "is of no generator"),
    (lambda state: state | {"random": [3]}, sagebwd.SpecError, "is of no generator"),
])  # fmt: skip
def test_what_is_no_state_changes_nothing(change, error, text):
    monitor = sagebwd.Monitor(seed=5)
    before = monitor.state_dict()
    with pytest.raises(error, match=text):
        monitor.load_state_dict(change(sagebwd.Monitor(seed=6).state_dict()))
    assert monitor.state_dict() == before


def watched_on_a_rank(rank, path):
    """Whether a model that ranks share trains as without a watcher."""
    with pytest.MonkeyPatch.context() as patch:
        kernels = kernels_on_the_cpu
        (getattr(kernels, "__wrapped__", None) or kernels._get_wrapped_function())(patch)

        def parameters(watch):
            model = torch.nn.parallel.DistributedDataParallel(Model())
            if not watch:
                return trained(model)
            with sagebwd.Monitor(model, every=1, to=path):
                return trained(model)

        return all(map(torch.equal, parameters(False), parameters(True)))


def test_ranks_draw_heads_of_their_own(tmp_path):
    ranks_of = pytest.importorskip("distributed_ranks", reason="needs torch.distributed")
    path = str(tmp_path / "{rank}.jsonl")
    assert ranks_of.run(tmp_path, 2, watched_on_a_rank, path) == [True, True]
    drawn = []
    for rank in range(2):
        lines = (tmp_path / f"{rank}.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        assert [(r["rank"], r["step"]) for r in records] == [(rank, s) for s in (1, 2, 3, 4)]
        drawn.append([(r["sequence"], r["head"]) for r in records])
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize("how", ["deepcopy", "torch.save", "an average of weights"])
def test_a_model_that_is_watched_can_be_copied_and_saved(how, tmp_path):
    """The copy is another model, whose calls are not seen."""
    model, x = Model(layers=1), torch.randn(2, 24, 64, requires_grad=True)
    with sagebwd.Monitor(model, every=1) as monitor:
        model(x).sum().backward()
        if how == "torch.save":
            torch.save(model, tmp_path / "model.pt")
            other = torch.load(tmp_path / "model.pt", weights_only=False)
        elif how == "deepcopy":
            other = copy.deepcopy(model)
        else:
            other = torch.optim.swa_utils.AveragedModel(model)
        assert torch.equal(other(x[:, :16]), model(x[:, :16]))
        other(x[:, :8]).sum().backward()
        model(x).sum().backward()
    assert [r["queries"] for r in monitor.records] == [24, 24]
