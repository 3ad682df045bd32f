//===- version.h - The version of the library -----------------------------===//
#pragma once

namespace sagebwd {

/// The version of project() in CMakeLists.txt, such as "1.2.3".
const char* version();

} // namespace sagebwd
