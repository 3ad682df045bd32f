//===- in_use.cpp - Which threads are within NVRTC, for those that fork -----===//

#include "runtime/nvrtc/in_use.h"
#include "cache/at_fork.h"
#include "runtime/error.h"

#include <atomic>
#include <mutex>
#include <string>
#include <unistd.h>

namespace sagebwd::nvrtc {

namespace {

/// fork() copies memory while other threads run on, so none may enter or leave meanwhile: the child
/// might have NVRTC's mutex locked and the count of before.
struct Users {
  std::mutex mutex;
  int count = 0;                   ///< of threads; `mutex` is its
  std::atomic<pid_t> forked_by{0}; ///< the process that forked at a bad moment; 0: none did
  AtFork at_fork{[this] { mutex.lock(); }, [this] { mutex.unlock(); },
                 [this] {
                   if (count > 0 && forked_by == 0)
                     forked_by = ::getppid();
                   count = 0; // those threads are not here
                   mutex.unlock();
                 }};
};

/// Never destroyed: threads may compile while the process ends. Made when the program is loaded, as
/// a child that is forked within the first call of a function would not find it made.
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
