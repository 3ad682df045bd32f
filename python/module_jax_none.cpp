//===- module_jax_none.cpp - Built without JAX's headers ---------------------===//

#include "python/module_jax.h"

std::vector<sagebwd::python::JaxTarget> sagebwd::python::jax_targets() { return {}; }
