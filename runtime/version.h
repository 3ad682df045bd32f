//===- version.h - Which version of the library this is -------------------===//
#pragma once

namespace sagebwd {

/// That of project() in CMakeLists.txt, such as "1.2.3".
const char* version();

} // namespace sagebwd
