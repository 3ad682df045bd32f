//===- signals.h - NVRTC leaves the process's signal handlers alone ---------===//
//
// The front end of NVRTC calls signal() for SIGINT, SIGTERM and SIGXFSZ while it parses a source,
// and its handler ends the process with code 4. Ctrl-C during a compilation would then end a Python
// program without KeyboardInterrupt, and SIGTERM would end a training run before it could save its
// state. It also puts the earlier handler back with signal(), which loses the flags that the
// program gave to sigaction().
//
//===----------------------------------------------------------------------===//
#pragma once

namespace sagebwd::nvrtc {

/// From now on, signal() changes nothing when the library of this dlopen() handle calls it. The
/// rest of the process is not affected. False if the library does not import signal(), or if its
/// table of imported functions cannot be written.
bool keep_signal_handlers(void* library);

} // namespace sagebwd::nvrtc
