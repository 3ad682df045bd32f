//===- line.cpp - Send and receive lines over a socket --------------------===//

#include "runtime/tuner/worker/line.h"

#include <cerrno>
#include <sys/socket.h>

namespace sagebwd::tuner {
namespace {

/// The longest line has an operation's kernels and their specs: some kilobytes.
constexpr size_t kLongestLine = size_t{1} << 20;

} // namespace

bool LineSocket::say(const std::string& line) {
  for (size_t done = 0; done < line.size();) {
    const ssize_t count = ::send(socket_, line.data() + done, line.size() - done, MSG_NOSIGNAL);
    if (count > 0)
      done += static_cast<size_t>(count);
    else if (errno != EINTR && (errno != EAGAIN || !wait_(/*to_write=*/true)))
      return false;
  }
  return true;
}

Heard LineSocket::hear(std::string& line) {
  size_t end;
  while ((end = received_.find('\n', searched_)) == std::string::npos) {
    searched_ = received_.size();
    if (received_.size() > kLongestLine)
      return Heard::garbage;
    char buffer[65536];
    const ssize_t count = ::recv(socket_, buffer, sizeof(buffer), 0);
    if (count > 0)
      received_.append(buffer, static_cast<size_t>(count));
    else if (count == 0 || (errno != EAGAIN && errno != EINTR))
      return Heard::gone;
    else if (errno == EAGAIN && !wait_(/*to_write=*/false))
      return Heard::nothing;
  }
  line = received_.substr(0, end);
  received_.erase(0, end + 1);
  searched_ = 0;
  return Heard::line;
}

} // namespace sagebwd::tuner
