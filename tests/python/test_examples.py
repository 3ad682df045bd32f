"""The examples where something is missing: one line, before anything is trained."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def lora(monkeypatch, capsys):
    """The last line of `python lora.py ...`, which must leave with 2."""
    for needed in ("torch", "transformers", "peft"):
        pytest.importorskip(needed, reason=f"needs {needed}")
    spec = importlib.util.spec_from_file_location("lora", EXAMPLES / "lora.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["lora.py", *map(str, words)])
        with pytest.raises(SystemExit) as left:
            module.main()
        assert left.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return run


def test_texts_that_lora_cannot_learn_from(lora, tmp_path):
    text = tmp_path / "a.txt"
    text.write_bytes(b"abcdefgh" * 1280)
    assert "No such file or directory: '/nope'" in lora("--base", "/nope", "--text", "/nope")
    assert "No such file or directory: '/nope'" in lora(
        "--base", "/nope", "--text", text, "--length", 64
    )
    assert "10240 tokens; pass a text of at least 81920" in lora("--base", text, "--text", text)
    assert "needs --base" in lora("--text", text)
