"""Every door in compiled and exported code, and the texts of what the device checks there.

On a GPU PyTorch refuses texts of more than 254 bytes; on a CPU, where these tests run, it takes any.
"""

import ast
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import compiled_doors as doors  # noqa: E402
from stand_in import kernels_on_the_cpu, listed_kernels_on_the_cpu  # noqa: E402, F401
from torch._dynamo.backends.common import aot_autograd  # noqa: E402

import sagebwd  # noqa: E402
from sagebwd.integrations import _device_checks  # noqa: E402

pytestmark = pytest.mark.usefixtures("kernels_on_the_cpu", "listed_kernels_on_the_cpu",
                                     "tiny_tensors")  # fmt: skip
MOST = 254


def texts_in(graph):
    """Those of all calls in a graph, of whatever checks something on a device."""
    for node in graph.nodes:
        if node.op == "call_function" and "assert" in str(node.target):
            yield from (x for x in (*node.args, *node.kwargs.values()) if isinstance(x, str))


class Reader:
    """A backend that keeps the texts of the graphs that Dynamo makes, and of those that AOTAutograd
    hands on and, if that is asked for, from which Inductor is about to generate code: of one graph,
    as Dynamo takes longer than both. AOTAutograd's gives the results."""

    def __init__(self, inductor=False):
        self.inductor, self.of_dynamo, self.handed_on, self.generated = inductor, [], [], []

    def _into(self, texts):
        def read(graph, *given, **more):
            texts.extend(texts_in(graph.graph))
            return graph.forward

        return read

    def __call__(self, graph, given):
        self.of_dynamo += texts_in(graph.graph)
        of_aot = aot_autograd(fw_compiler=self._into(self.handed_on))(graph, given)
        if not self.inductor:
            return of_aot
        from torch._inductor.compile_fx import compile_fx

        of_inductor = compile_fx(graph, given, inner_compile=self._into(self.generated))

        def both(*given):
            """The backward's graph, too, may be made as it first runs."""
            copies = [x.detach().requires_grad_(x.requires_grad) if isinstance(x, torch.Tensor)
                      else x for x in given]  # fmt: skip
            torch.autograd.backward([x.sum() for x in of_inductor(*copies) if x.requires_grad])
            return of_aot(*given)

        return both

    def assert_short(self, some=False):
        """`some`: that there are any. Some versions drop the text of checks that reach Inductor."""
        assert not some or (self.of_dynamo and self.handed_on)
        assert_short(self.of_dynamo + self.handed_on + self.generated)


def assert_short(texts):
    assert all(len(text.encode()) <= MOST for text in texts), texts


@doors.each
def test_compiled_as_eager_with_something_hidden(door):
    doors.need(door)
    checked = door in doors.CHECKED
    reader = Reader(inductor=checked or door in doors.OF_OTHER_OPERATORS)
    doors.assert_as_eager(door, "cpu", True, reader)
    reader.assert_short(some=checked)
    assert checked or not reader.of_dynamo  # so that Inductor has none, too


@pytest.mark.parametrize("door", doors.OTHER_IF_ALL, ids=lambda door: door.__name__)
def test_compiled_as_eager_with_nothing_hidden(door):
    doors.need(door)
    reader = Reader()
    doors.assert_as_eager(door, "cpu", False, reader)
    reader.assert_short()


@doors.each
def test_texts_of_exported_doors(door):
    doors.need(door)
    told = doors.Hidden("cpu")

    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return door(q, k, v, True, told)

    given = tuple(t.detach() for t in doors.inputs("cpu"))
    with doors.context_of(door):
        exported = torch.export.export(Model(), given, strict=False)
    texts = list(texts_in(exported.graph))
    assert texts or door not in doors.CHECKED
    assert_short(texts)


@pytest.mark.parametrize("mask", ["holes", "pairs", "added"])
def test_texts_under_vmap(mask):
    """Whose elements share a mask."""
    given, told, reader = doors.inputs("cpu"), doors.Hidden("cpu"), Reader()
    many = [torch.stack([t.detach(), t.detach().roll(1)]) for t in given]
    mask = getattr(told, mask)

    def mapped(q, k, v):
        return torch.func.vmap(
            lambda *qkv: sagebwd.scaled_dot_product_attention(*qkv, attn_mask=mask))(q, k, v)

    torch._dynamo.reset()
    found = torch.compile(mapped, fullgraph=True, backend=reader)(*many)
    assert torch.equal(found, mapped(*many))
    reader.assert_short(some=True)


def test_a_long_text_is_refused_wherever_it_is():
    """So that a CPU shows what would stop a GPU, in compiled code too."""

    def check(x, count):
        _device_checks.require(x.all(), "x" * count)
        return x + 1

    x = torch.ones(3)
    _device_checks.require((x == 1).all(), "x" * MOST)
    compiled = torch.compile(check, backend="eager", fullgraph=True)
    compiled(x, MOST)
    with pytest.raises(ValueError, match="at most 254 of ASCII"):
        check(x, MOST + 1)
    with pytest.raises(ValueError, match="at most 254 of ASCII"):
        _device_checks.require(x.all(), "é")
    with pytest.raises(Exception, match="at most 254 of ASCII"):
        compiled(x, MOST + 1)
    with pytest.raises(RuntimeError, match="what is wrong"):
        _device_checks.require((x == 2).all(), "what is wrong")


def test_no_other_file_has_the_device_check():
    root = Path(sagebwd.__file__).parent
    found = set()
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "id", None))
            if isinstance(name, str) and "assert_async" in name:
                found.add(path.relative_to(root).as_posix())
    assert found == {"integrations/_device_checks.py"}
