//===- signals.h - Keep the process's signal handlers while NVRTC runs ----===//
//
// The front end of NVRTC calls signal() for SIGINT, SIGTERM and SIGXFSZ while it parses a source,
// and its handler ends the process with code 4. Ctrl-C during a compilation would then end a Python
// program without KeyboardInterrupt, and SIGTERM would end a training run before it could save its
// state. NVRTC also restores the earlier handler with signal(), which loses the flags that the
// program passed to sigaction().
//
//===----------------------------------------------------------------------===//
#pragma once

namespace sagebwd::nvrtc {

/// From this call on, signal() changes nothing when the library of this dlopen() handle calls it.
/// The rest of the process is not affected. Returns false if the library does not import signal(),
/// or if its table of imported functions cannot be written.
bool keep_signal_handlers(void* library);

} // namespace sagebwd::nvrtc
