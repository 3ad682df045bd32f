"""Masks that are drawn, as text and as pictures."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import sagebwd  # noqa: E402
from sagebwd import masks  # noqa: E402


def drawn(capsys, *given, **named):
    assert masks.show(*given, **named) is None
    head, *lines = capsys.readouterr().out.splitlines()
    return head, lines


def test_small_masks_have_each_token(capsys):
    head, lines = drawn(capsys, masks.documents(lengths=[2, 1]))
    assert head == "3 queries (down) x 3 keys; a cell is 1 x 1"
    assert lines == ["██", "████", "    ██"]


@pytest.mark.parametrize("mask", [
    masks.documents([0, 4], causal=True), "q >= k", lambda b, h, q, k: q >= k,
    masks.trace_mask("q >= k"), torch.ones(4, 4).bool().tril(),
    torch.ones(2, 1, 4, 4).bool().tril(),
])  # fmt: skip
def test_every_kind_of_mask_is_drawn(capsys, mask):
    sizes = {} if isinstance(mask, (masks.Intervals, torch.Tensor)) else {"queries": 4}
    _, lines = drawn(capsys, mask, batch=1, **sizes)
    assert lines == ["██", "████", "██████", "████████"]


def test_cells_are_as_dark_as_they_are_full(capsys):
    head, lines = drawn(capsys, torch.ones(64, 64).bool().tril(), width=8)
    assert head == "64 queries (down) x 64 keys; a cell is 16 x 8"
    assert lines == ["▓░", "██▓░", "████▓░", "██████▓░"]
    dense = torch.ones(16, 8).bool()
    for seen, shade in ((0, ""), (1, "░"), (42, "░"), (43, "▒"), (85, "▒"), (86, "▓"), (127, "▓"),
                        (128, "█")):  # fmt: skip
        dense = (torch.arange(128) < seen).view(16, 8)
        _, lines = drawn(capsys, torch.cat([dense] * 8, 1), width=8)
        assert lines == [shade * 8], seen


def test_sizes_that_differ(capsys):
    head, lines = drawn(capsys, "q < k", queries=2, keys=5)
    assert head.startswith("2 queries (down) x 5 keys") and lines == ["  ████████", "    ██████"]
    _, lines = drawn(capsys, masks.padding([2], 3, queries=2), queries=2)
    assert lines == ["████", "████"]
    _, lines = drawn(capsys, "q < k", queries=5, keys=7, width=3)  # the last cells are smaller
    assert lines == ["░▓█"] and drawn(capsys, "k < 7", queries=5, keys=7, width=3)[1] == ["███"]


def test_one_of_a_batch_and_of_heads(capsys):
    made = masks.documents(lengths=[[2, 1], [1, 2]])
    assert drawn(capsys, made, batch=1, head=7)[1] == ["██", "  ██", "  ████"]
    doc = masks.operand("doc", torch.tensor([[0, 0, 0], [0, 0, 1]]))
    both = drawn(capsys, lambda b, h, q, k: (doc[b, q] == doc[b, k]) & (h == 2), batch=1, head=2,
                 keys=3)  # fmt: skip
    assert both[1] == ["████", "████", "    ██"]
    _, lines = drawn(capsys, "doc[q] == k", queries=2, operands={"doc": torch.tensor([1, 0])})
    assert lines == ["  ██", "██"]


@pytest.mark.parametrize("given, named, told", [
    (("q < k",), {}, "no sizes of its own: pass queries="), ((3,), {}, "mask is an int; pass"),
    ((masks.trace_score("s * 2"),), {"queries": 3}, "is a score function: pass a mask"),
    ((torch.ones(3, 3),), {}, r"\(3, 3\) torch.float32; pass torch.bool"),
    ((torch.ones(3).bool(),), {}, r"mask is \(3,\)"),
    ((torch.ones(3, 3).bool(),), {"keys": 4}, "keys=4, and the mask has 3: leave keys= out"),
    ((torch.ones(2, 1, 3, 3).bool(),), {"batch": 2}, "batch=2: the mask has 2"),
    (("q < k",), {"queries": 3, "head": -1}, "head=-1"), (("q <",), {"queries": 3}, "column 4"),
    (("q < k",), {"queries": 3, "width": 1}, "width=1: pass a whole number of at least 2"),
    (("d[q] < k",), {"queries": 3}, "no tensor 'd': pass it in operands="),
])  # fmt: skip
def test_what_show_refuses(given, named, told):
    with pytest.raises(sagebwd.SpecError, match=told):
        masks.show(*given, **named)


def test_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    from matplotlib import image

    path = tmp_path / "mask.png"
    masks.show(masks.documents([0, 3000]), path)
    assert not capsys.readouterr().out
    pixels = image.imread(path)[..., :3].mean(-1)
    tall, wide = pixels.shape
    assert pixels[tall // 4, wide * 3 // 4] > 0.9 > 0.3 > pixels[tall * 3 // 4, wide // 4]
    for wrong, told in (("mask", "no name of a picture"), ("mask.txt", "ends in .png")):
        with pytest.raises(ValueError, match=told):
            masks.show("q < k", tmp_path / wrong, queries=3)


def test_a_picture_without_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"needs matplotlib .*pip install matplotlib, or leave"):
        masks.show("q < k", "mask.png", queries=3)


def test_without_pytorch_importing_says_what_is_missing():
    code = "import sys; sys.modules['torch'] = None; import sagebwd.masks"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: sagebwd.masks needs torch 2.6 or newer" in result.stderr


def test_every_public_name_is_there_and_documented():
    for name in masks.__all__:
        assert getattr(masks, name).__doc__, name


# ---- the page about masks ------------------------------------------------------------------------

ROOT = Path(__file__).resolve().parents[2]
SPEC = importlib.util.spec_from_file_location("examples", ROOT / "docs/_site/mask_examples.py")
SPEC.loader.exec_module(examples := importlib.util.module_from_spec(SPEC))


@pytest.mark.parametrize("call", examples.MASKS)
def test_the_page_draws_what_its_calls_make(call):
    tokens, sees = examples.TOKENS, examples.MASKS[call]
    expected = torch.tensor([[bool(sees(q, k)) for k in range(tokens)] for q in range(tokens)])
    assert torch.equal(eval(f"masks.{call}").dense(tokens)[0, 0], expected)


def test_the_page_and_its_picture_have_every_function_that_makes_intervals():
    makers = {name for name in masks.__all__ if getattr(masks, name).__module__.rpartition(".")[2]
              in ("making", "trees")}  # fmt: skip
    assert {call.partition("(")[0] for call in examples.MASKS} == makers and len(makers) == 7
    page = (ROOT / "docs/use/masks.md").read_text()
    for call in examples.MASKS:
        assert f"`{call}`" in page or call == "window_and_global(16, 3)", call


def test_the_page_shows_what_show_prints(capsys):
    page = (ROOT / "docs/use/masks.md").read_text()
    call, _, printed = page.partition("\nmasks.show(")[2].partition("\n```\n\n```text\n")
    eval(f"masks.show({call}")
    assert capsys.readouterr().out == printed.partition("```")[0]
