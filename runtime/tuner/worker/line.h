//===- line.h - Lines over a socket -----------------------------------------===//
#pragma once

#include <functional>
#include <string>

namespace sagebwd::tuner {

enum class Heard {
  line,
  gone,    ///< the other end has hung up
  nothing, ///< before the wait was over
  garbage, ///< what none of ours says
};

/// One end of the line between a tuner and its worker. Raises no signal where the other is gone.
class LineSocket {
public:
  /// Waits until a socket that does not block can be read or written; false ends the attempt.
  using Wait = std::function<bool(bool to_write)>;
  explicit LineSocket(int socket, Wait wait = nullptr) : socket_(socket), wait_(std::move(wait)) {}

  /// False where the other end is gone, or the wait is over.
  bool say(const std::string& line);
  Heard hear(std::string& line);

private:
  int socket_;
  Wait wait_;
  std::string received_;
  size_t searched_ = 0; ///< of `received_`, without a newline
};

} // namespace sagebwd::tuner
