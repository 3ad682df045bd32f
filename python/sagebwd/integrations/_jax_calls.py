"""What calls of XLA have in common: how they are registered and made, and checks of arrays."""

import functools

from sagebwd import _core
from sagebwd.core import options
from sagebwd.core.arguments import checks
from sagebwd.core.arguments.shapes import check_rank
from sagebwd.core.compat import need

jax = need("jax", "sagebwd.integrations.jax")
jnp = jax.numpy

from jax.ad_checkpoint import checkpoint_name  # noqa: E402

#: The name of attention's results for policies of jax.checkpoint.
NAME = "sagebwd"
_DTYPES = (jnp.bfloat16, jnp.float16)

#: XLA's platforms, and the functions each has; tests simulate a GPU on the CPU.
FUNCTIONS = {"CUDA": "CUDA", "cpu": "cpu"}


@functools.cache
def _register():
    """Tells XLA of the passes, once. LibraryError from a build that has none."""
    targets = _core.jax_targets()
    if not targets:
        raise _core.LibraryError(
            "this build of sagebwd has no calls for JAX: it was made where jaxlib was not "
            "installed. In a checkout, where jaxlib is installed: pip install scikit-build-core "
            "pybind11, then pip install --no-build-isolation ."
        )
    for name, kind, function in targets:
        for platform in (p for p, of in FUNCTIONS.items() if of == kind):
            jax.ffi.register_ffi_target(f"sagebwd_{name}", function, platform=platform)


def check_arrays(**arrays):
    """SpecError for what no kernel takes, of another rank or dtype."""
    for name, x in arrays.items():
        check_rank(name, tuple(x.shape))
        if x.dtype not in _DTYPES:
            raise options.SpecError(
                f"{name} is {x.dtype}; the kernels take bfloat16 or float16: convert it by "
                f"{name}.astype(jnp.bfloat16)"
            )


def named(results):
    """The results, by their name, with which policies of jax.checkpoint keep them."""
    return [checkpoint_name(x, NAME) for x in results]


def call_xla(name, results, *operands, **attributes):
    """The results of one of `_core.jax_targets()`."""
    _register()
    ffi = jax.ffi.ffi_call(f"sagebwd_{name}", results, vmap_method="sequential")

    @jax.custom_vjp  # within a derivative already
    def call(*operands):
        return ffi(*operands, **attributes)

    call.defvjp(lambda *operands: (call(*operands), None), checks.refuse_double_backward)
    return call(*operands)
