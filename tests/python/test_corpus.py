"""The corpus of the experiments: which texts it takes, and that no run sees a token twice."""

import hashlib
import json
import os

import numpy as np
import pytest

from experiments import corpus
from experiments.data import Corpus

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa"]


def text_of(number, lines=20):
    return "".join(f"{WORDS[(number * 7 + i * 3) % 10]} {WORDS[(number + i) % 10]} line\n" * 2
                   + "x" * (number + 1) + "\n" for i in range(lines))  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    """Twenty texts."""
    (tmp_path / "texts/more").mkdir(parents=True)
    for number in range(20):
        (tmp_path / "texts" / ("more" if number % 2 else ".") / f"t{number}.py").write_text(
            text_of(number))  # fmt: skip
    return tmp_path / "texts"


def built(folder, *words, out="c.bin"):
    """Header and tokens."""
    path = folder.parent / out
    assert corpus.main([str(folder), "--out", str(path), *map(str, words)]) == 0
    return json.loads((folder.parent / f"{out}.json").read_text()), np.fromfile(path, np.uint16)


def refused(capsys, *words):
    """The one line of an error, of code 2."""
    with pytest.raises(SystemExit) as left:
        corpus.main([str(word) for word in words])
    assert left.value.code == 2
    return capsys.readouterr().err.strip()


def texts_in(tokens):
    """The texts that tokens of bytes are; each ends with 0."""
    assert tokens[-1] == 0 and tokens.max() < 256
    return [part.decode() for part in bytes(tokens.tolist()).split(b"\0")[:-1]]


def test_every_text_is_there_once_and_some_are_held_out(folder):
    header, tokens = built(folder, "--validation", "0.2")
    train, held_out = tokens[: header["train_tokens"]], tokens[header["train_tokens"] :]
    assert len(held_out) == header["validation_tokens"] > 0
    texts = texts_in(train) + texts_in(held_out)
    assert sorted(texts) == sorted(text_of(number) for number in range(20))
    assert not set(texts_in(train)) & set(texts_in(held_out))
    assert 1 <= len(texts_in(held_out)) == header["held_out"]["files"] <= 10
    assert header["sha256"] == hashlib.sha256(tokens.tobytes()).hexdigest()
    assert header["asked"]["folders"] == ["texts"] and str(folder.parent) not in json.dumps(header)
    assert header["train"]["bytes"] == len(train) - header["train"]["files"]


def test_the_same_files_and_seed_give_the_same_tokens(folder, tmp_path):
    one, tokens = built(folder)
    # Neither names nor places of files matter.
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for number, path in enumerate(sorted(folder.rglob("*.py"))):
        (moved / f"{100 - number}.md").write_text(path.read_text())
    assert np.array_equal(built(moved, out="d.bin")[1], tokens)
    other, others = built(folder, "--seed", "1", out="e.bin")
    assert other["sha256"] != one["sha256"] and len(others) == len(tokens)


def test_what_is_no_text_or_was_there_is_left_out(folder):
    (folder / "copy.py").write_text(text_of(3))
    (folder / "spaced.py").write_text(text_of(4).upper().replace(" ", "\t 12\n"))
    (folder / "short.py").write_text("a\n")
    (folder / "nul.txt").write_bytes(b"a line\n" * 40 + b"\0")
    (folder / "latin.txt").write_bytes(b"caf\xe9 and more\n" * 40)
    (folder / "data.txt").write_text("7" * 5000)
    (folder / "large.txt").write_text("a line of a text\n" * 70_000)
    (folder / "picture.png").write_bytes(b"text? no\n" * 40)
    (folder / ".hidden").mkdir()
    (folder / ".hidden/a.py").write_text(text_of(40))
    (folder / "link.py").symlink_to(folder / "t0.py")
    header, tokens = built(folder)
    left_out = {"duplicate": 1, "near duplicate": 1, "short": 1, "binary": 2, "long lines": 1,
                "long": 1}  # fmt: skip
    assert header["left_out"] == left_out and header["found_files"] == 20 + 7
    texts = texts_in(tokens)
    assert len(texts) == 20 and sum(text == text_of(3) for text in texts) == 1


def test_a_corpus_of_other_options_is_not_replaced(folder, capsys):
    one, _ = built(folder)
    assert built(folder)[0] == one
    out = folder.parent / "c.bin"
    for words in (("--seed", 1), ("--max-tokens", 3000), ("--suffixes", ".py")):
        said = refused(capsys, folder, "--out", out, *words)
        assert "c.bin is a corpus that was made with other options" in said
    (folder / "more").rename(folder.parent / "more")
    assert "other options" in refused(capsys, folder.parent / "more", "--out", out)
    assert json.loads((folder.parent / "c.bin.json").read_text()) == one


def test_a_limit_of_tokens(folder):
    whole, tokens = built(folder, "--validation", "0.2")
    header, some = built(folder, "--validation", "0.2", "--max-tokens", "3000", out="d.bin")
    assert header["train_tokens"] == 3000 and header["validation_tokens"] == 750
    assert np.array_equal(some[:3000], tokens[:3000])
    assert np.array_equal(some[3000:], tokens[whole["train_tokens"] :][:750])


def test_byte_pair_encoding_decodes_to_the_texts(folder, tmp_path):
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    words = ("--tokenizer", "bpe", "--vocab", "400")
    header, tokens = built(folder, *words)
    assert tokens.max() < header["vocab"] <= 400 and header["tokenizer"] == "bpe"
    of_bytes = built(folder, out="b.bin")[0]
    assert len(tokens) < 0.6 * (of_bytes["train_tokens"] + of_bytes["validation_tokens"])
    content = (tmp_path / "c.bin.tokenizer.json").read_text()
    assert header["tokenizer_sha256"] == hashlib.sha256(content.encode()).hexdigest()
    ends = np.flatnonzero(tokens == 0)
    coder = tokenizers.Tokenizer.from_str(content)
    texts = [coder.decode(part[part != 0].tolist()) for part in np.split(tokens, ends)[:-1]]
    assert sorted(texts) == sorted(text_of(number) for number in range(20))
    assert built(folder, *words)[0]["sha256"] == header["sha256"]


def test_the_encoding_of_another_corpus(folder, tmp_path, capsys):
    tokenizers = pytest.importorskip("tokenizers", reason="needs tokenizers")
    one, _ = built(folder, "--tokenizer", "bpe", "--vocab", "400")
    given = str(tmp_path / "c.bin.tokenizer.json")
    (folder / "added.txt").write_text("a text of another kind, which was not there before\n" * 9)
    other, tokens = built(folder, "--tokenizer", given, out="other.bin")
    for name in ("tokenizer", "vocab", "tokenizer_sha256"):
        assert other[name] == one[name], name
    coder = tokenizers.Tokenizer.from_file(given)
    texts = [coder.decode(part[part != 0].tolist())
             for part in np.split(tokens, np.flatnonzero(tokens == 0))[:-1]]
    assert (folder / "added.txt").read_text() in texts
    foreign = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    foreign.save(str(tmp_path / "foreign.json"))
    capsys.readouterr()
    for wrong in ("byte", str(folder), str(folder / "added.txt"), str(tmp_path / "foreign.json")):
        with pytest.raises(SystemExit) as left:
            corpus.main([str(folder), "--out", str(tmp_path / "d.bin"), "--tokenizer", wrong])
        assert left.value.code == 2
        assert f"--tokenizer {wrong}: pass bytes, bpe, or the" in capsys.readouterr().err
    assert not (tmp_path / "d.bin").exists()


def test_nothing_but_a_corpus_is_replaced(folder, tmp_path, capsys):
    """A pipe stands for devices, which root could replace as well."""
    notes, pipe = folder / "notes.md", tmp_path / "pipe"
    notes.write_text("mine")
    os.mkfifo(pipe)
    (tmp_path / "d.bin.json").mkdir()
    (tmp_path / "e.bin.tokenizer.json").mkdir()
    assert "and no corpus: notes.md.json is not" in refused(capsys, folder, "--out", notes)
    assert "notes.md is a file: name a folder" in refused(capsys, folder, "--out", notes / "x")
    for out, what in ((pipe, "pipe"), (tmp_path / "d.bin", "d.bin.json"),
                      (tmp_path / "e.bin", "e.bin.tokenizer.json")):  # fmt: skip
        said = refused(capsys, folder, "--out", out)
        assert f"{what} is a folder, a device or a pipe" in said and "name another file" in said
    assert notes.read_text() == "mine" and pipe.is_fifo()
    assert not (tmp_path / "d.bin").exists() and not (tmp_path / "e.bin").exists()
    (tmp_path / "empty.bin").touch()  # as mktemp makes one
    assert corpus.main([str(folder), "--out", str(tmp_path / "empty.bin")]) == 0


def test_byte_pair_encoding_without_its_library(folder, monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    out = folder.parent / "c.bin"
    assert corpus.main([str(folder), "--out", str(out), "--tokenizer", "bpe"]) == 1
    assert "pip install tokenizers, or pass --tokenizer bytes" in capsys.readouterr().err
    assert not out.exists()


def test_json_is_the_header(folder, capsys):
    header, _ = built(folder, "--json")
    assert json.loads(capsys.readouterr().out) == header


def test_wrong_use_of_corpus(folder, tmp_path, capsys):
    out = ("--out", tmp_path / "c.bin")
    empty, binary, one = (tmp_path / name for name in ("empty", "binary", "one"))
    for place in (empty, binary, one):
        place.mkdir()
    (binary / "a.txt").write_bytes(bytes(range(256)) * 4)
    (one / "a.txt").write_text(text_of(0))
    assert "empty has no files that end with .py " in refused(capsys, empty, *out)
    said = refused(capsys, binary, *out)
    assert "none of 1 files is text to learn from: 1 binary" in said
    (binary / "b.txt").write_text("x")
    said = refused(capsys, binary, one, *out)
    assert ("1 of 3 files is text to learn from (1 binary, 1 of fewer than 128 bytes): it takes "
            "two") in said  # fmt: skip
    assert "absent is no folder" in refused(capsys, tmp_path / "absent", *out)
    assert "--vocab 10: it must be 300 to 65536" in refused(
        capsys, folder, *out, "--vocab", "10", "--tokenizer", "bpe")
    assert "--vocab 512: it is for --tok" in refused(capsys, folder, *out, "--vocab", "512")
    assert "--max-tokens 0" in refused(capsys, folder, *out, "--max-tokens", "0")
    for share in ("1.5", "0", "x"):
        said = refused(capsys, folder, *out, "--validation", share)
        assert f"--validation: '{share}': pass a share of the files" in said
    assert "is a folder: name a file" in refused(capsys, folder, "--out", tmp_path)
    assert "nothing can be written into /proc" in refused(capsys, folder, "--out", "/proc/c.bin")
    assert not list(tmp_path.glob("c.bin*"))


# ---- reading it ----------------------------------------------------------------------------------


@pytest.fixture
def opened(folder):
    built(folder)
    return Corpus.open(folder.parent / "c.bin")


def test_sequences_follow_one_another_and_targets_are_one_further(opened):
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    order = opened.order(0, 32)
    have = (len(opened.train) - 1) // 32
    assert sorted(order.tolist()) == list(range(have))
    assert not torch.equal(order, opened.order(1, 32))
    rows = opened.batch(torch.arange(have), 32)
    assert rows.shape == (have, 33) and rows.dtype == torch.int64
    assert np.array_equal(rows[:, :-1].flatten(), opened.train[: have * 32])
    assert np.array_equal(rows[:, 1:].flatten(), opened.train[1 : have * 32 + 1])


def test_held_out_sequences_are_spread_and_differ(opened):
    pytest.importorskip("torch", reason="needs PyTorch")
    have = (len(opened.held_out) - 1) // 32
    rows = opened.validation(3, 32)
    for row, place in zip(rows, (0, have // 3, 2 * have // 3), strict=True):
        assert np.array_equal(row, opened.held_out[32 * place : 32 * place + 33])
    assert 0 < have // 3 < 2 * have // 3


def test_too_little_text_is_refused(opened):
    have = (len(opened.train) - 1) // 32
    opened.check(have, 32, 3)
    with pytest.raises(ValueError, match=f"the run takes {(have + 1) * 32:,} tokens .*none is seen "
                                         rf"twice, and the .*\({have:,} sequ"):  # fmt: skip
        opened.check(have + 1, 32, 3)
    held_out = (len(opened.held_out) - 1) // 32
    for given, option in (((), "--val-sequences"), (("--sequences",), "--sequences")):
        said = f"^{option} 1000: the corpus has {held_out} held-out sequences of 32 tokens; pass at"
        with pytest.raises(ValueError, match=said):
            opened.check(have, 32, 1000, *given)


def test_a_file_that_is_no_corpus_is_refused(folder):
    path = folder.parent / "c.bin"
    built(folder)
    header = folder.parent / "c.bin.json"
    content = header.read_text()
    for change, part in ((lambda: path.write_bytes(path.read_bytes()[:-2]), "is not whole"),
                         (lambda: header.write_text(content.replace("corpus 1", "corpus 2")),
                          "format 'sagebwd corpus 2'"),
                         (lambda: header.write_text("{"), "describes no corpus"),
                         (lambda: header.write_text("{}"), "describes no corpus"),
                         (header.unlink, "c.bin.json is not there")):  # fmt: skip
        change()
        with pytest.raises(ValueError, match=part):
            Corpus.open(path)
    with pytest.raises(FileNotFoundError):
        Corpus.open(folder / "absent")


def test_a_tokenizer_of_before_does_not_stay(folder, tmp_path):
    stale = tmp_path / "c.bin.tokenizer.json"
    stale.write_text("{}")
    assert corpus.main([str(folder), "--out", str(tmp_path / "c.bin")]) == 0
    assert not stale.exists()


def test_a_full_disk_is_no_wrong_use(folder, tmp_path, capsys, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(corpus, "write_tokens", full)
    assert corpus.main([str(folder), "--out", str(tmp_path / "c.bin")]) == 1
    assert "c.bin: No space left on device" in capsys.readouterr().err
