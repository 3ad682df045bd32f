"""Packages that only parts of sagebwd need: what is said where one is missing or too old, and
attn_implementation="sagebwd", which transformers knows from `import sagebwd` on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import warm

from sagebwd.core import compat as _needs

ROOT = Path(__file__).resolve().parents[2]
DOORS = {"transformers": "integrations.transformers", "diffusers": "integrations.diffusers",
         "jax": "integrations.jax", "torch": "emulation"}  # fmt: skip


def run(code):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    if "'torch'" in code:  # which must not have been imported
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True,
                              env=environment, timeout=300)  # fmt: skip
    return warm.run(["-c", code], loaded="torch._dynamo", env=environment)


def test_extras_are_those_that_errors_name():
    project = (ROOT / "pyproject.toml").read_text()
    extras = dict(re.findall(r'^(\w+) = \["(\w+>=[\d.]+)"\]$', project, re.MULTILINE))
    for package, least in _needs.LEAST.items():
        assert extras[package] == f"{package}>={least}"
    assert DOORS.keys() | {"pandas"} == _needs.LEAST.keys()


@pytest.mark.parametrize("package", DOORS)
def test_a_missing_package_is_named_with_what_installs_it(package):
    if package in ("transformers", "diffusers"):
        pytest.importorskip("torch", reason="needs PyTorch")
    module = f"sagebwd.{DOORS[package]}"
    done = run(f"import sys; sys.modules['{package}'] = None; import {module}")
    assert done.returncode == 1
    least = _needs.LEAST[package]
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: {module} needs {package} {least} or newer, which is not installed: pip "
        f"install '{package}>={least}'"
    )


OLD = {"transformers": "4.47.1", "diffusers": "0.34.0"}


@pytest.mark.parametrize("package", OLD)
def test_a_package_that_is_too_old_stays_usable_and_is_named(package, tmp_path):
    pytest.importorskip("torch", reason="needs PyTorch")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"__version__ = '{OLD[package]}'")
    (tmp_path / package / "modeling_utils.py").write_text("")
    # PYTHONPATH stays as it is, since the package in this folder has no place in other tests.
    done = run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
               f"import sagebwd, {package}.modeling_utils; print('usable'); "
               f"import sagebwd.{DOORS[package]}")  # fmt: skip
    assert done.stdout == "usable\n"
    assert done.stderr.splitlines()[-1].endswith(
        f"or newer, which is here in version {OLD[package]}: "
        f"pip install '{package}>={_needs.LEAST[package]}'"
    )


MODEL = """
import torch
config = transformers.LlamaConfig(
    vocab_size=100, hidden_size=128, intermediate_size=128, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64)
model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sagebwd")
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
door = sys.modules["sagebwd.integrations.transformers"]
assert ALL_ATTENTION_FUNCTIONS["sagebwd"] is door.attend
assert model.config._attn_implementation == "sagebwd"
assert type(transformers.modeling_utils.__loader__).__name__ == "SourceFileLoader"
finders = [finder for finder in sys.meta_path if "sagebwd" in type(finder).__module__]
assert not any(finder.module.startswith("transformers") for finder in finders)
"""
FIRST = {
    "sagebwd": "import sagebwd; assert 'transformers' not in sys.modules; import transformers",
    "transformers": "import transformers.modeling_utils; import sagebwd",
}


@pytest.mark.parametrize("first", FIRST)
def test_transformers_knows_the_name_whatever_is_imported_first(first):
    pytest.importorskip("torch", reason="needs PyTorch")
    pytest.importorskip("transformers", reason="needs transformers")
    done = run(f"import sys; {FIRST[first]}{MODEL}")
    assert done.returncode == 0, done.stderr
