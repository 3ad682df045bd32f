//===- python_command.h - Commands that are Python programs ----------------===//
//
// PyTorch's attentions are in Python. A command that measures them checks what was typed and
// becomes the Python program of the same name (python/sagebwd/__main__.py).
//
//===----------------------------------------------------------------------===//
#pragma once

#include <string>
#include <vector>

namespace sagebwd::tools {

/// Replaces this process by `python -m sagebwd COMMAND ARGUMENTS...`, in the Python that lies
/// beside this program, or else in the one on the PATH. Returns only by an exception: there is no
/// Python.
[[noreturn]] void become_python(const std::string& command,
                                const std::vector<std::string>& arguments);

} // namespace sagebwd::tools
