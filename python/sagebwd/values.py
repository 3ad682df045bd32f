"""Checks arguments that may be NumPy arrays or torch tensors."""

from sagebwd.options import SpecError, a_kind


def _kind(name, x):
    package = type(x).__module__.split(".")[0]
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return "torch tensor" if package == "torch" else "NumPy array"
    raise TypeError(f"{name} is {a_kind(x)}; pass a NumPy array or a torch tensor")


class Arrays:
    """Arguments by name, all NumPy arrays or all torch tensors. Only q, k and v must not be None.

    Raises TypeError for anything else, SpecError for a mixture, for values that are no real numbers
    and for ranks other than four (three for lse and dlse).
    """

    def __init__(self, **given):
        self.given = given
        kinds = {name: _kind(name, x) for name, x in given.items()
                 if x is not None or name in ("q", "k", "v")}  # fmt: skip
        if len(set(kinds.values())) > 1:
            listed = ", ".join(f"{name} is a {kind}" for name, kind in kinds.items())
            raise SpecError(f"{listed}: pass all as NumPy arrays or all as torch tensors")
        self.are_torch = "torch tensor" in kinds.values()
        for name in kinds:
            self._check(name, given[name])

    def _check(self, name, x):
        rank, axes = (3, "") if name in ("lse", "dlse") else (4, ", channel")
        if len(x.shape) != rank:
            raise SpecError(
                f"{name} has rank {len(x.shape)}; it must have rank {rank}: (batch, head, "
                f"token{axes})"
            )
        if self.are_torch and str(x.layout) != "torch.strided":
            raise SpecError(f"{name} is {x.layout}; pass a dense tensor: {name}.to_dense()")
        if self.are_torch and x.is_meta:
            raise SpecError(f"{name} is a meta tensor, which has no values")
        real = x.is_floating_point() if self.are_torch else x.dtype.kind in "fiu"
        if not real:
            raise SpecError(f"{name} is of {x.dtype}; its values must be real numbers")

    def numpy(self):
        """All of them as arrays on the CPU, in the order in which they were given."""
        given = list(self.given.values())
        if self.are_torch:
            given = [None if x is None else x.detach().float().cpu().numpy() for x in given]
        return given
