//===- in_use.h - Which threads are within NVRTC, for those that fork -------===//
//
// NVRTC holds a mutex of its own for most of a compilation. A child that is forked meanwhile has it
// locked for ever, and every compilation there would wait for it.
//
//===----------------------------------------------------------------------===//
#pragma once

namespace sagebwd::nvrtc {

/// A thread is within NVRTC for as long as this lives. LibraryError as raise_if_unusable() says.
class InUse {
public:
  InUse();
  ~InUse();
  InUse(const InUse&) = delete;
  InUse& operator=(const InUse&) = delete;
};

/// LibraryError in a process that was forked while a thread of its parent was within NVRTC, and in
/// those that it forks.
void raise_if_unusable();

} // namespace sagebwd::nvrtc
