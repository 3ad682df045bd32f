//===- at_fork.cpp - Make fork() safe for mutexes and singletons ----------===//

#include "cache/at_fork.h"

#include <algorithm>
#include <pthread.h>
#include <thread>
#include <vector>

namespace sagebwd {

/// The list of AtFork objects, which is never destroyed, because threads may fork while the process
/// ends.
struct AtForkList {
  /// Locked by NoFork, and recursive by `maker` and `depth`. A std::recursive_mutex would not work,
  /// because it stores its owner's thread number, which is another number in a child.
  std::mutex making;
  std::atomic<std::thread::id> maker{};
  int depth = 0;
  std::mutex mutex; ///< locked after `making`; guards the members below
  std::vector<AtFork*> entries;

  static AtForkList& instance() {
    static AtForkList& list = *[] {
      auto* made = new AtForkList;
      ::pthread_atfork([] { instance().before(); }, [] { instance().after(&AtFork::in_parent_); },
                       [] { instance().after(&AtFork::in_child_); });
      return made;
    }();
    return list;
  }

  void hold_forks() {
    if (maker.load() != std::this_thread::get_id())
      making.lock();
    maker = std::this_thread::get_id();
    ++depth;
  }
  void let_forks() {
    if (--depth > 0)
      return;
    maker = std::thread::id();
    making.unlock();
  }
  void before() {
    hold_forks();
    mutex.lock();
    for (AtFork* entry : entries)
      if (entry->before_)
        entry->before_();
  }
  void after(AtFork::Step AtFork::*step) {
    for (AtFork* entry : entries)
      if (entry->*step)
        (entry->*step)();
    mutex.unlock();
    let_forks();
  }
};

/// The list is made when the program is loaded, so that no fork can happen while it is made.
[[maybe_unused]] static AtForkList& made_when_loaded = AtForkList::instance();

NoFork::NoFork() { AtForkList::instance().hold_forks(); }
NoFork::~NoFork() { AtForkList::instance().let_forks(); }

AtFork::AtFork(Step before, Step in_parent, Step in_child)
    : before_(std::move(before)), in_parent_(std::move(in_parent)), in_child_(std::move(in_child)) {
  AtForkList& list = AtForkList::instance();
  const std::lock_guard lock(list.mutex);
  list.entries.push_back(this);
}

AtFork::~AtFork() {
  AtForkList& list = AtForkList::instance();
  const std::lock_guard lock(list.mutex);
  list.entries.erase(std::find(list.entries.begin(), list.entries.end(), this));
}

} // namespace sagebwd
