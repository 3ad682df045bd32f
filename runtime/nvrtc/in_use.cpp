//===- in_use.cpp - Count the threads inside NVRTC ------------------------===//

#include "runtime/nvrtc/in_use.h"
#include "cache/at_fork.h"
#include "runtime/error.h"

#include <atomic>
#include <mutex>
#include <string>
#include <unistd.h>

namespace sagebwd::nvrtc {

namespace {

/// fork() copies memory while other threads run. During a fork no thread may enter or leave NVRTC:
/// otherwise the child could have NVRTC's mutex locked and a count from before.
struct Users {
  std::mutex mutex;
  int count = 0; ///< of threads inside NVRTC; guarded by `mutex`
  /// The process that forked while a thread was inside NVRTC; 0: none.
  std::atomic<pid_t> forked_by{0};
  AtFork at_fork{[this] { mutex.lock(); }, [this] { mutex.unlock(); },
                 [this] {
                   if (count > 0 && forked_by == 0)
                     forked_by = ::getppid();
                   count = 0; // the child does not have those threads
                   mutex.unlock();
                 }};
};

/// The object is never destroyed, because threads may compile while the process ends. The object is
/// made when the program is loaded: a function-local static would not exist in a child that is
/// forked during the first call of the function.
Users& users = *new Users;

} // namespace

InUse::InUse() {
  raise_if_unusable();
  const std::lock_guard lock(users.mutex);
  ++users.count;
}

InUse::~InUse() {
  const std::lock_guard lock(users.mutex);
  --users.count;
}

void raise_if_unusable() {
  if (const pid_t parent = users.forked_by)
    throw LibraryError(
        "NVRTC cannot be used in this process: it was forked by process " + std::to_string(parent) +
        " while a thread there compiled, and a lock within NVRTC that the thread held stays "
        "locked here. Kernels that are kept in the cache or in packs can be used. Build what "
        "children need before they are forked, start them in another way (multiprocessing's spawn "
        "or forkserver), or make a pack with `sagebwd prebuild` and name it in "
        "SAGEBWD_CACHE_PACKS.");
}

} // namespace sagebwd::nvrtc
