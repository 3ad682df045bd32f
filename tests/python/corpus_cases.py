"""A small corpus for tests of the experiments."""

from experiments import corpus


def corpus_of(folder, files=12, lines=60):
    """Files of text that is easy to learn, as tokens that are bytes."""
    texts = folder / "texts"
    texts.mkdir(parents=True)
    names = ["north", "south", "east", "west", "red", "green", "blue", "black", "up", "down"]
    for number in range(files):
        name = names[number % len(names)] * (1 + number // len(names))
        lines_of = (f"line {i} of a text of {name} that is easy to learn\n" for i in range(lines))
        (texts / f"{name}.txt").write_text("".join(lines_of))
    words = [str(texts), "--out", str(folder / "c.bin"), "--validation", "0.15"]
    assert corpus.main(words) == 0
    return folder / "c.bin"
