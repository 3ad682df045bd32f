"""Functions that torch.compile leaves out of its graphs."""

import functools
import sys


def not_compiled(name, instead=""):
    """Decorates such a function. Its error under fullgraph=True calls it `name`, and ends with what
    to use `instead`.

    Importing torch._dynamo to say so would take longer than most of what these functions do, so the
    first call after its import does.
    """

    def decorate(function):
        @functools.wraps(function)
        def front(*given, **named):
            dynamo = sys.modules.get("torch._dynamo")
            return (dynamo.disable(function) if dynamo else function)(*given, **named)

        front._torchdynamo_disable = True  # as torch._dynamo.disable marks functions
        front._torchdynamo_disable_msg = (
            f"{name} is not compiled: compile without fullgraph=True, which leaves it out of the "
            f"graph{instead}"
        )
        return front

    return decorate
