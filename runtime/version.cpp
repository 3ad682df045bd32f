//===- version.cpp - Which version of the library this is -----------------===//
#include "runtime/version.h"

const char* sagebwd::version() { return SAGEBWD_VERSION; }
