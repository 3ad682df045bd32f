"""The device checks here what the host cannot wait for: in compiled code, in exported programs and
while a CUDA graph is captured. This module alone calls torch._assert_async."""

import torch

#: Bytes of the longest text that PyTorch's kernel on a GPU takes, which ends it with one more.
MOST_BYTES = 254


def require(condition, text):
    """Stops the program, once the device finds that `condition` does not hold.

    Args:
        condition: a tensor of one bool.
        text: what is wrong. It is short, see MOST_BYTES, and does not depend on sizes, for each of
            which a graph would be compiled again. Eager code can say more.

    Raises ValueError for a text that a GPU would refuse, on every device.
    """
    if not text.isascii() or len(text) > MOST_BYTES:
        raise ValueError(
            f"a text of {len(text)} characters for the device: at most {MOST_BYTES} of ASCII are "
            f"supported: shorten {text!r}"
        )
    if condition.device.type != "meta":
        torch._assert_async(condition, text)
