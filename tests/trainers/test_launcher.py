"""The launcher of docs/use/trainers, which starts a trainer's script within sagebwd.sdpa()."""

import sys


def test_a_script_runs_within_sdpa(device, page, tmp_path, monkeypatch):
    from comparison import Kernels

    (tmp_path / "beside.py").write_text("channels = 64\n")
    script = tmp_path / "train.py"
    script.write_text(f"""
import sys
import beside, torch
from torch.nn.functional import scaled_dot_product_attention

assert __name__ == "__main__" and sys.argv[1:] == ["--local_rank=0", "--config", "a.toml"]
for channels in (beside.channels, 512):  # the second, as a VAE's, are too many for the kernels
    q, k, v = (torch.randn(1, 1, 40, channels, device={device!r}, dtype=torch.bfloat16)
               .requires_grad_() for _ in range(3))
    scaled_dot_product_attention(q, k, v).sum().backward()
""")
    given = ["sagebwd_run.py", "--local_rank=0", str(script), "--config", "a.toml"]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with Kernels() as kernels:
        exec(page("trainers")[0], {})
    assert (kernels.forwards, kernels.backwards) == (1, 1)
