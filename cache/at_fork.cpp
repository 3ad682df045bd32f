//===- at_fork.cpp - What a forked child finds ------------------------------===//

#include "cache/at_fork.h"

#include <algorithm>
#include <pthread.h>
#include <vector>

namespace sagebwd {

/// Never destroyed: threads may fork while the process ends.
struct AtForkList {
  std::mutex mutex;
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

  void before() {
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
  }
};

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
