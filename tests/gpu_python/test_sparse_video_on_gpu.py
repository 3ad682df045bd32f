"""Steps of the experiment with SLA2 as CUDA graphs, against the same without."""

from dataclasses import replace

import pytest
from inputs import torch

from experiments.sparse_plan import TOY, Run
from experiments.sparse_train import Workplace

CONFIG = replace(TOY, frames=4, size=32, dim=128, head_dim=64, block_size=(128, 64),
                 densities=(0.5,), steps=7, evals=2, how="int8", toy=False)  # fmt: skip


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("arm", ["a", "b", "c", "e", "g", "h-head", "h-estimated", "i", "j"])
def test_a_graph_of_a_step_trains_as_its_kernels_do(arm, compile, monkeypatch):
    config = replace(CONFIG, compile=compile)
    place = Workplace(config, torch.device("cuda"), lambda *told: None)
    dense, given = place.model(), Run(arm, 0.0 if arm in "ac" else 0.5, 0)
    torch.nn.init.normal_(dense.last.weight, std=0.1)  # a new model predicts zero
    stepper, losses = place.stepper, {True: [], False: []}

    def watched(model, optimizer, graphed):
        train = stepper(model, optimizer, graphed=wanted)
        return lambda *batch: losses[wanted].append(float(train(*batch)))

    monkeypatch.setattr(place, "stepper", watched)
    final = {}
    for wanted in (False, True):
        torch.manual_seed(1)
        routers = [place.attention("e", 0.5, i).router.state_dict() for i in range(CONFIG.layers)]
        modules = place.arm_modules(given, dense, routers)
        final[wanted] = place.run(given, dense, modules, CONFIG.steps)["final"]
    assert len(set(losses[True])) == CONFIG.steps
    assert losses[True] == pytest.approx(losses[False], rel=2e-4)
    assert final[True] == pytest.approx(final[False], rel=2e-4)


def test_a_graph_reads_the_rate_of_each_step():
    place = Workplace(CONFIG, torch.device("cuda"), lambda *told: None)
    model = place.model()
    optimizer = place.optimizer(model.parameters(), 1e-3, 0.0)
    train = place.stepper(model, optimizer)
    changed = []
    for step, rate in enumerate((1e-3, 1e-3, 1e-3, 1e-3, 0.0, 1e-3)):
        place.set_rate(optimizer, rate)
        before = model.last.weight.detach().clone()
        train(0, step)
        changed.append(not torch.equal(before, model.last.weight))
    assert changed == [True, True, True, True, False, True]
