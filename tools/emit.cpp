//===- emit.cpp - Print the generated source of a kernel -------------------===//
#include "cache/whole_file.h"
#include "generator/space.h"
#include "runtime/generate.h"
#include "tools/command.h"
#include "tools/spec_options.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"

#include <cctype>
#include <filesystem>
#include <regex>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

/// Spaces and what is rarely varied may be left out: "128x128w8s1" is of the family of `like` and
/// has one block per SM.
TileConfig read_tile(std::string typed, const TileConfig& like) {
  if (std::isdigit(static_cast<unsigned char>(typed.front())))
    typed.insert(0, value_text(like.family) + " ");
  visit_fields(usual<TileConfig>(), [&]<typename T>(const Label& label, const T& value) {
    const std::string mark(label.mark), letter = llvm::StringRef(mark).ltrim().str();
    if (!letter.empty() && value != T() && typed.find(letter) == std::string::npos)
      typed += mark + value_text(value);
    else if (!letter.empty())
      typed = std::regex_replace(typed, std::regex("([0-9])" + letter), "$1" + mark);
  });
  return parse_tile(typed);
}

class Emit : public Command {
public:
  Emit()
      : Command("emit", "print the generated CUDA source of a kernel",
                "Writes complete, header-free CUDA C++: NVRTC and nvcc take it unchanged.\n"
                "\n"
                "examples:\n"
                "  sagebwd emit --list\n"
                "  sagebwd emit --kernel forward --arch sm_80 --head-dim 64 > forward.cu\n"
                "  sagebwd emit --kernel forward --tile 128x128w8s1\n"
                "  sagebwd emit --causal top-left -o generated/\n"
                "  sagebwd emit --kernel backward --no-deterministic > backward.cu   # all "
                "gradients\n") {
    options.text("kernel", "KIND", kernel_, "which kernel; --list names them");
    options.text(
        "pass", "PASS", pass_,
        "forward or backward, where both have the kernel (default: the first that has it)");
    options.text("arch", "ARCH", arch_, "architecture");
    spec_.declare(options, /*lists=*/false);
    options.text(
        "tile", "TILE", tile_,
        "instead of the default, e.g. 128x128w8s1: queries x keys, warps, stages; of another "
        "family and with more blocks an SM 'wgmma 64x128 w4 s2 b3'");
    options.text("output", "DIR", output_, "or -o: write every kernel there, one file each");
    options.flag("list", list_, "list the operation's kernels");
  }

  ExitCode run() override {
    if (!tile_.empty() && kernel_.empty())
      throw UsageError("--tile belongs to one kernel: name it with --kernel");
    if (list_ && !output_.empty())
      throw UsageError("--list prints what there is and -o writes it: choose one");
    std::vector<KernelSpec> kernels = chosen_kernels();
    if (list_)
      return print_list(kernels);
    if (!output_.empty())
      return write_files(kernels);
    if (kernel_.empty())
      throw UsageError("name a kernel with --kernel, a folder with -o, or ask for --list");
    const KernelSource source = generate(kernels.front());
    return finish(json::Object{{"name", source.name},
                               {"threads", source.threads},
                               {"shared_bytes", source.shared_bytes},
                               {"source", source.text}},
                  [&] { fwrite(source.text.data(), 1, source.text.size(), stdout); });
  }

private:
  /// The operation's kernels that the options leave, in launch order.
  std::vector<KernelSpec> chosen_kernels() const {
    const Arch& arch = find_arch(arch_);
    const ResolvedSpec spec = resolved(spec_.one(options));
    std::vector<KernelSpec> chosen;
    std::vector<std::string> kinds;
    // Who names a kernel of the fused backward means it, also where it is not the default.
    const bool fused =
        kernel_ == to_string(KernelKind::backward) || kernel_ == to_string(KernelKind::round_dq);
    for (const KernelSpec& kernel :
         fused           ? kernels_of(Pass::backward, spec, arch, fused_tiles(spec, arch))
         : pass_.empty() ? distinct_kernels(spec, arch)
                         : kernels_of(parse_word<Pass>(pass_), spec, arch)) {
      const std::string kind(to_string(kernel.kind));
      if (!llvm::is_contained(kinds, kind))
        kinds.push_back(kind);
      if (kernel_.empty() || kind == kernel_)
        chosen.push_back(kernel);
    }
    if (chosen.empty())
      throw UsageError("--kernel is '" + kernel_ + "'; this operation has " +
                       llvm::join(kinds, " ") +
                       (fused ? "; a fused backward takes --no-deterministic, and where it is no "
                                "default a --tile, such as 'mma 64x128 w8 s1 b1'"
                              : suggestion(kernel_, kinds)));
    if (!tile_.empty()) {
      for (KernelSpec& kernel : chosen) {
        if (kernel.tile == TileConfig{})
          throw UsageError("--tile: " + kernel_ + " has no tile");
        kernel.tile = read_tile(tile_, kernel.tile);
      }
    }
    return chosen;
  }

  /// Those of mma, by default and on request with a fused backward.
  Tiles fused_tiles(const ResolvedSpec& spec, const Arch& arch) const {
    Tiles tiles = default_tiles(spec, arch, Family::mma);
    if (!tile_.empty() && !spec->deterministic)
      tiles[KernelKind::backward] = read_tile(tile_, {Family::mma, 0, 0, 0, 0, 1});
    return tiles;
  }

  ExitCode print_list(const std::vector<KernelSpec>& kernels) const {
    Table table;
    for (const KernelSpec& kernel : kernels) {
      const KernelSource source = generate(kernel);
      const bool tiled = !(kernel.tile == TileConfig{});
      table.add(
          {{"kernel", "kernel", std::string(to_string(kernel.kind))},
           {"pass", "pass", std::string(to_string(kernel.pass))},
           {"tile", "tile", tiled ? to_string(kernel.tile) : "", tiled ? "" : "-"},
           {"threads", "threads", source.threads},
           // Of those without tiles it is the compiler that says.
           {"shared_bytes", "shared bytes",
            tiled ? json::Value(source.shared_bytes) : json::Value(nullptr), tiled ? "" : "-"},
           {"name", "name", source.name}});
    }
    return finish(json::Object{{"kernels", table.json()}}, [&] { table.print(); });
  }

  ExitCode write_files(const std::vector<KernelSpec>& kernels) const {
    namespace fs = std::filesystem;
    std::error_code error;
    fs::create_directories(output_, error);
    if (error)
      throw std::runtime_error("cannot create " + output_ + ": " + error.message());
    std::vector<std::string> files;
    for (const KernelSpec& kernel : kernels) {
      const KernelSource source = generate(kernel);
      files.push_back(fs::path(output_) / (source.name + ".cu"));
      if (std::string why = write_output(files.back(), {&source.text}); !why.empty())
        throw std::runtime_error(why);
    }
    return finish(json::Object{{"files", json::Array(files)}}, [&] {
      for (const std::string& file : files)
        puts(file.c_str());
    });
  }

  SpecOptions spec_;
  std::string kernel_, pass_, arch_ = "sm_80", tile_, output_;
  bool list_ = false;
};

} // namespace

std::unique_ptr<Command> make_emit() { return std::make_unique<Emit>(); }

} // namespace sagebwd::tools
