//===- ptxas.h - Options of ptxas for each kernel ---------------------------===//
//
// One table says with which option ptxas compiles which kernels, and why. The scheduler of ptxas
// decides which registers are spilled, so the rows are valid for the version of NVRTC that the
// kernels are laid out for (13.0). bench/ptxas_rows.py compiles kernels with and without each row
// and reports which rows still change something.
//
//===----------------------------------------------------------------------===//
#pragma once

#include "generator/kernel.h"

#include <string_view>
#include <vector>

namespace sagebwd {

struct PtxasRow {
  std::string_view name; ///< of the row, in messages and records
  std::vector<KernelKind> kinds;
  std::vector<Family> families; ///< empty for kernels without tiles
  bool (*when)(const KernelSpec&);
  std::string_view option; ///< e.g. "-O1"
  std::string_view why;
};

/// The table. The first row that fits a kernel applies to it, and later rows do not.
const std::vector<PtxasRow>& ptxas_rows();
/// The row that applies to a kernel, or null if ptxas compiles it with its default settings.
const PtxasRow* ptxas_row(const KernelSpec&);

} // namespace sagebwd
