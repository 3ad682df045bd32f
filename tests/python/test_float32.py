"""PyTorch's settings of FP32 products: ours in a computation, and the user's again after it."""

import os
import threading

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
import sagebwd.nn  # noqa: E402
from sagebwd.numerics import emulation, float32  # noqa: E402

IS_NEW = hasattr(torch.backends, "fp32_precision")
needs_new = pytest.mark.skipif(not IS_NEW, reason="PyTorch's newer settings came with 2.9")

#: The newer settings lie at these places, each beside what stands above it.
PLACES = {"generic": "torch.backends", "cuda": "torch.backends.cuda.matmul",
          "mkldnn": "torch.backends.mkldnn.matmul"}  # fmt: skip
SETTINGS = {
    "nothing": (), "legacy": "high", "legacy, medium": "medium", "legacy, highest": "highest",
    **{f"{place} {value}": ((place, value),) for place, value in (
        ("cuda", "tf32"), ("generic", "tf32"), ("mkldnn", "bf16"), ("mkldnn", "tf32"),
        ("cuda", "ieee"), ("generic", "bf16"))},
    "cuda as generic": (("generic", "tf32"), ("cuda", "tf32")),
    "cuda apart": (("generic", "tf32"), ("cuda", "ieee")),
}  # fmt: skip


def place(name):
    found = torch
    for part in PLACES[name].split(".")[1:]:
        found = getattr(found, part)
    return found


@pytest.fixture(autouse=True)
def as_before():
    """Each test begins and ends with the settings of a new process."""

    def reset():
        torch.set_float32_matmul_precision("highest")
        for name in PLACES if IS_NEW else ():
            place(name).fp32_precision = "none"

    reset()
    yield
    reset()


def in_force():
    """This is what is said now, and what would be if the user now set that of all backends."""
    if not IS_NEW:
        return torch.get_float32_matmul_precision()
    names, of_all = ("cuda", "mkldnn"), torch.backends.fp32_precision
    said = [of_all]
    for value in (of_all, "tf32", "ieee", "none"):
        torch.backends.fp32_precision = value
        said += [place(name).fp32_precision for name in names]
    torch.backends.fp32_precision = of_all
    try:
        return [*said, torch.get_float32_matmul_precision(),
                torch.backends.cuda.matmul.allow_tf32]  # fmt: skip
    except RuntimeError as error:
        return [*said, type(error)]


def choose(setting):
    if isinstance(setting, str):
        torch.set_float32_matmul_precision(setting)
    for name, value in () if isinstance(setting, str) else setting:
        place(name).fp32_precision = value


def inputs():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(1, 2, 128, 64, generator=generator).bfloat16().requires_grad_()
            for _ in range(3)]  # fmt: skip


def layer():
    torch.manual_seed(0)
    return sagebwd.nn.SparseLinearAttention(64, 2, density=0.5, alpha="head", precision="exact")


def module(q, k, v):
    return layer()(q, k, v)


def stage_one(q, k, v):
    return layer().stage_one_loss(q, k, v) + 0 * (q.sum() + k.sum() + v.sum())


def calibrated(q, k, v):
    of = layer()
    of.calibrate_alpha(q.detach(), k.detach(), v.detach())
    return of(q, k, v) * of.alpha_logit.sum()


def emulated(q, k, v):
    return emulation.emulated_attention(q, k, v, causal=True)


DOORS = (module, stage_one, calibrated, emulated)


def results(door):
    given = inputs()
    out = door(*given)
    return out.detach(), *torch.autograd.grad(out.float().square().sum(), given)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    "name", [name if isinstance(setting, str) else pytest.param(name, marks=needs_new)
             for name, setting in SETTINGS.items()])  # fmt: skip
def test_each_setting_is_left_as_it_was_and_changes_nothing(door, name):
    expected = results(door)
    choose(SETTINGS[name])
    before = in_force()
    assert all(map(torch.equal, results(door), expected))
    assert in_force() == before


@pytest.mark.parametrize(
    "name", [name if isinstance(setting, str) else pytest.param(name, marks=needs_new)
             for name, setting in SETTINGS.items()])  # fmt: skip
def test_products_are_exact_inside(name):
    choose(SETTINGS[name])
    before = in_force()
    devices = [torch.device(kind) for kind in ("cuda", "cpu")]
    with emulation.full_precision(devices[1]):
        assert not any(map(float32.may_be_rounded, devices))
        if isinstance(SETTINGS[name], str):  # who asks as PyTorch's older way has it is answered
            assert torch.get_float32_matmul_precision() == "highest"
            assert torch.backends.cuda.matmul.allow_tf32 is False
        with emulation.full_precision(devices[0]):
            pass
        assert not any(map(float32.may_be_rounded, devices))
    assert in_force() == before


@needs_new
def test_a_monitor_knows_both_ways():
    from sagebwd.monitoring import sample

    assert not sample._may_be_tf32(torch.device("cuda"))
    torch.backends.fp32_precision = "tf32"
    assert sample._may_be_tf32(torch.device("cuda"))
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    assert not sample._may_be_tf32(torch.device("cuda"))


def test_compiled_code_is_not_compiled_again_after_a_call():
    """PyTorch guards these settings."""
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(lambda x: x * 2, backend=counter)
    for _ in range(2):
        compiled(torch.ones(3))
        results(emulated)
    assert counter.frame_count == 1


def test_what_is_set_meanwhile_stays():
    """By another thread, whose setting is newer than what we found."""
    choose("high")
    with emulation.full_precision(torch.device("cpu")):
        torch.set_float32_matmul_precision("medium")
        with emulation.full_precision(torch.device("cpu")):
            assert torch.get_float32_matmul_precision() == "highest"
    assert torch.get_float32_matmul_precision() == "medium"
    with emulation.full_precision(torch.device("cpu")):
        torch.set_float32_matmul_precision("high")
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("name", ["legacy", pytest.param("cuda as generic", marks=needs_new)])
def test_threads_leave_it_as_it_was_and_switch_off_none_that_is_in_use(name):
    """Two threads whose computations overlap, in the order that goes wrong without a count."""
    choose(SETTINGS[name])
    before, device = in_force(), torch.device("cpu")
    first_in, second_in, first_out = (threading.Event() for _ in range(3))
    rounded = []

    def first():
        with emulation.full_precision(device):
            first_in.set()
            assert second_in.wait(10)
        first_out.set()

    def second():
        assert first_in.wait(10)
        with emulation.full_precision(device):
            second_in.set()
            assert first_out.wait(10)
            rounded.append(float32.may_be_rounded(torch.device("cuda")))

    threads = [threading.Thread(target=of) for of in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rounded == [False] and in_force() == before


def test_many_threads_of_a_module():
    torch.set_float32_matmul_precision("high")
    of, given = layer(), [t.detach() for t in inputs()]

    def work():
        for _ in range(5):
            x = [t.clone().requires_grad_() for t in given]
            of(*x).float().sum().backward()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_knows_nothing_of_other_threads():
    """Which are not in it, and would never leave."""
    torch.set_float32_matmul_precision("high")
    inside, done = threading.Event(), threading.Event()

    def other():
        with emulation.full_precision(torch.device("cpu")):
            inside.set()
            done.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    child = os.fork()
    if not child:
        said = torch.get_float32_matmul_precision() == "high" and float32._count == 0
        if said and not os.fork():  # whose parent was forked itself
            os._exit(0 if torch.get_float32_matmul_precision() == "high" else 1)
        os._exit(0 if said and os.wait()[1] == 0 else 1)
    status = os.waitpid(child, 0)[1]
    done.set()
    thread.join()
    assert status == 0 and torch.get_float32_matmul_precision() == "high"


@needs_new
def test_contexts_of_two_threads_with_another_setting_between_them():
    """The second one finds what the first one has set, which is not the user's."""
    place("cuda").fp32_precision = "tf32"
    with float32.exact_products():
        place("mkldnn").fp32_precision = "bf16"
        with float32.exact_products():
            assert not any(float32.may_be_rounded(torch.device(d)) for d in ("cuda", "cpu"))
    assert place("cuda").fp32_precision == "tf32"
    assert place("mkldnn").fp32_precision == "bf16"
