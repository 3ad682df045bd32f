//===- processes.h - Children that report by their exit status -------------===//
#pragma once

#include <csignal>
#include <functional>
#include <sys/wait.h>
#include <unistd.h>

namespace sagebwd::test {

inline constexpr int kNotPermitted = 77; ///< an exit status: the case cannot be set up here

/// Runs `work` in a child; its result is the exit status.
inline pid_t start(const std::function<int()>& work) {
  pid_t child = ::fork();
  if (child == 0) {
    int status = 255;
    try {
      status = work();
    } catch (...) { // nothing may reach the frames of the test above
    }
    ::_exit(status);
  }
  return child;
}

/// The child's exit status; -1 where it was killed.
inline int finish(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

/// Until a child has stopped itself with SIGSTOP.
inline bool wait_until_stopped(pid_t child) {
  int status = 0;
  return ::waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status);
}

/// Holds children back until all are there: they wait, the parent opens.
class Gate {
public:
  Gate() {
    if (::pipe(ends_) != 0)
      ends_[0] = ends_[1] = -1;
  }
  ~Gate() {
    open();
    ::close(ends_[0]);
  }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  /// In a child. A pipe ends once nobody can write to it.
  void wait() {
    open();
    char byte;
    while (::read(ends_[0], &byte, 1) > 0)
      ;
  }
  void open() {
    if (ends_[1] >= 0)
      ::close(ends_[1]);
    ends_[1] = -1;
  }

private:
  int ends_[2];
};

} // namespace sagebwd::test
