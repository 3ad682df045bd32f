//===- fiber.cpp - What a simulated thread's instructions do -----------------===//
//
// Those within a warp, cp.async and products; barriers.cpp and bulk_copies.cpp have the others.
//
//===----------------------------------------------------------------------===//

#include "tests/simulator/fiber.h"
#include "tests/simulator/machine.h"
#include "tests/simulator/products.h"

namespace simulator {

void Fiber::reset() {
  at_barrier = ended = unpublished = allowed = false;
  waits_for = nullptr;
  waits_at = nullptr;
  fences = 0;
  copies.clear();
  adds.clear();
}
void Fiber::check_end() {
  if (!adds.empty())
    fail("ends while its bulk adds may still read shared memory, at", adds[0].from);
}

std::string Fiber::block_text() const {
  return std::to_string(block.x) + ", " + std::to_string(block.y) + ", " + std::to_string(block.z);
}
void Fiber::fail(const char* what, long long value) {
  home->stop("thread " + std::to_string(thread.x) + " of block " + block_text() + ": " + what +
             (value < 0 ? "" : " " + std::to_string(value)));
}
void Fiber::fail_in(int line, const std::string& what) {
  fail((what + " in line " + std::to_string(line)).c_str());
}

void Fiber::together(const char* what, int line, void* mine, void (*operate)(void* const*)) {
  if (warp->arrived == 0) {
    warp->what = what;
    warp->line = line;
    warp->operate = operate;
  } else if (warp->operate != operate || warp->line != line) {
    home->stop("lanes of a warp part: one is at " + std::string(what) + " in line " +
               std::to_string(line) + ", others are at " + warp->what + " in line " +
               std::to_string(warp->line));
  }
  warp->brought[number] = mine;
  waits_for = what;
  this->line = line;
  if (++warp->arrived < kWarp)
    return home->pass_on(this);
  warp->arrived = 0;
  operate(warp->brought);
  warp->ready = ~0u;
  if (home->has_seed())
    return home->pass_on(this);
  warp->ready &= ~(1u << number);
}

void Fiber::wait_for_block(int line) {
  waits_for = "__syncthreads";
  this->line = line;
  home->wait_for_all(*this);
}

unsigned long long Fiber::shuffle(unsigned long long value, int from, int line) {
  struct Exchange {
    unsigned long long value, got;
    int from;
  } mine{value, value, from};
  together("shfl.sync", line, &mine, [](void* const* lanes) {
    for (unsigned i = 0; i < kWarp; ++i) {
      auto& one = *static_cast<Exchange*>(lanes[i]);
      one.got = static_cast<const Exchange*>(lanes[one.from])->value;
    }
  });
  return mine.got;
}

namespace {

/// A lane's part of an ldmatrix or a stmatrix.
struct RowAndWords {
  char* row;
  unsigned* r;

  static const RowAndWords& of(void* const* lanes, unsigned i) {
    return *static_cast<const RowAndWords*>(lanes[i]);
  }
};
void load_rows(void* const* lanes) {
  for (unsigned lane = 0; lane < kWarp; ++lane)
    for (unsigned matrix = 0; matrix < 4; ++matrix)
      std::memcpy(&RowAndWords::of(lanes, lane).r[matrix],
                  RowAndWords::of(lanes, 8 * matrix + lane / 4).row + 4 * (lane % 4), 4);
}
void load_columns(void* const* lanes) {
  for (unsigned lane = 0; lane < kWarp; ++lane)
    for (unsigned matrix = 0; matrix < 4; ++matrix) {
      const unsigned row = 8 * matrix + 2 * (lane % 4), column = lane / 4;
      uint16_t two[2];
      for (unsigned i = 0; i < 2; ++i)
        std::memcpy(&two[i], RowAndWords::of(lanes, row + i).row + 2 * column, 2);
      RowAndWords::of(lanes, lane).r[matrix] = two[0] | two[1] << 16;
    }
}

} // namespace

void Fiber::load_matrices(unsigned (&r)[4], unsigned address, bool transposed, int line) {
  RowAndWords mine{at(address, 16), r};
  together("ldmatrix", line, &mine, transposed ? load_columns : load_rows);
}
void Fiber::store_matrices(unsigned address, const unsigned (&r)[4], int line) {
  unsigned words[4];
  std::memcpy(words, r, sizeof(words));
  RowAndWords mine{at(address, 16), words};
  wrote(address, 16);
  together("stmatrix", line, &mine, [](void* const* lanes) {
    for (unsigned lane = 0; lane < kWarp; ++lane)
      for (unsigned matrix = 0; matrix < 4; ++matrix)
        std::memcpy(RowAndWords::of(lanes, 8 * matrix + lane / 4).row + 4 * (lane % 4),
                    &RowAndWords::of(lanes, lane).r[matrix], 4);
  });
}
unsigned Fiber::transpose(unsigned two, int line) {
  struct Part {
    unsigned two, turned;
  } mine{two, 0};
  together("movmatrix", line, &mine, [](void* const* lanes) {
    for (unsigned lane = 0; lane < kWarp; ++lane) {
      const unsigned column = lane / 4;
      const auto element = [&](unsigned row) {
        const auto& part = *static_cast<const Part*>(lanes[4 * row + column / 2]);
        return part.two >> 16 * (column % 2) & 0xffff;
      };
      static_cast<Part*>(lanes[lane])->turned =
          element(2 * (lane % 4)) | element(2 * (lane % 4) + 1) << 16;
    }
  });
  return mine.turned;
}

void Fiber::copy(unsigned to, const void* from) {
  copies.push_back({at(to, 16), from, group});
  if (home->coin())
    copies.back().take_place();
}
void Fiber::wait_for_copies(int pending) {
  std::erase_if(copies, [&](Copy& copy) {
    const bool due = copy.group < group - pending;
    if (due) {
      copy.take_place();
      unpublished = true;
    }
    return due;
  });
}

void Fiber::multiply(const WarpProduct& product) {
  together("mma.sync", 0, const_cast<WarpProduct*>(&product), [](void* const* lanes) {
    simulator::multiply(reinterpret_cast<const WarpProduct* const*>(lanes));
  });
}

void Fiber::multiply(const GroupProduct& product) {
  if (!allowed)
    fail("wgmma without a fence behind the last wait");
  if (unpublished)
    fail("wgmma without fence.proxy.async behind the copies that came before");
  together("wgmma", 0, const_cast<GroupProduct*>(&product), [](void* const* lanes) {
    Warp& warp = *static_cast<Fiber&>(lane()).warp;
    warp.products.push_back({{}, warp.group});
    warp.products.back().lanes.reserve(kWarp);
    ++warp.issued;
    for (unsigned i = 0; i < kWarp; ++i) {
      const auto& product = *static_cast<const GroupProduct*>(lanes[i]);
      const auto& first = *static_cast<const GroupProduct*>(lanes[0]);
      if (product.a_tile != first.a_tile || product.b_tile != first.b_tile ||
          product.accumulate != first.accumulate)
        lane().fail("wgmma's operands are not those of lane 0, in lane", i);
      warp.products.back().lanes.push_back(product);
    }
  });
}
void Fiber::perform_products(int last_group) {
  std::erase_if(warp->products, [&](const Warp::Issued& issued) {
    const bool due = issued.group <= last_group;
    if (due)
      simulator::multiply(issued.lanes.data(), thread.x / kWarp % 4, shared, shared_bytes);
    return due;
  });
}
void Fiber::commit_products() {
  together("wgmma.commit_group", 0, nullptr, [](void* const*) {
    Fiber& last = static_cast<Fiber&>(lane());
    if (last.home->coin())
      last.perform_products(last.warp->group);
    ++last.warp->group;
  });
}
void Fiber::wait_for_products(int pending) {
  allowed = false;
  together("wgmma.wait_group", 0, &pending, [](void* const* lanes) {
    Fiber& last = static_cast<Fiber&>(lane());
    last.perform_products(last.warp->group - 1 - *static_cast<int*>(lanes[0]));
  });
}

} // namespace simulator
