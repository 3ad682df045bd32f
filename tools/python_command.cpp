//===- python_command.cpp - Commands that are Python programs --------------===//
#include "tools/python_command.h"

#include <filesystem>
#include <stdexcept>
#include <unistd.h>

namespace sagebwd::tools {

namespace {

namespace fs = std::filesystem;

/// Python runs this text. The first argument is the command, the second one the folder of the
/// package that was built with this program, or empty. A Python that lacks the package says so in
/// one line.
constexpr const char* kProgram = R"python(
import sys
command, built = sys.argv[1], sys.argv.pop(2)
if built:
    sys.path.insert(0, built)
try:
    from sagebwd.__main__ import main
except ImportError as error:
    if built:
        sys.exit(f"sagebwd {command}: {sys.executable} cannot import the sagebwd of {built} ({error})")
    sys.exit(f"sagebwd {command}: {sys.executable} cannot import sagebwd ({error}). Install "
             f"sagebwd into that Python, or run 'python -m sagebwd {command}' with the Python that "
             "has it")
sys.exit(main(sys.argv[1:]))
)python";

/// The folder of this program.
fs::path own_folder() {
  std::error_code none;
  return fs::read_symlink("/proc/self/exe", none).parent_path();
}

/// The package of the same build, beside the folder of this program; empty for an installed one.
std::string built_package() {
  std::error_code none;
  const fs::path folder = own_folder().parent_path() / "python";
  return fs::exists(folder / "sagebwd" / "__init__.py", none) ? folder.string() : "";
}

/// The Python beside this program, where pip has put both; else the one that the shell finds.
std::vector<std::string> pythons() {
  std::vector<std::string> found;
  const fs::path folder = own_folder();
  for (const char* name : {"python3", "python"})
    if (!folder.empty() && access((folder / name).c_str(), X_OK) == 0)
      found.push_back(folder / name);
  found.insert(found.end(), {"python3", "python"});
  return found;
}

} // namespace

void become_python(const std::string& command, const std::vector<std::string>& arguments) {
  std::vector<std::string> words = {"", "-c", kProgram, command, built_package()};
  words.insert(words.end(), arguments.begin(), arguments.end());
  for (const std::string& python : pythons()) {
    words.front() = python;
    std::vector<char*> values;
    for (std::string& word : words)
      values.push_back(word.data());
    values.push_back(nullptr);
    execvp(python.c_str(), values.data()); // returns only where it fails
  }
  throw std::runtime_error("needs Python with sagebwd and PyTorch, and there is no python3 beside "
                           "this program or on the PATH: run 'python -m sagebwd " +
                           command + "' with the Python that has them");
}

} // namespace sagebwd::tools
