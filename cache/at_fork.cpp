//===- at_fork.cpp - What a forked child finds ----------------------------===//

#include "cache/at_fork.h"

#include <algorithm>
#include <pthread.h>
#include <thread>
#include <vector>

namespace sagebwd {

/// Never destroyed: threads may fork while the process ends.
struct AtForkList {
  std::mutex making; ///< of NoFork, recursive by `maker` and `depth`: std::recursive_mutex knows
                     ///< its owner by a number that is another one in a child
  std::atomic<std::thread::id> maker{};
  int depth = 0;
  std::mutex mutex; ///< taken after `making`; of what follows
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

/// When the program is loaded: none can be forked while it is made.
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
