"""Processes that stand for other cards, by numbers that they only say: for tests of bench/balance*.
"""

import pytest

torch = pytest.importorskip("torch")

import balance_process  # noqa: E402
import stretch  # noqa: E402
from harness import Record  # noqa: E402

#: Such a program begins so. `sys` and what it asks for come from standard input.
BEGINNING = '''
import json, os, sys
job = json.loads(sys.stdin.readline())
stretched = os.environ["SAGEBWD_TEMPLATE_DIR"] != {templates!r}
wrong = {wrong!r}
def say(**what): print(json.dumps(what), flush=True)
def timing(ms): return dict(median_ms=ms, mad_ms=0.0, samples=1)
kernel = dict(tile="mma 64x128 w4 s1 b2", threads=128, registers=155, spill_bytes=0,
              shared_bytes=21504)
multiples = dict(mma_s8=3, mma_u8=3, mma_bf16=6)
rates = dict((name, dict(per_clock=1.0 / (multiples[name] if stretched else 1), clock_ghz=2.0))
             for name in multiples)
if job["device"] == "cpu": rates = None
def measured():
    say(event="ready")
    plain = json.loads(sys.stdin.readline())
    assert (plain is not None) == stretched
    if wrong == "dies": sys.exit("out of memory")
    say(event="here", sms=100, gpu="H100", rates=rates, memory_gbs=2520.0)
    return plain
'''


@pytest.fixture
def hopper(request, tmp_path, monkeypatch):
    """A machine with an H100, on which processes say what the test's STAND_IN says, for the script
    that it has as SCRIPT. Gives the place of the record, where numbers are `wrong` in some way."""
    script, stand_in = request.module.SCRIPT, request.module.STAND_IN

    def with_script(wrong=""):
        program = tmp_path / "stand_in.py"
        beginning = BEGINNING.format(templates=str(stretch.TEMPLATES), wrong=wrong)
        program.write_text(beginning + stand_in + 'say(event="end", rates=rates)\n')
        monkeypatch.setattr(balance_process, "SCRIPT", program)
        return tmp_path / f"{script.__name__.replace('_', '-')}.json"

    def record(path, **more):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # for the record's head
        return Record(path, **more)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(script, "Record", record)
    monkeypatch.setenv("SAGEBWD_TEMPLATE_DIR", "")
    return with_script
