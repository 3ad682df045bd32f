// What most sources include, parsed once where they are compiled a second time with sanitizers. The
// library itself is compiled without it, so that each source includes what it uses.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>
