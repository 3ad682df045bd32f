"""Makes a corpus of tokens of the text and source code in folders.

    python -m experiments.corpus /usr/lib/python3 docs --out corpus.bin
    python -m experiments.corpus src --out corpus.bin --tokenizer bpe --vocab 8192

Each text is used once, also where files differ in white space, digits and capitals alone. Files
are held out as a whole. Equal files with an equal seed give equal tokens.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sagebwd.benchmark.environment import replacing, write_json

from . import command
from .command import Failure
from .data import FORMAT, header_of

#: Text and source code, by the ends of names.
SUFFIXES = (".py", ".pyi", ".pyx", ".md", ".rst", ".txt", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h",
            ".hpp", ".inl", ".js", ".ts", ".go", ".rs", ".java", ".jl", ".lua", ".pl", ".pm", ".rb",
            ".sh", ".f90", ".tex", ".html", ".cmake")  # fmt: skip
LEAST, MOST = 128, 1_000_000  # bytes of a file
LONGEST_LINE = 200  # bytes of a line, on average: above, it is data
#: What some reasons to leave files out mean.
MEANING = {"short": f"of fewer than {LEAST} bytes", "long": f"of more than {MOST:,} bytes",
           "long lines": f"of lines with more than {LONGEST_LINE} bytes on average"}  # fmt: skip
SAMPLE = 24_000_000  # bytes that the tokenizer is trained on
AT_ONCE = 256  # files that are tokenized together
_IGNORED = b" \t\r\n\f\v0123456789"


@dataclass(frozen=True)
class File:
    """One text of the corpus, found again by its path."""

    path: Path
    size: int
    key: str  #: of its content and the seed: it decides its place and whether it is held out

    def text(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="strict")


def find(folders: list[Path], suffixes: tuple[str, ...]) -> list[Path]:
    """Files in a fixed order, without hidden ones and links. ValueError if a folder has none."""
    found = []
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is no folder")
        inside = [path for path in sorted(folder.rglob("*"))
                  if path.suffix in suffixes and path.is_file() and not path.is_symlink()
                  and not any(p.startswith(".") or p == "__pycache__"
                              for p in path.relative_to(folder).parts)]  # fmt: skip
        if not inside:
            raise ValueError(f"{folder} has no files that end with {' '.join(suffixes)}: name a "
                             "folder of text or source code, or pass --suffixes")  # fmt: skip
        found += inside
    return found


def why_not(content: bytes) -> str | None:
    """Why a file's content is no text to learn from."""
    if len(content) < LEAST:
        return "short"
    if len(content) > MOST:
        return "long"
    if b"\0" in content:
        return "binary"
    if len(content) > LONGEST_LINE * (content.count(b"\n") + 1):
        return "long lines"
    try:
        content.decode("utf-8", errors="strict")
    except UnicodeDecodeError:
        return "binary"
    return None


def select(paths: list[Path], seed: int, progress) -> tuple[list[File], Counter]:
    """The texts, each once, in the order of their keys, and how many files were left out and
    why."""
    seen: set[bytes] = set()
    alike: set[bytes] = set()
    left_out: Counter = Counter()
    files = []
    for number, path in enumerate(paths):
        progress("reading", number, len(paths))
        try:
            content = path.read_bytes()
        except PermissionError:
            left_out["unreadable"] += 1
            continue
        why = why_not(content)
        digest = hashlib.sha256(content)
        bare = hashlib.sha256(content.lower().translate(None, _IGNORED)).digest()
        if not why and digest.digest() in seen:
            why = "duplicate"
        elif not why and bare in alike:
            why = "near duplicate"
        if why:
            left_out[why] += 1
            continue
        seen.add(digest.digest())
        alike.add(bare)
        key = hashlib.sha256(f"{seed} {digest.hexdigest()}".encode()).hexdigest()
        files.append(File(path, len(content), key))
    progress("reading", len(paths), len(paths))
    return sorted(files, key=lambda file: file.key), left_out


def split(files: list[File], fraction: float) -> tuple[list[File], list[File]]:
    """Files to train on, and those that are held out: about `fraction` of them, at least one."""
    held_out = [file for file in files if int(file.key[-8:], 16) < fraction * 16**8] or files[-1:]
    chosen = {file.key for file in held_out}
    return [file for file in files if file.key not in chosen], held_out


class Bytes:
    """A token is a byte; the byte 0, which no text has, ends one."""

    name, vocab = "bytes", 256

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode() + b"\0", np.uint8).astype(np.uint16) for text in texts]

    def content(self) -> str | None:
        return None


#: The token 0 of byte-pair encodings.
END = "<|end|>"


class PairEncoding:
    """Byte-pair encoding, trained on a sample of the texts; the token 0 ends a text."""

    name = "bpe"

    def __init__(self, tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocab = tokenizer.get_vocab_size()

    @classmethod
    def of_file(cls, path: Path) -> PairEncoding:
        """That of another corpus; ValueError where the file is none."""
        wrong = (f"--tokenizer {path}: pass bytes, bpe, or the .tokenizer.json that belongs to "
                 "another corpus")  # fmt: skip
        if not path.is_file():
            raise ValueError(wrong)
        from_text = _tokenizers().Tokenizer.from_str
        try:
            tokenizer = from_text(path.read_text(errors="replace"))
        except Exception as error:  # the library has no kind of its own
            raise ValueError(wrong) from error
        if tokenizer.id_to_token(0) != END:
            raise ValueError(wrong)
        return cls(tokenizer)

    @classmethod
    def learned(cls, texts: Iterator[str], vocab: int) -> PairEncoding:
        tokenizers = _tokenizers()
        tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=[END], show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())  # fmt: skip
        tokenizer.train_from_iterator(texts, trainer)
        return cls(tokenizer)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [np.array([*encoding.ids, 0], np.uint16)
                for encoding in self.tokenizer.encode_batch(texts, add_special_tokens=False)]

    def content(self) -> str | None:
        return self.tokenizer.to_str()


def _tokenizers():
    try:
        import tokenizers
    except ImportError as error:
        raise Failure(f"--tokenizer bpe needs tokenizers ({error}): pip install tokenizers, or "
                      "pass --tokenizer bytes") from error  # fmt: skip
    return tokenizers


def sample(files: list[File], size: int, progress) -> Iterator[str]:
    """Texts of about `size` bytes together: the first files, whose order has no meaning."""
    taken, most = 0, max(1, min(size, sum(file.size for file in files)))
    for file in files:
        if taken >= size:
            break
        progress("learning a vocabulary", taken, most)
        taken += file.size
        yield file.text()
    progress("learning a vocabulary", most, most)


def write_tokens(target, files: list[File], coder, most: int | None, digest, progress) -> dict:
    """Appends the files' tokens, at most `most`; how many files, bytes and tokens were used."""
    used = {"files": 0, "bytes": 0, "tokens": 0}
    total = sum(file.size for file in files)
    for first in range(0, len(files), AT_ONCE):
        chunk = files[first : first + AT_ONCE]
        for file, tokens in zip(chunk, coder.encode([file.text() for file in chunk])):
            if most is not None and used["tokens"] + len(tokens) > most:
                tokens = tokens[: most - used["tokens"]]
            if not len(tokens):
                break
            data = tokens.tobytes()
            digest.update(data)
            target.write(data)
            used["files"] += 1
            used["bytes"] += file.size
            used["tokens"] += len(tokens)
        progress("tokenizing", used["bytes"], total)
        if used["tokens"] == most:
            break
    progress("tokenizing", total, total)
    return used


def build(options, progress) -> dict:
    """Writes the corpus; its header. ValueError where the folders have no usable text."""
    given = None  # before the texts are read
    if options.tokenizer not in ("bytes", "bpe"):
        given = PairEncoding.of_file(Path(options.tokenizer))
    paths = find(options.folders, options.suffixes)
    files, left_out = select(paths, options.seed, progress)
    reasons = ", ".join(f"{count} {MEANING.get(why, why)}"
                        for why, count in left_out.most_common())  # fmt: skip
    if not files:
        raise ValueError(f"none of {len(paths)} files is text to learn from: {reasons}")
    train, held_out = split(files, options.validation)
    if not train:
        raise ValueError(f"{len(files)} of {len(paths)} files is text to learn from"
                         f"{reasons and f' ({reasons})'}: it takes two, one to train on and one "
                         "to validate with")  # fmt: skip
    coder = given or (Bytes() if options.tokenizer == "bytes" else PairEncoding.learned(
        sample(train, SAMPLE, progress), options.vocab))  # fmt: skip
    most = options.max_tokens
    digest = hashlib.sha256()
    out = options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out) as partial:
        with partial.open("wb") as target:
            of_train = write_tokens(target, train, coder, most, digest, progress)
            share = options.validation / (1 - options.validation)
            most = most and max(1, round(most * share))
            of_held_out = write_tokens(target, held_out, coder, most, digest, progress)
        header_of(out).unlink(missing_ok=True)
    content = coder.content()
    tokenizer_of(out).unlink(missing_ok=True)  # of what was there before
    if content is not None:
        with replacing(tokenizer_of(out)) as partial:
            partial.write_text(content)
    header = {
        "format": FORMAT, "tokenizer": coder.name, "vocab": coder.vocab,
        "train_tokens": of_train["tokens"], "validation_tokens": of_held_out["tokens"],
        "sha256": digest.hexdigest(), "seed": options.seed, "validation": options.validation,
        "train": of_train, "held_out": of_held_out,
        "asked": asked(options),
        "found_files": len(paths), "left_out": dict(left_out.most_common()),
        "suffixes": dict(Counter(file.path.suffix for file in files).most_common()),
        "tokenizer_sha256": content and hashlib.sha256(content.encode()).hexdigest(),
    }  # fmt: skip
    write_json(header_of(out), header)
    return header


def tokenizer_of(out: Path) -> Path:
    """The file beside a corpus that holds its byte-pair encoding."""
    return out.with_name(out.name + ".tokenizer.json")


def a_share(text: str) -> float:
    """A number from the command line, else an error that says what to pass."""
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: pass a share of the files, a number above 0 "
                                         "and below 1, such as 0.01")  # fmt: skip
    return share


def asked(options: argparse.Namespace) -> dict:
    """A corpus was made from this, as its header says."""
    return {"folders": [folder.name or str(folder) for folder in options.folders],
            "tokenizer": Path(options.tokenizer).name, "vocab": options.vocab,
            "max_tokens": options.max_tokens, "validation": options.validation,
            "seed": options.seed, "suffixes": list(options.suffixes)}  # fmt: skip


def check_out(options: argparse.Namespace) -> None:
    """ValueError if a corpus could not be written there, or would take the place of something
    else."""
    out = options.out
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder: name a file")
    for path in (out, header_of(out), tokenizer_of(out)):
        if path.exists() and not path.is_file():
            raise ValueError(f"--out {out}: {path} is a folder, a device or a pipe, which nothing "
                             "can be written in place of; name another file")  # fmt: skip
    if out.exists() and out.stat().st_size and not header_of(out).exists():
        raise ValueError(
            f"--out {out} is there, and no corpus: {header_of(out).name} is not beside it; name "
            "another file, or remove this one"
        )
    command.check_folder(out.parent)
    if not out.exists() or not header_of(out).exists():
        return
    try:
        before = json.loads(header_of(out).read_text())["asked"]
    except (ValueError, TypeError, KeyError):  # of an earlier version, or broken
        before = None
    if before != asked(options):
        raise ValueError(f"--out {out} is a corpus that was made with other options, which "
                         f"{header_of(out).name} says: name another file, or remove that one")


def main(arguments: list[str] | None = None) -> int:
    parser = command.parser("corpus", __doc__)
    add = parser.add_argument
    add("folders", nargs="+", type=Path, metavar="FOLDER", help="folders of text and source code")
    add("--out", type=Path, required=True, metavar="FILE",
        help="file of tokens (uint16); FILE.json beside it says what they are")  # fmt: skip
    add("--tokenizer", default="bytes", metavar="NAME", help="bytes: a token is a byte; bpe: "
        "byte-pair encoding by the tokenizers library; the .tokenizer.json of another corpus: its "
        "encoding (default: bytes)")  # fmt: skip
    add("--vocab", type=int, metavar="N",
        help="tokens of the byte-pair encoding (default: 8192)")  # fmt: skip
    add("--validation", type=a_share, default=0.01, metavar="X",
        help="share of the files that is held out (default: 0.01)")  # fmt: skip
    add("--max-tokens", type=int, metavar="N", help="tokens to train on, at most (default: all)")
    add("--seed", type=int, default=0, metavar="N", help="seed of split and order (default: 0)")
    add("--suffixes", nargs="+", default=SUFFIXES, metavar=".X",
        help=f"ends of the files' names (default: {' '.join(SUFFIXES)})")  # fmt: skip
    add("--json", action="store_true", help="print FILE.json's content, not a sentence")

    def work(options) -> int:
        with command.wrong_use(parser):
            options.suffixes = tuple(options.suffixes)
            if options.max_tokens is not None and options.max_tokens < 1:
                raise ValueError(f"--max-tokens {options.max_tokens}: it must be at least 1")
            if options.vocab is not None and options.tokenizer != "bpe":
                raise ValueError(f"--vocab {options.vocab}: it is for --tokenizer bpe alone")
            options.vocab = 8192 if options.vocab is None else options.vocab
            if not 300 <= options.vocab <= 65536:
                raise ValueError(f"--vocab {options.vocab}: it must be 300 to 65536")
            check_out(options)
        with command.alone(options.out.parent, options.out.name):
            try:
                check_out(options)  # another process may have written it by now
                header = build(options, command.progress)
            except ValueError as error:  # a full disk is no wrong use
                parser.error(str(error))
        if options.json:
            print(json.dumps(header, indent=1))
        else:
            train, held_out = header["train"], header["held_out"]
            print(f"{options.out}: {train['tokens']:,} tokens of {train['files']:,} files to train "
                  f"on, {held_out['tokens']:,} of {held_out['files']:,} held out, SHA-256 "
                  f"{header['sha256']}")
        return 0

    return command.run(parser, arguments, work, needs_torch=False)


if __name__ == "__main__":
    sys.exit(main())
