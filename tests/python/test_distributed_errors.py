"""Errors of `sagebwd.distributed`: the same on every rank, and no rank waits forever."""

import functools
import os
import re
import time

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("needs torch.distributed with gloo", allow_module_level=True)

import distributed_ranks as ranks_of  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd import distributed  # noqa: E402
from sagebwd.distributed import passes  # noqa: E402

pytestmark = pytest.mark.usefixtures("tiny_tensors")


def own_parts(mesh, method, **drawn):
    (q, k, v, _), _ = ranks_of.draw(**drawn)
    return [distributed.shard(t, mesh, dim=2, method=method).detach().requires_grad_()
            for t in (q, k, v)]  # fmt: skip


def said_by(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "no error"


def shorter(q, k, v):
    return q[:, :, :-1], k[:, :, :-1], v[:, :, :-1]


def of_channels(channels, of_v=None):
    def drawn(q, k, v):
        q, k, v = (torch.cat([t, t, t, t], -1)[..., :channels] for t in (q, k, v))
        return q, k, v[..., :of_v]

    return drawn


#: Each has the method, the ranks that are wrong, their change of q, k and v, their options, and
#: what all ranks say; with a further text rank 1 says that.
WRONG = {
    "heads": ("ulysses", (0, 1, 2), lambda q, k, v: (q[:, :4], k, v), {},
              "SpecError: 4 query heads cannot be shared by 3 ranks"),
    "windows": ("ring", (0, 1, 2), None, {"window_left": 8},
                "SpecError: window_left=8: a ring has no windows; pass method='ulysses'$"),
    "channels": ("ring", (0, 1, 2), of_channels(24), {}, "SpecError: head dimension 24 is not bu"),
    "channels of v": ("ring", (0, 1, 2), of_channels(64, 32), {},
                      "SpecError: value_dim = 32 with head_dim = 64 is not supported"),
    "negative scale": ("ring", (0, 1, 2), None, {"softmax_scale": -1.0, "precision": "qk16"},
                       "SpecError: softmax_scale = -1 is not supported under 'qk16'"),
    "meta": ("ring", (0, 1, 2), lambda *qkv: [t.to("meta") for t in qkv], {},
             "SpecError: q is on meta, .* call sagebwd.attention, which takes meta tensors"),
    "lengths": ("ring", (1,), shorter, {}, r"SpecError: the ranks have \[\[36\], \[31\], \[32\]\]"),
    "more queries": ("ring", (0, 1, 2), lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:]), {},
                     "SpecError: causal=True is ambiguous for 100 queries and 97 keys"),
    "queries and keys": (
        "ring", (0, 1, 2), lambda q, k, v: (q, k[:, :, 1:], v[:, :, 1:]), {"causal": "top-left"},
        "SpecError: 100 queries and 97 keys in all: a causal ring needs as many"),
    "dtype": ("ring", (1,), lambda *qkv: [t.half() for t in qkv], {},
              "SpecError: rank 0 has dtype = torch.bfloat16 and rank 1 torch.float16"),
    "shape": ("ulysses", (1,), of_channels(40), {},
              r"SpecError: rank 0 has batch, heads and channels = \[1, 6, 2, 32, 32\] and rank 1"),
    "option": ("ring", (1,), None, {"precision": "qk16"},
               "SpecError: rank 0 has options = precision=six-of-seven and rank 1 precision=qk16"),
    "gradient": ("ring", (1,), lambda *qkv: [t.detach() for t in qkv], {},
                 "SpecError: rank 0 has requires_grad = True and rank 1 False"),
    "scale": ("ring", (1,), None, {"softmax_scale": float("nan")},
              "SpecError: rank 1 could not go on: SpecError: softmax_scale=nan",
              "SpecError: softmax_scale=nan"),
    "type": ("ring", (1,), lambda q, k, v: (q, None, v), {},
             "RuntimeError: rank 1 could not go on: TypeError: k is a NoneType",
             "TypeError: k is a NoneType"),
}  # fmt: skip


def wrong_uses(rank):
    said = {}
    for what, (method, ranks, change, options, *_) in WRONG.items():
        mesh = ranks_of.mesh_of(method, 3)
        parts, chosen = own_parts(mesh, method, heads=6), {"causal": True}
        if rank in ranks:
            parts, chosen = change(*parts) if change else parts, chosen | options
        given = dict(mesh=mesh, method=method, **chosen)
        text = said_by(functools.partial(distributed.attention, *parts, **given))
        # Nothing is left over: the next call is right.
        out = distributed.attention(*own_parts(mesh, method, heads=6), mesh=mesh, method=method)
        said[what] = text, bool(out.isfinite().all())
    return said


@pytest.fixture(scope="module")
def said_of_wrong_uses(tmp_path_factory):
    return ranks_of.run(tmp_path_factory.mktemp("wrong"), 3, wrong_uses)


@pytest.mark.parametrize("what", WRONG)
def test_wrong_use_is_an_error_everywhere(what, said_of_wrong_uses):
    message, own = WRONG[what][4], WRONG[what][-1]
    for rank, of_rank in enumerate(said_of_wrong_uses):
        assert not isinstance(of_rank, str), of_rank
        said, is_right = of_rank[what]
        assert re.match(own if rank == 1 else message, said), (rank, said)
        assert is_right


FAILURES = [(method, pass_name, at_call) for method in ("ring", "ulysses", "both")
            for pass_name in ("forward", "backward") for at_call in (1, 2)
            if method != "ulysses" or at_call == 1]  # fmt: skip


def failing(rank):
    """Rank 1 fails in one of its passes; the next call is right."""
    said = []
    for method, pass_name, at_call in FAILURES:
        mesh = ranks_of.mesh_of(method, 4)
        original, calls = getattr(passes.Passes, pass_name), []

        def fails(self, *given):
            calls.append(1)  # noqa: B023
            if rank == 1 and len(calls) == at_call:  # noqa: B023
                raise MemoryError("no room")
            return original(self, *given)  # noqa: B023

        def call():
            parts = own_parts(mesh, method)  # noqa: B023
            out = distributed.attention(*parts, mesh=mesh, method=method, causal=True)  # noqa: B023
            out.sum().backward()

        setattr(passes.Passes, pass_name, fails)
        said.append((said_by(call), said_by(call)))
        setattr(passes.Passes, pass_name, original)
    return said


def test_a_rank_that_fails_fails_everywhere(tmp_path):
    for rank, said in enumerate(ranks_of.run(tmp_path, 4, failing)):
        assert not isinstance(said, str), said
        assert len(said) == len(FAILURES)
        own = "MemoryError: no room"
        expected = own if rank == 1 else f"RuntimeError: rank 1 could not go on: {own}"
        for failure, of_failure in zip(FAILURES, said):
            assert of_failure == (expected, "no error"), (rank, failure)


def ending(rank, when):
    """Rank 2 ends behind a call: before the next, while it computes, or it goes elsewhere."""
    mesh = ranks_of.mesh_of("ring", 3)
    parts = own_parts(mesh, "ring")
    if when != "at first":
        distributed.attention(*parts, mesh=mesh)
    if rank == 2:
        if when == "amid":
            passes.Passes.forward = lambda *given: os._exit(0)
        elif when == "elsewhere":
            time.sleep(9)
            return None
        else:
            os._exit(0)
    begin = time.monotonic()
    return said_by(lambda: distributed.attention(*parts, mesh=mesh)), time.monotonic() - begin


@pytest.mark.parametrize("when", ["at first", "before", "amid", "elsewhere"])
def test_a_rank_that_ended_is_an_error(when, tmp_path):
    results = ranks_of.run(tmp_path, 3, ending, when, timeout=6)
    for result in results[:2]:
        assert not isinstance(result, str), result
        said, seconds = result
        why = "" if when == "amid" else r"a rank of \[0, 1, 2\] cannot be reached"
        assert re.match(f"RuntimeError: {why}", said), said
        assert seconds < 25


def without_a_way(rank):
    mesh = ranks_of.mesh_of("ring", 2)
    parts = own_parts(mesh, "ring")
    os.environ["GLOO_SOCKET_IFNAME"] = "nothing0"
    try:
        return said_by(lambda: distributed.attention(*parts, mesh=mesh))
    finally:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def test_hosts_that_gloo_does_not_connect_are_no_ranks_that_ended(tmp_path):
    for said in ranks_of.run(tmp_path, 2, without_a_way):
        assert re.match(r"RuntimeError: ranks \[0, 1\] cannot connect over gloo.*nothing0.*"
                        "GLOO_SOCKET_IFNAME to the network interface", said), said  # fmt: skip


def with_a_default_device(rank):
    """The meta device stands in for 'cuda' here: its tensors are not those of gloo either."""
    mesh, found = ranks_of.mesh_of("ring", 2), []
    x = torch.arange(24.0).view(1, 2, 12, 1)
    for device in ("cpu", "meta"):
        parts = own_parts(mesh, "ring")
        with torch.device(device):
            out = distributed.attention(*parts, mesh=mesh, causal=True)
            own = distributed.shard(x, mesh, dim=2)
            whole = distributed.unshard(own, mesh, dim=2)
        gradients = torch.autograd.grad(out, parts, torch.ones_like(out))
        found.append([out.detach(), whole, *gradients])
    return found


def test_a_default_device_changes_nothing(tmp_path):
    for expected, found in ranks_of.run(tmp_path, 2, with_a_default_device):
        assert all(map(torch.equal, expected, found))


def test_another_error_of_an_exchange_names_itself(monkeypatch):
    from sagebwd.distributed import agreement

    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = ranks_of.mesh_of("ring", 1)

        def all_gather(*given, **named):
            raise RuntimeError("invalid tensor type")

        agreement.agree(mesh)
        monkeypatch.setattr(dist, "all_gather", all_gather)
        with pytest.raises(RuntimeError, match=r"ranks \[0\] could not tell .*: invalid tensor"):
            agreement.agree(mesh)
    finally:
        dist.destroy_process_group()


#: Errors that take more room than their characters do, and one that no encoding takes.
WORDY = ("\N{CJK UNIFIED IDEOGRAPH-5B57}" * 2000, "\x1b" * 2000, '"\\\n' * 900, "\udcff" * 2000,
         "\N{FIRE}" * 2000)  # fmt: skip


def failing_in_other_words(rank):
    mesh, said = ranks_of.mesh_of("ring", 2), []
    parts = own_parts(mesh, "ring")
    for words in WORDY:

        def fails(self, *given):
            raise MemoryError(words)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            if rank:
                patch.setattr(passes.Passes, "forward", fails)
            said.append(said_by(lambda: distributed.attention(*parts, mesh=mesh)))
    return said


def test_long_errors_reach_the_others(tmp_path):
    other, own = ranks_of.run(tmp_path, 2, failing_in_other_words)
    assert own == [f"MemoryError: {words}".replace("\n", " ") for words in WORDY]
    for said, words in zip(other, WORDY, strict=True):
        begin = "RuntimeError: rank 1 could not go on: MemoryError: "
        assert said.startswith(begin) and len(said) > 900, said[:200]
        if words[0].isprintable():
            assert said[len(begin) :][:100] == words[:100].replace("\n", " ")


def other_results(rank):
    """Rank 0 uses both results, the others one: the backward of which is another's."""
    mesh = ranks_of.mesh_of("ring", 2)
    leaves = [torch.ones(1, 2, 8, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    outs = [distributed.attention(x, x, x, mesh=mesh).sum() for x in leaves]
    return said_by((outs[0] if rank else outs[0] + outs[1]).backward)


def test_ranks_in_the_backwards_of_other_calls(tmp_path):
    """Rank 1 would take gradients of the second call for those of its first."""
    first, second = ranks_of.run(tmp_path, 2, other_results, timeout=6)
    expected = (r"SpecError: rank 0 is in the backward of attention's call 2, and rank 1 in the "
                r"backward of attention's call 1: .* adds 0 \* out.sum\(\)")  # fmt: skip
    assert re.match(expected, first) and first == second, (first, second)


def misuse(rank):
    """Most calls are wrong by themselves; in two the ranks call different functions."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = ranks_of.mesh_of("ring", 2)
    x = torch.zeros(1, 2, 3, 32)
    plane = ranks_of.init_device_mesh("cpu", (1, 2))
    q = torch.zeros(1, 2, 8, 32, dtype=torch.bfloat16, requires_grad=True)

    def attend(q):
        return distributed.attention(q, q, q, mesh=mesh)

    out, whole = attend(q), distribute_tensor(q.detach(), mesh, [Replicate()])
    calls = [
        lambda: distributed.shard(x, mesh, dim=2),
        lambda: distributed.shard(x, mesh, dim=4),
        lambda: distributed.shard([1], mesh, dim=0),
        lambda: distributed.shard(x, torch.distributed.group.WORLD, dim=1),
        lambda: distributed.shard(x, mesh, dim=2, method="zigzag"),
        lambda: distributed.shard(x, mesh, dim=2, method="both"),
        lambda: distributed.shard(x, plane, dim=2, method="ring"),
        lambda: distributed.unshard(x[:, :, : 2 + rank], mesh, dim=2),
        lambda: distributed.unshard(x[..., : 8 + rank], mesh, dim=2),
        lambda: distributed.attention(q, q, q, mesh=mesh, causl=True),
        lambda: distributed.attention(q[:, :, :0], q, q, mesh=mesh),
        lambda: distributed.attention(q.float(), q.float(), q.float(), mesh=mesh),
        lambda: distributed.attention(q, q, q, mesh=mesh, sink_logits=torch.zeros(3)),
        lambda: distributed.attention(q, q, q, mesh=mesh, layout="sbhd"),
        lambda: torch.func.grad(lambda q: attend(q).sum())(q.detach()),
        lambda: torch.func.vmap(attend)(q[None].detach()),
        lambda: torch.func.vmap(lambda x: distributed.unshard(x, mesh, dim=1))(x),
        lambda: torch.autograd.grad(attend(q), q, torch.stack([q.detach()] * 2),
                                    is_grads_batched=True),
        lambda: distributed.unshard(x.to("meta"), mesh, dim=2),
        lambda: distributed.attention(q[:0], q[:0], q[:0], mesh=mesh),
        lambda: distributed.shard(whole, mesh, dim=2),
        lambda: distributed.attention(whole, whole, whole, mesh=mesh),
        lambda: attend(q) if rank else distributed.unshard(x, mesh, dim=2),
        lambda: out.sum().backward(retain_graph=True) if rank else attend(q),
    ]  # fmt: skip
    said = [said_by(call) for call in calls]
    for method in ("ring", "ulysses"):  # a loss whose gradients do not depend on q
        out = distributed.attention(q, q, q, mesh=mesh, method=method)
        (grad,) = torch.autograd.grad(out.sum(), q, create_graph=True)
        said.append(said_by(grad.sum().backward))
    return said


def test_refusals_say_what_to_pass(tmp_path):
    wanted = [
        "SpecError: 3 tokens are too few for 2 ranks, which need 4",
        "SpecError: dim=4 is no dimension", "TypeError: x is a list",
        r"SpecError: mesh is a ProcessGroup\w*; pass a DeviceMesh",
        "SpecError: method='zigzag': pass one of",
        "SpecError: method='both' needs a mesh of 2 dimensions, .*: make one by init_device_mesh",
        r"SpecError: method='ring' needs a mesh of 1 dimension, .*mesh\['cp'\]",
        r"SpecError: the ranks have \[\[2\], \[3\]\] tokens of x",
        "SpecError: rank 0 has shape without tokens", "TypeError: .*causl.*causal",
        "SpecError: q has shape .* each rank needs tokens", "SpecError: q is torch.float32",
        "SpecError: sink_logits has shape", "SpecError: layout='sbhd'",
        *["SpecError: sagebwd.distributed has no rules for torch.func's transforms"] * 2,
        "SpecError: unshard has no rules for torch.func's transforms",
        "SpecError: a gradient is a batch", "SpecError: x is on meta, and the mesh is of cpu",
        "SpecError: q has shape .* the batch is empty",
        *[f"SpecError: {x} is a DTensor: call PyTorch's scaled_dot_product_attention under sagebwd"
          for x in "xq"],
        "SpecError: rank 0 is in unshard, and rank 1 in the forward of attention: all ranks",
        "SpecError: rank 0 is in the forward of attention, and rank 1 in the backward of att",
        *["NotImplementedError: this operation cannot be differentiated twice"] * 2,
    ]  # fmt: skip
    for said in ranks_of.run(tmp_path, 2, misuse):
        assert not isinstance(said, str), said
        assert len(said) == len(wanted)
        for text, pattern in zip(said, wanted):
            assert re.match(pattern, text), (pattern, text)


def in_context_parallel(rank):
    """A ring does not have what sdpa() is given here."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh, said = ranks_of.mesh_of("ring", 2), []
    for given in ({"window_left": 8}, {"window_left": 8, "window_right": 0},
                  {"sink_logits": torch.zeros(2)}, {"seqused_k": torch.zeros(1)}):  # fmt: skip
        q = torch.zeros(1, 2, 64, 32, dtype=torch.bfloat16)
        with context_parallel(mesh, buffers=[q], buffer_seq_dims=[2]), sagebwd.sdpa(**given):
            said.append(said_by(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q)))
    return said


def test_context_parallel_names_what_was_given(tmp_path):
    pytest.importorskip("torch.distributed.tensor.experimental")
    elsewhere = "to sagebwd.distributed.attention, outside context_parallel, for tensors that"
    name = r"TypeError: scaled_dot_product_attention\(\) takes for DTensors no"
    wanted = [
        f"SpecError: window_left=8: a ring has no windows; pass method='ulysses' {elsewhere}",
        "SpecError: window_left=8, window_right=0: a ring has no windows",
        f"{name} sink_logits: pass it {elsewhere}", f"{name} seqused_k: ranks share whole seq",
    ]  # fmt: skip
    for said in ranks_of.run(tmp_path, 2, in_context_parallel):
        assert not isinstance(said, str), said
        assert len(said) == len(wanted)
        for text, message in zip(wanted, said):
            assert re.match(text, message), message
