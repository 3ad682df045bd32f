//===- line.h - Send and receive lines over a socket ----------------------===//
#pragma once

#include <functional>
#include <string>

namespace sagebwd::tuner {

enum class Heard {
  line,
  gone,    ///< the other end has closed the socket
  nothing, ///< no line before the wait ended
  garbage, ///< a line longer than any of the protocol
};

/// One end of the connection between a tuner and its worker. If the other end is gone, no signal is
/// raised.
class LineSocket {
public:
  /// Waits until a non-blocking socket can be read or written. If it returns false, the attempt
  /// ends.
  using Wait = std::function<bool(bool to_write)>;
  explicit LineSocket(int socket, Wait wait = nullptr) : socket_(socket), wait_(std::move(wait)) {}

  /// Returns false if the other end is gone or the wait has ended.
  bool say(const std::string& line);
  Heard hear(std::string& line);

private:
  int socket_;
  Wait wait_;
  std::string received_;
  size_t searched_ = 0; ///< the bytes of `received_` that have no newline
};

} // namespace sagebwd::tuner
