//===- tuning_records.h - Records on the command line ----------------------===//
#pragma once

#include "cache/record.h"
#include "tools/command.h"

#include "llvm/Support/JSON.h"

#include <string>

namespace sagebwd::tools {

/// kernel, gpu, bucket, digest, tile, default_tile, default_ms, tuned_ms, speedup, compiler,
/// candidates.
llvm::json::Object json_of(const TuningRecord&);
/// Of a tile that was timed; else 0.
double median_ms_of(const TuningRecord&, const std::string& tile);

// What 'tune' does besides tuning, for the command that was given.
ExitCode list_records(const Command&);
/// Raises std::runtime_error where there is none, or the file cannot be written: it stays as it
/// was.
ExitCode export_records(const Command&, const std::string& path);
/// Raises std::runtime_error for a file that cannot be read or is none of ours.
ExitCode import_records(const Command&, const std::string& path, bool overwrite);

} // namespace sagebwd::tools
