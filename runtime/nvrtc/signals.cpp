//===- signals.cpp - Keep the process's signal handlers while NVRTC runs --===//

#include "runtime/nvrtc/signals.h"

#include <csignal>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace sagebwd::nvrtc {

namespace {

using Handler = void (*)(int);

/// The library calls this function instead of signal(). The function changes nothing and returns
/// the present handler.
Handler present_handler(int number, Handler) {
  struct sigaction action {};
  return ::sigaction(number, nullptr, &action) == 0 ? action.sa_handler : SIG_ERR;
}

/// The parts of a loaded library's dynamic section that name its imported functions.
struct Imports {
  const ElfW(Sym) * symbols = nullptr;
  const char* names = nullptr;
  const ElfW(Rela) * slots = nullptr;
  size_t slots_bytes = 0;

  explicit Imports(const link_map& map) {
    // glibc adds the library's address to these entries; other C libraries do not.
    const auto at = [&map](const ElfW(Dyn) * entry) {
      const ElfW(Addr) address = entry->d_un.d_ptr;
      return address < map.l_addr ? address + map.l_addr : address;
    };
    for (const ElfW(Dyn)* entry = map.l_ld; entry->d_tag != DT_NULL; ++entry)
      if (entry->d_tag == DT_SYMTAB)
        symbols = reinterpret_cast<const ElfW(Sym)*>(at(entry));
      else if (entry->d_tag == DT_STRTAB)
        names = reinterpret_cast<const char*>(at(entry));
      else if (entry->d_tag == DT_JMPREL)
        slots = reinterpret_cast<const ElfW(Rela)*>(at(entry));
      else if (entry->d_tag == DT_PLTRELSZ)
        slots_bytes = entry->d_un.d_val;
  }
};

/// Replaces the function in a slot. The page of `slot` stays writable, as in every library that is
/// bound lazily, because other contents of the page may have to be writable.
bool write(Handler (**slot)(int, Handler), Handler (*function)(int, Handler)) {
  const auto page_bytes = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  void* const page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(slot) & -page_bytes);
  if (::mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0)
    return false;
  __atomic_store_n(slot, function, __ATOMIC_RELEASE);
  return true;
}

} // namespace

bool keep_signal_handlers(void* library) {
  link_map* map = nullptr;
  if (::dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || !map)
    return false;
  const Imports imports(*map);
  if (!imports.symbols || !imports.names || !imports.slots)
    return false;
  bool written = false;
  for (size_t i = 0; i < imports.slots_bytes / sizeof(ElfW(Rela)); ++i) {
    const ElfW(Rela)& slot = imports.slots[i];
    const char* name = imports.names + imports.symbols[ELF64_R_SYM(slot.r_info)].st_name;
    if (std::strcmp(name, "signal") == 0)
      written |= write(reinterpret_cast<Handler (**)(int, Handler)>(map->l_addr + slot.r_offset),
                       present_handler);
  }
  return written;
}

} // namespace sagebwd::nvrtc
