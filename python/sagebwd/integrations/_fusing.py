"""`FuseReport`: what `fuse` of transformers and of diffusers did to a model."""

import dataclasses


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
