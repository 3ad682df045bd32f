"""The two passes of one GPU, or of the emulation for tensors on a CPU, for parts of the keys."""

import dataclasses

import torch

from sagebwd.core import functional
from sagebwd.core.keywords import NOT_EMULATED


def is_emulated(q):
    """Whether the emulation computes with these tensors."""
    return q.device.type == "cpu"


@dataclasses.dataclass(frozen=True)
class Passes:
    """Attention with these options; `chosen` are all of options.Options. Other places' keys
    (`is_own` False) have no mask, and only the first key of all is computed separately."""

    softmax_scale: float  #: or None
    layout: str
    chosen: dict

    @property
    def token_dim(self):
        return 1 if self.layout == "bshd" else 2

    def _options(self, is_own, has_first_key, k_mean, emulated):
        chosen = dict(self.chosen)
        if not is_own:
            chosen["causal"] = "none"
        if not has_first_key:
            chosen["sink_keys"] = 0
        if emulated:
            chosen = {name: x for name, x in chosen.items() if name not in NOT_EMULATED}
        return dict(chosen, softmax_scale=self.softmax_scale, layout=self.layout, k_mean=k_mean)

    def forward(self, q, k, v, is_own, has_first_key=True, k_mean=None):
        """(out, lse) of these keys alone."""
        given = self._options(is_own, has_first_key, k_mean, is_emulated(q))
        if is_emulated(q):
            from sagebwd.numerics import emulation

            return emulation.emulated_forward(q, k, v, **given)
        return functional.attention_forward(q, k, v, **given)

    def backward(self, dout, q, k, v, out, lse, dlse, is_own, has_first_key=True, k_mean=None):
        """(dq, dk, dv) of these keys, for out and lse of all. With k_mean only the sum of dq over
        all parts is right; with dlse it has softmax_scale dlse k_mean for each part, not once."""
        given = self._options(is_own, has_first_key, k_mean, is_emulated(q))
        if is_emulated(q):
            from sagebwd.numerics import emulation

            return emulation.emulated_backward(dout, q, k, v, out, lse, dlse=dlse, **given)
        if dlse is None or k_mean is None:
            return functional.attention_backward(dout, q, k, v, out, lse, dlse=dlse, **given)
        options = {name: given[name] for name in self.chosen}
        text = functional.text_of(options, self.softmax_scale, self.layout, q, k)
        return torch.ops.sagebwd.backward(dout, q, k, v, out, lse, dlse, self.softmax_scale,
                                          self.layout, text, None, None, None, None,
                                          k_mean)  # fmt: skip
