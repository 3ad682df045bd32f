"""`FuseReport`: what `fuse` of transformers and of diffusers did to a model."""

import dataclasses

from sagebwd.core.arguments.checks import SpecError


@dataclasses.dataclass(frozen=True)
class FuseReport:
    """This tells what `fuse` did. print() shows it, with modules of the same kind in one line.

    Attributes:
        fused: what is fused in each attention module, by the module's name in the model.
        left: why each of the others goes on as before, by its name.
    """

    fused: dict
    left: dict

    def __str__(self):
        lines = []
        for title, by_name in (("fused", self.fused), ("left as it was", self.left)):
            for said in dict.fromkeys(by_name.values()):
                names = [name for name, what in by_name.items() if what == said]
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                lines.append(f"{title}: {names[0]}{more}: {said}")
        return "\n".join(lines)


def formed_again_if(recompute_qk):
    """What a report says of a module that was fused with recompute_qk=True."""
    return ", formed again in the backward" if recompute_qk else ""


def check_fused_before(name, before, recompute_qk):
    """SpecError for a module that was fused with another `recompute_qk`, which was `before`."""
    if before != recompute_qk:
        raise SpecError(
            f"{name} was fused with recompute_qk={before}, and recompute_qk={recompute_qk} is "
            "asked for: call unfuse(model) first"
        )


def nothing_fused(model, reasons, library, other):
    """The SpecError for a model of which nothing can be fused by the `fuse` of a library; it says
    so if the model's modules are the `other` library's."""
    kinds = {kind.__module__.partition(".")[0] for module in model.modules()
             for kind in type(module).__mro__}  # fmt: skip
    if other in kinds and library not in kinds:
        reasons = (f"It is a model of {other}, and this is {library}' fuse: call "
                   f"sagebwd.integrations.{other}.fuse")  # fmt: skip
    return SpecError(f"nothing in {type(model).__name__} can be fused. {reasons}")
