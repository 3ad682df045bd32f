//===- command.h - Find the program that runs candidates ------------------===//
#pragma once

#include <string>
#include <vector>

namespace sagebwd {

/// The command of a worker. The first that exists counts: `given`; `named` (the path of a sagebwd,
/// from SAGEBWD_TUNE_WORKER); the command of set_tune_worker(); this executable if it is sagebwd; a
/// sagebwd beside this executable or in PATH. Raises TuneError if there is none.
std::vector<std::string> worker_command(const std::vector<std::string>& given,
                                        const std::string& named);
/// Sets the worker of programs that have their own, such as a Python interpreter.
void set_tune_worker(std::vector<std::string> command);

} // namespace sagebwd
