//===- command.h - Which program runs candidates ----------------------------===//
#pragma once

#include <string>
#include <vector>

namespace sagebwd {

/// The command of a worker: `given`, else `named` (the path of a sagebwd, as SAGEBWD_TUNE_WORKER
/// gives it), else set_tune_worker()'s, else this executable where it is sagebwd, else a sagebwd
/// beside it or in PATH. Raises TuneError.
std::vector<std::string> worker_command(const std::vector<std::string>& given,
                                        const std::string& named);
/// For programs that bring a worker of their own, such as a Python interpreter.
void set_tune_worker(std::vector<std::string> command);

} // namespace sagebwd
