//===- ptxas.h - What ptxas is told, by kernel ------------------------------===//
//
// One table, with the reason of each row. Its scheduler decides which registers are spilled, so a
// row belongs to the NVRTC that the kernels are laid out for (13.0). bench/ptxas_rows.py compiles
// kernels with and without each row and tells which of them still change something.
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
  std::vector<Family> families; ///< none: a kernel without tiles
  bool (*when)(const KernelSpec&);
  std::string_view option; ///< e.g. "-O1"
  std::string_view why;
};

/// The first row that fits a kernel counts.
const std::vector<PtxasRow>& ptxas_rows();
/// The kernel's row, or null where ptxas keeps its own settings.
const PtxasRow* ptxas_row(const KernelSpec&);

} // namespace sagebwd
