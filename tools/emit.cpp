//===- emit.cpp - Print the generated source of a kernel -------------------===//
#include "generator/emit.h"
#include "cache/whole_file.h"
#include "generator/choice.h"
#include "generator/operation.h"
#include "generator/ptxas.h"
#include "generator/space.h"
#include "runtime/generate.h"
#include "tools/command.h"
#include "tools/spec_options.h"

#include "llvm/ADT/STLExtras.h"
#include "llvm/ADT/StringExtras.h"

#include <cctype>
#include <filesystem>

namespace sagebwd::tools {

namespace {

namespace json = llvm::json;

/// Reads a tile. Spaces and rare fields may be left out: "128x128w8s2" has the family of `like` and
/// one block per SM.
TileConfig read_tile(std::string typed, const TileConfig& like) {
  if (std::isdigit(static_cast<unsigned char>(typed.front())))
    typed.insert(0, value_text(like.family) + " ");
  visit_fields(usual<TileConfig>(), [&]<typename T>(const Label& label, const T& value) {
    const std::string mark(label.mark), letter = llvm::StringRef(mark).ltrim().str();
    if (!letter.empty() && value != T() && typed.find(letter) == std::string::npos)
      typed += mark + value_text(value);
    else if (!letter.empty())
      for (size_t at = 1; (at = typed.find(letter, at)) != std::string::npos; at += mark.size())
        if (std::isdigit(static_cast<unsigned char>(typed[at - 1])))
          typed.replace(at, letter.size(), mark);
  });
  return parse_tile(typed);
}

class Emit : public Command {
public:
  Emit()
      : Command("emit", "print the generated CUDA source of a kernel",
                "Prints complete CUDA C++ without includes. NVRTC and nvcc compile it unchanged.\n"
                "\n"
                "examples:\n"
                "  sagebwd emit --list\n"
                "  sagebwd emit --kernel forward --arch sm_80 --head-dim 64 > forward.cu\n"
                "  sagebwd emit --kernel forward --tile 128x128w8s2\n"
                "  sagebwd emit --causal top-left -o generated/\n"
                "  sagebwd emit --kernel backward --gradient-kernels fused > fused.cu\n") {
    options.text("kernel", "KIND", kernel_, "which kernel, as --list names them");
    options.offer(words_of<KernelKind>());
    options.text("pass", "PASS", pass_,
                 "forward or backward, if both have the kernel (default: the first that has it)");
    options.offer(words_of<Pass>());
    options.text("arch", "ARCH", arch_,
                 "architecture, or native for that of this machine's first GPU (default: native, "
                 "or sm_80 where there is no GPU)");
    std::vector<std::string> archs = arch_names();
    archs.emplace_back("native");
    options.offer(archs);
    spec_.declare(options, /*lists=*/false);
    options.text(
        "tile", "TILE", tile_,
        "the tile to use instead of the default: queries x keys, warps and stages, such as "
        "128x128w8s2; or in full, with the family and the blocks per SM, such as "
        "'wgmma 64x128 w4 s2 b3'");
    options.text("output", "DIR", output_,
                 "(or -o DIR) write every kernel into this folder, one file each");
    options.flag("list", list_, "list the operation's kernels");
  }

  ExitCode run() override {
    if (!tile_.empty() && kernel_.empty())
      throw UsageError("--tile belongs to one kernel: name it with --kernel");
    if (list_ && !output_.empty())
      throw UsageError("--list prints the kernels' names and -o writes the kernels: choose one");
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
                               {"options", json::Array(source.options)},
                               {"ptxas_row", row_name(kernels.front())},
                               {"source", source.text}},
                  [&] { fwrite(source.text.data(), 1, source.text.size(), stdout); });
  }

private:
  /// The row of generator/ptxas.cpp that its options come from.
  static json::Value row_name(const KernelSpec& kernel) {
    const PtxasRow* row = ptxas_row(kernel);
    return row ? json::Value(row->name) : json::Value(nullptr);
  }

  /// The kernels of the operation that the options select, in launch order.
  std::vector<KernelSpec> chosen_kernels() const {
    const std::string name = !arch_.empty() ? arch_ : has_gpu() ? "native" : "sm_80";
    const Arch arch = name == "native" ? parse_archs({name}).front() : find_arch(name);
    const ResolvedSpec spec = resolved(spec_.one(options));
    std::vector<KernelSpec> chosen;
    std::vector<std::string> kinds;
    for (const KernelSpec& kernel : candidates(spec, arch)) {
      const std::string kind(to_string(kernel.kind));
      if (!llvm::is_contained(kinds, kind))
        kinds.push_back(kind);
      if (kernel_.empty() || kind == kernel_)
        chosen.push_back(kernel);
    }
    if (chosen.empty())
      throw UsageError(
          "--kernel is '" + kernel_ + "'; this " + (pass_.empty() ? "operation" : pass_ + " pass") +
          " has " + llvm::join(kinds, " ") +
          (is_of_backward() ? other_backward(spec, arch) : suggestion(kernel_, kinds)));
    if (!tile_.empty()) {
      for (KernelSpec& kernel : chosen) {
        if (kernel.tile == TileConfig{})
          throw UsageError("--tile: " + kernel_ + " has no tile");
        kernel.tile = read_tile(tile_, kernel.tile);
      }
    }
    return chosen;
  }

  /// The kernels among which --kernel chooses. A backward that the architecture cannot have is no
  /// obstacle to a kernel of the forward.
  std::vector<KernelSpec> candidates(const ResolvedSpec& spec, const Arch& arch) const {
    if (!tile_.empty() && is_of_backward())
      return Operation(spec, arch, backward_tiles(spec, arch)).kernels(Pass::backward);
    if (!pass_.empty())
      return Operation(spec, arch).kernels(parse_word<Pass>(pass_));
    try {
      return Operation(spec, arch).distinct_kernels();
    } catch (const SpecError&) {
      std::vector<KernelSpec> forward = Operation(spec, arch).distinct_kernels(/*backward=*/false);
      const bool has_it = llvm::any_of(
          forward, [&](const KernelSpec& kernel) { return to_string(kernel.kind) == kernel_; });
      const bool one = !list_ && output_.empty(); // the others of its kind are not asked for
      if (kernel_.empty() || (kind_named() && !(has_it && (one || kernel_ == "forward"))))
        throw;
      return forward;
    }
  }

  bool is_of_backward() const {
    using enum KernelKind;
    const KernelKind kinds[] = {backward, round_dq, backward_dq, backward_dkv};
    return llvm::is_contained(kinds, kind_named());
  }
  std::optional<KernelKind> kind_named() const {
    for (const auto& [kind, name] : Words<KernelKind>::all)
      if (kernel_ == name)
        return kind;
    return std::nullopt;
  }
  bool names_fused() const {
    return kind_named() == KernelKind::backward || kind_named() == KernelKind::round_dq;
  }

  /// A tile for a kernel of the backward selects that backward (split or fused), even if the other
  /// one is the default.
  Tiles backward_tiles(const ResolvedSpec& spec, const Arch& arch) const {
    if (!names_fused())
      return {{*kind_named(), default_tile(*kind_named(), spec, arch)}};
    if (spec->deterministic && !orders_dq(spec))
      return {};
    return {{KernelKind::backward, read_tile(tile_, {Family::mma, 0, 0, 0, 0, 1})}};
  }

  /// Says how to select the backward that is not the default.
  std::string other_backward(const ResolvedSpec& spec, const Arch& arch) const {
    if (!names_fused())
      return "; its backward is fused: --gradient-kernels split, or a --tile, makes it split";
    AttentionSpec fused = spec;
    fused.gradient_kernels = Backward::fused;
    try {
      default_fused_tile(resolved(fused), arch);
    } catch (const SpecError& error) {
      return std::string("; its backward is split and cannot be fused: ") + error.what();
    }
    return "; its backward is split: --gradient-kernels fused makes it fused";
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
           // For kernels without tiles only the compiler knows.
           {"shared_bytes", "shared bytes",
            tiled ? json::Value(source.shared_bytes) : json::Value(nullptr), tiled ? "" : "-"},
           {"name", "name", source.name}});
    }
    const Arch& arch = kernels.front().arch;
    return finish(
        json::Object{{"kernels", table.json()}, {"default_tiles", origin_of_default_tiles(arch)}},
        [&] {
          table.print();
          printf("%s\n", origin_in_words(arch).c_str());
        });
  }

  ExitCode write_files(const std::vector<KernelSpec>& kernels) const {
    namespace fs = std::filesystem;
    std::error_code error;
    fs::create_directory(output_, error); // its parent has to be there, as for every file
    if (error)
      throw std::runtime_error("cannot create the folder " + output_ + ": " + error.message());
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
  std::string kernel_, pass_, arch_, tile_, output_;
  bool list_ = false;
};

} // namespace

std::unique_ptr<Command> make_emit() { return std::make_unique<Emit>(); }

} // namespace sagebwd::tools
