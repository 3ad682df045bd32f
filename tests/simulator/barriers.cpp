//===- barriers.cpp - mbarrier, bar.sync, setmaxnreg -------------------------===//

#include "tests/simulator/barriers.h"
#include "tests/simulator/machine.h"

#include <algorithm>

namespace simulator {

namespace {

constexpr int kMostBytes = (1 << 20) - 1; ///< that a phase can wait for, by the PTX ISA

/// Gives what an initialised barrier's 8 bytes hold.
uint64_t mark(unsigned address) { return 0x6d62617272696572 ^ address; }

std::string text(long number) { return std::to_string(number); }

} // namespace

std::string Mbarrier::name() const { return "the mbarrier at " + text(address); }
std::string Mbarrier::state() const {
  return " at " + text(address) + ", parity " + text(phase % 2) + ", which misses " +
         text(pending) + " arrivals and " + text(bytes) + " bytes,";
}
std::string NamedBarrier::state() const {
  return " " + text(number) + ", which " + text(arrived) + " of " + text(threads) +
         " threads have reached,";
}
bool Warpgroup::complete() const { return warps == 0xf; }
std::string Warpgroup::state() const {
  return complete() ? " to " + text(wanted) + " from " + text(held) + " with " + text(pool->left) +
                          " left in the pool"
                    : ", which not all of the warpgroup have reached,";
}

void Fiber::init_mbarrier(unsigned address, int arrivals, int line) {
  char* place = at(address, 8);
  if (arrivals < 1 || arrivals > kMostBytes)
    fail_in(line, "an mbarrier for " + text(arrivals) + " arrivals");
  const auto [found, fresh] = home->mbarriers.emplace(address, Mbarrier());
  Mbarrier& barrier = found->second;
  if (!fresh)
    fail_in(line, barrier.name() + " is initialised twice");
  barrier.address = address;
  barrier.arrivals = barrier.pending = arrivals;
  barrier.initialiser = this;
  barrier.initialised = home->synchronisations;
  const uint64_t bytes = mark(address);
  std::memcpy(place, &bytes, 8);
}
void Fiber::publish_mbarriers() {
  for (auto& [address, barrier] : home->mbarriers)
    barrier.published |= barrier.initialiser == this;
}

/// One that this thread may use.
Mbarrier& Fiber::mbarrier(unsigned address, int line) {
  const char* place = at(address, 8);
  const auto found = home->mbarriers.find(address);
  if (found == home->mbarriers.end())
    fail_in(line, "no mbarrier has been initialised at " + text(address));
  Mbarrier& barrier = found->second;
  const uint64_t bytes = mark(address);
  if (std::memcmp(place, &bytes, 8) != 0)
    fail_in(line, barrier.name() + " has been written over");
  if (barrier.initialiser->warp != warp && barrier.initialised == home->synchronisations)
    fail_in(line, "no synchronisation since " + barrier.name() + " was initialised");
  return barrier;
}
void Fiber::arrive(unsigned address, unsigned bytes, int line) {
  home->perhaps_yield(*this);
  Mbarrier& barrier = mbarrier(address, line);
  if (barrier.pending == 0)
    fail_in(line, "an arrival too many in phase " + text(barrier.phase) + " of " + barrier.name() +
                      ", which misses " + text(barrier.bytes) + " bytes,");
  if (bytes > kMostBytes || barrier.bytes + static_cast<int>(bytes) > kMostBytes)
    fail_in(line, barrier.name() + " cannot count so many bytes");
  --barrier.pending;
  barrier.bytes += static_cast<int>(bytes);
  settle(barrier, line);
}
void Fiber::count_bytes(const BulkCopy& copy) {
  Mbarrier& barrier = mbarrier(copy.barrier->address, copy.line);
  barrier.bytes -= static_cast<int>(copy.bytes);
  if (barrier.bytes < -kMostBytes)
    fail_in(copy.line, barrier.name() + " cannot count so many bytes");
  settle(barrier, copy.line);
}
/// Ends the phase if it is complete.
void Fiber::settle(Mbarrier& barrier, int line) {
  if (barrier.pending > 0 || barrier.bytes > 0)
    return;
  if (barrier.bytes < 0)
    fail_in(line, "phase " + text(barrier.phase) + " of " + barrier.name() + " has had " +
                      text(-barrier.bytes) + " bytes that nobody announced");
  // Whoever looks at the parity only now sees that of the phase that he has waited for.
  if (barrier.unseen > 0)
    fail_in(line, "phase " + text(barrier.phase) + " of " + barrier.name() +
                      " ends before all that waited for the last one have seen its end");
  ++barrier.phase;
  barrier.pending = barrier.arrivals;
  barrier.unseen = barrier.fibers.size();
  home->wake(barrier);
}
void Fiber::wait_for_phase(unsigned address, unsigned parity, int line) {
  home->perhaps_yield(*this);
  Mbarrier& barrier = mbarrier(address, line);
  if (parity > 1)
    fail_in(line, "a wait for parity " + text(parity));
  if (barrier.phase % 2 != parity)
    return;
  home->wait(*this, "the mbarrier", line, barrier);
  --barrier.unseen;
}

void Fiber::named_barrier(unsigned number, unsigned threads, bool waits, int line) {
  struct Part {
    unsigned number, threads, phase;
    int line;
    bool waits;
  } mine{number, threads, 0, line, waits};
  if (number == 0 || number >= kNamedBarriers)
    fail_in(line, "named barrier " + text(number));
  if (threads == 0 || threads % kWarp != 0 || threads > home->threads())
    fail_in(line, "named barrier " + text(number) + " of " + text(threads) + " threads");
  together(waits ? "bar.sync" : "bar.arrive", line, &mine, [](void* const* lanes) {
    Fiber& last = static_cast<Fiber&>(lane());
    const Part& all = *static_cast<Part*>(lanes[0]);
    NamedBarrier& barrier = last.home->named[all.number];
    for (unsigned i = 0; i < kWarp; ++i) {
      Part& part = *static_cast<Part*>(lanes[i]);
      if (part.number != all.number || part.threads != all.threads || part.waits != all.waits)
        last.fail_in(all.line, "lanes of a warp come to different named barriers");
      part.phase = barrier.phase;
    }
    const std::string name = "named barrier " + text(all.number);
    if (barrier.arrived > 0 && barrier.threads != all.threads)
      last.fail_in(all.line, name + " of " + text(all.threads) + " threads, but of " +
                                 text(barrier.threads) + " for those that came before");
    const uint32_t warp = 1u << last.thread.x / kWarp;
    if (barrier.warps & warp)
      last.fail_in(all.line, "the warp comes to " + name + " twice in a phase");
    barrier.warps |= warp;
    barrier.threads = all.threads;
    barrier.arrived += kWarp;
    if (barrier.arrived < barrier.threads)
      return;
    barrier.arrived = barrier.warps = 0;
    ++barrier.phase;
    ++last.home->synchronisations;
    last.home->wake(barrier);
  });
  NamedBarrier& barrier = home->named[number];
  if (waits && barrier.phase == mine.phase)
    home->wait(*this, "bar.sync", line, barrier);
}

namespace {

/// Gives and takes what has been asked for, as far as there is enough.
void share(Block& block) {
  RegisterPool& pool = block.registers;
  const auto possible = [&](const Warpgroup& group) {
    return group.complete() && group.wanted - group.held <= pool.left;
  };
  for (auto next = pool.groups.begin(); (next = std::find_if(pool.groups.begin(), pool.groups.end(),
                                                             possible)) != pool.groups.end();) {
    pool.left -= next->wanted - next->held;
    next->held = next->wanted;
    next->warps = 0;
    ++next->changes;
    block.wake(*next);
  }
}

} // namespace

void Fiber::set_registers(int registers, bool more, int line) {
  struct Part {
    int registers, line;
    bool more;
  } mine{registers, line, more};
  if (registers % 8 != 0 || registers < 24 || registers > 240)
    fail_in(line, "setmaxnreg of " + text(registers));
  const unsigned mine_of = thread.x / kWarpgroup;
  if (mine_of >= home->registers.groups.size())
    fail_in(line, "setmaxnreg in a warpgroup that is not whole");
  Warpgroup& group = home->registers.groups[mine_of];
  const unsigned changes = group.changes;
  together("setmaxnreg", line, &mine, [](void* const* lanes) {
    Fiber& last = static_cast<Fiber&>(lane());
    const Part& all = *static_cast<Part*>(lanes[0]);
    Warpgroup& group = last.home->registers.groups[last.thread.x / kWarpgroup];
    if (group.warps && (group.wanted != all.registers || group.more != all.more))
      last.fail_in(all.line, "warps of a warpgroup ask for different registers");
    if (all.more ? all.registers < group.held : all.registers > group.held)
      last.fail_in(all.line, std::string(all.more ? "take" : "give") + "_registers to " +
                                 text(all.registers) + " where there are " + text(group.held));
    group.wanted = all.registers;
    group.more = all.more;
    group.warps |= 1u << last.thread.x / kWarp % 4;
    share(*last.home);
  });
  if (group.changes == changes)
    home->wait(*this, "setmaxnreg", line, group);
}

} // namespace simulator
