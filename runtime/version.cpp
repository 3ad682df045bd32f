//===- version.cpp - The version of the library ---------------------------===//
#include "runtime/version.h"

const char* sagebwd::version() { return SAGEBWD_VERSION; }
