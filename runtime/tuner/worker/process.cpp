//===- process.cpp - A worker process as its tuner sees it ----------------===//

#include "runtime/tuner/worker/process.h"
#include "runtime/parallel_for.h"
#include "runtime/tuner/worker/worker.h"

#include "llvm/ADT/StringExtras.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <fcntl.h>
#include <poll.h>
#include <spawn.h>
#include <stdexcept>
#include <sys/socket.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

namespace sagebwd::tuner {
namespace {

using namespace std::chrono_literals;

/// The bytes of standard error that are kept: enough for the last message of a driver or an
/// interpreter.
constexpr size_t kKeptErrors = 4096;
/// The longest time for ending a process that hangs in a GPU call; after it, the process is left
/// behind.
constexpr auto kReapLimit = 20s;
/// The time that a process which has closed its socket gets to end by itself, so that its exit code
/// can be read.
constexpr auto kLeaveLimit = 2s;

int checked(int result, const char* what) {
  if (result < 0)
    throw std::runtime_error(std::string("the tuner's worker cannot be started: ") + what + ": " +
                             std::strerror(errno));
  return result;
}

} // namespace

WorkerProcess::WorkerProcess(const std::vector<std::string>& command, int cubins) : line_(-1) {
  int line[2], errors[2];
  checked(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, line), "socketpair");
  if (::pipe2(errors, O_CLOEXEC) != 0) {
    ::close(line[0]);
    ::close(line[1]);
    checked(-1, "pipe");
  }
  socket_ = line[0];
  line_ = LineSocket(socket_, [this](bool to_write) { return wait(to_write); });
  errors_ = errors[0];
  ::fcntl(socket_, F_SETFL, O_NONBLOCK);
  ::fcntl(errors_, F_SETFL, O_NONBLOCK);

  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, line[1], kSocket);
  ::posix_spawn_file_actions_adddup2(&actions, errors[1], STDOUT_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, errors[1], STDERR_FILENO);
  ::posix_spawn_file_actions_adddup2(&actions, cubins, kCubins);
  // The caller may block signals or ignore some of them; the worker starts with the default
  // handlers and no blocked signals, as from a shell.
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none, all;
  ::sigemptyset(&none);
  ::sigfillset(&all);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setsigdefault(&attributes, &all);
  // The worker gets a process group of its own: Ctrl-C reaches only the tuner, and the worker ends
  // with the tuner.
  ::posix_spawnattr_setpgroup(&attributes, 0);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF |
                                              POSIX_SPAWN_SETPGROUP);

  std::vector<char*> arguments;
  for (const std::string& word : command)
    arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  const int error =
      ::posix_spawnp(&pid_, arguments[0], &actions, &attributes, arguments.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  ::close(line[1]);
  ::close(errors[1]);
  if (error != 0) {
    ::close(socket_);
    ::close(errors_);
    throw std::runtime_error("the tuner's worker '" + llvm::join(command, " ") +
                             "' cannot be started: " + std::strerror(error));
  }
}

WorkerProcess::~WorkerProcess() {
  if (!reaped_) {
    ::kill(pid_, SIGKILL);
    reap(kReapLimit);
  }
  ::close(socket_);
  ::close(errors_);
}

void WorkerProcess::read_errors() {
  char buffer[4096];
  int reads = 64; // a worker that writes without end must not block the tuner
  for (ssize_t count; reads-- > 0 && (count = ::read(errors_, buffer, sizeof(buffer))) > 0;) {
    error_text_.append(buffer, static_cast<size_t>(count));
    if (error_text_.size() > kKeptErrors)
      error_text_.erase(0, error_text_.size() - kKeptErrors);
  }
}

bool WorkerProcess::wait(bool to_write) {
  bool errors_open = true;
  while (true) {
    check_interrupt();
    const auto left = std::chrono::ceil<Milliseconds>(deadline_ - Clock::now());
    if (left <= 0ms)
      return false;
    pollfd fds[2] = {{socket_, static_cast<short>(to_write ? POLLOUT : POLLIN), 0},
                     {errors_, POLLIN, 0}};
    const int ready =
        ::poll(fds, errors_open ? 2 : 1, static_cast<int>(std::min(left, 100ms).count()));
    if (ready < 0 && errno != EINTR)
      return false;
    if (ready > 0 && errors_open && fds[1].revents) {
      read_errors();
      errors_open = !(fds[1].revents & POLLHUP);
    }
    if (ready > 0 && fds[0].revents)
      return true;
  }
}

bool WorkerProcess::send(const Order& order, Milliseconds limit) {
  deadline_ = Clock::now() + limit;
  return line_.say(line_of(order));
}

Heard WorkerProcess::hear(Report& report, Milliseconds limit) {
  deadline_ = Clock::now() + limit;
  std::string line;
  const Heard heard = line_.hear(line);
  const std::optional<Report> parsed = heard == Heard::line ? parse_report(line) : std::nullopt;
  if (!parsed)
    return heard == Heard::line ? Heard::garbage : heard;
  report = *parsed;
  return Heard::line;
}

bool WorkerProcess::reap(Milliseconds limit) {
  const Clock::time_point deadline = Clock::now() + limit;
  auto pause = 1ms;
  while (!reaped_) {
    const pid_t done = ::waitpid(pid_, &status_, WNOHANG);
    if (done == pid_ || (done < 0 && errno == ECHILD)) // ECHILD: the caller ignores SIGCHLD
      reaped_ = true;
    else if (Clock::now() >= deadline)
      return false;
    else {
      std::this_thread::sleep_for(pause);
      pause = std::min(2 * pause, Milliseconds(50));
    }
  }
  return true;
}

std::string WorkerProcess::end() {
  // Only a process that has closed the socket gets time to end by itself.
  char byte;
  const ssize_t peeked = ::recv(socket_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  const bool closed = peeked == 0 || (peeked < 0 && errno != EAGAIN);
  if (!reaped_ && !(closed && reap(kLeaveLimit))) {
    ::kill(pid_, SIGKILL);
    reap(kReapLimit);
  }
  read_errors();
  std::string text;
  if (!reaped_)
    text = "does not end, even killed (process " + std::to_string(pid_) + ")";
  else if (WIFSIGNALED(status_) && WTERMSIG(status_) == SIGKILL)
    text = "was ended"; // by the tuner, or by a system that is short of memory
  else if (WIFSIGNALED(status_))
    text = "was killed by signal " + std::to_string(WTERMSIG(status_)) + " (" +
           ::strsignal(WTERMSIG(status_)) + ")";
  else
    text = "ended with exit code " + std::to_string(WEXITSTATUS(status_));
  while (!error_text_.empty() && error_text_.back() == '\n')
    error_text_.pop_back();
  if (!error_text_.empty())
    text += "; it wrote: " + error_text_;
  return text;
}

} // namespace sagebwd::tuner
