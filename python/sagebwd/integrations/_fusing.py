"""`FuseReport`: what `fuse` of transformers and of diffusers did to a model."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class FuseReport:
    """Which attention of a model calls `sagebwd.qk_norm_rope` from now on, and which does not.

    str() of it, and so print(), has one line for each kind that is fused and for each reason.

    Attributes:
        fused: kind of attention -> names of its modules, as model.named_modules() has them. A kind
            is the name of the class that computed it.
        left: name of a module -> why it goes on as before.
    """

    fused: dict
    left: dict

    def __str__(self):
        reasons = {}
        for name, reason in self.left.items():
            reasons.setdefault(reason, []).append(name)
        lines = [f"fused {_some(names)}: {kind}" for kind, names in self.fused.items()]
        lines += [f"left {_some(names)}: {reason}" for reason, names in reasons.items()]
        return "\n".join(lines) if lines else "there is no attention in this model"


def _some(names):
    """The first name, and how many there are."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
