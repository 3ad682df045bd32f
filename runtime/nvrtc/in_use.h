//===- in_use.h - Count the threads inside NVRTC --------------------------===//
//
// NVRTC holds a mutex of its own for most of a compilation. If a process forks meanwhile, the mutex
// is locked for ever in the child, and every compilation in the child would wait for it. So the
// child must raise an error instead of compiling.
//
//===----------------------------------------------------------------------===//
#pragma once

namespace sagebwd::nvrtc {

/// A thread is inside NVRTC while this object lives. The constructor raises LibraryError as
/// raise_if_unusable() does.
class InUse {
public:
  InUse();
  ~InUse();
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
};

/// Raises LibraryError if this process, or one of its ancestors, was forked while a thread of its
/// parent was inside NVRTC.
void raise_if_unusable();

} // namespace sagebwd::nvrtc
