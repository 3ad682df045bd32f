//===- cubins.cpp - Pass machine code to workers --------------------------===//

#include "runtime/tuner/worker/cubins.h"

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace sagebwd::tuner {

Cubins::Cubins() : descriptor_(::memfd_create("sagebwd-cubins", MFD_CLOEXEC)) {
  if (descriptor_ < 0)
    throw std::runtime_error(std::string("the tuner cannot hand over its kernels: ") +
                             std::strerror(errno));
}
Cubins::~Cubins() { ::close(descriptor_); }

void Cubins::add(BenchKernel& kernel) {
  kernel.cubin_at = bytes_;
  kernel.cubin_bytes = kernel.cubin.size();
  for (size_t done = 0; done < kernel.cubin.size();) {
    const ssize_t count =
        ::write(descriptor_, kernel.cubin.data() + done, kernel.cubin.size() - done);
    if (count < 0 && errno != EINTR)
      throw std::runtime_error(std::string("the tuner cannot hand over its kernels: ") +
                               std::strerror(errno));
    done += count > 0 ? static_cast<size_t>(count) : 0;
  }
  bytes_ += kernel.cubin.size();
}

void read_cubin(int descriptor, BenchKernel& kernel) {
  struct stat file;
  if (::fstat(descriptor, &file) != 0 ||
      kernel.cubin_bytes > static_cast<size_t>(file.st_size)) // before it is allocated
    throw std::runtime_error("the tuner did not hand over the machine code of " + kernel.name);
  kernel.cubin.resize(kernel.cubin_bytes);
  if (::pread(descriptor, kernel.cubin.data(), kernel.cubin_bytes,
              static_cast<off_t>(kernel.cubin_at)) != static_cast<ssize_t>(kernel.cubin_bytes))
    throw std::runtime_error("the tuner did not hand over the machine code of " + kernel.name);
}

} // namespace sagebwd::tuner
