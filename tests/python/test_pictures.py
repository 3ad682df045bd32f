"""Pictures under bench/results show the records that are there now.

bench/plot.py writes into each picture which records it shows, and their digests.
"""

import hashlib
import re
import struct

import pytest
from documents import PAGES, ROOT

RESULTS = ROOT / "bench/results"
#: The runs that wrote these records drew their pictures, too.
DRAWN_BY_RUNS = {"example-diffusion", "sparse-video", "sparse-video-2000"}
PICTURES = [*(path for path in sorted(RESULTS.glob("*.png")) if path.stem not in DRAWN_BY_RUNS),
            *sorted(RESULTS.glob("figures/*.png"))]  # fmt: skip


def words_of(picture):
    """The tEXt chunks of a PNG file."""
    data, place, found = picture.read_bytes(), 8, {}
    while place < len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        if kind == b"tEXt":
            key, value = data[place + 8 : place + 8 + length].split(b"\0")
            found[key.decode()] = value.decode()
        place += length + 12
    return found


@pytest.mark.parametrize("picture", PICTURES, ids=lambda path: path.stem)
def test_a_picture_shows_the_records_that_are_there(picture):
    shown = dict(one.rsplit(":", 1) for one in words_of(picture)["Records"].split())
    there = {name: hashlib.sha256((RESULTS / name).read_bytes()).hexdigest()[:16]
             for name in shown}  # fmt: skip
    assert shown == there, "run: python bench/plot.py"
    assert shown or picture.stem in ("granularities", "masks"), "it shows a record"


def test_pages_show_every_figure():
    shown = {name for page in PAGES for name in
             re.findall(r"!\[[^\]]+\]\((?:\.\./)*bench/results/figures/(\w+)\.png\)",
                        page.read_text())}  # fmt: skip
    assert shown == {picture.stem for picture in PICTURES if picture.parent.name == "figures"}
