"""Gets the code of trainers at the commits that were looked up:

    python tests/trainers/get.py FOLDER [TRAINER...]
    python tests/trainers/get.py FOLDER --files > LIST    # what of FOLDER the tests need

It runs git, which needs a network, and nothing of what it gets.
"""

import subprocess
import sys
from pathlib import Path

from checkouts import TRAINERS


def get(name, folder):
    trainer, place = TRAINERS[name], folder / name
    place.mkdir(parents=True, exist_ok=True)
    for words in (("init",), ("fetch", "--depth=1", trainer.url, trainer.commit),
                  ("checkout", "FETCH_HEAD")):  # fmt: skip
        subprocess.run(["git", words[0], "--quiet", *words[1:]], cwd=place, check=True)
    print(f"{place}: {trainer.commit}")


def needed(folder):
    """Paths below the folder, of sources."""
    for name, trainer in TRAINERS.items():
        for path in (folder / name / file for file in trainer.files):
            for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
                print(file.relative_to(folder))


if __name__ == "__main__":
    folder, *words = sys.argv[1:] or sys.exit(__doc__)
    if words == ["--files"]:
        needed(Path(folder))
    else:
        for word in words or TRAINERS:
            get(word, Path(folder))
