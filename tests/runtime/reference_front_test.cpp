//===- reference_front_test.cpp - Norm and RoPE on the CPU ------------------===//
#include "runtime/reference/front.h"

#include "gtest/gtest.h"

#include <cmath>

using namespace sagebwd::reference;

namespace {

enum class Rms { none, own, given, given_per_head };

std::vector<float> waves(int64_t count, double from) {
  std::vector<float> values;
  for (int64_t i = 0; i < count; ++i)
    values.push_back(float(std::sin(from + 1.7 * double(i))));
  return values;
}

FrontInputs front_case(Rms rms, bool gain_per_head, bool interleaved) {
  FrontInputs in{.batch = 2, .heads = 3, .tokens = 4, .head_dim = 12};
  in.x = waves(2 * 3 * 4 * 12, 1), in.dy = waves(2 * 3 * 4 * 12, 2);
  in.normed = rms != Rms::none, in.eps = 0.25;
  if (in.normed)
    in.gain = waves((gain_per_head ? 3 : 1) * 12, 3);
  if (rms == Rms::given || rms == Rms::given_per_head)
    in.inv_rms = waves(2 * 4 * (rms == Rms::given ? 1 : 3), 4);
  in.cos = waves(2 * 4 * 4, 5), in.sin = waves(2 * 4 * 4, 6);
  in.rope_begin = 2, in.interleaved = interleaved;
  return in;
}

double loss_of_front(const FrontInputs& in) {
  const FrontOutputs found = exact_front(in);
  double sum = 0;
  for (size_t i = 0; i < found.y.size(); ++i)
    sum += found.y[i] * in.dy[i];
  return sum;
}

/// Expects what differences of the loss say of an input, whose gradient `found` is.
void expect_slopes(FrontInputs in, std::vector<float> FrontInputs::*input,
                   const std::vector<double>& found, const char* name) {
  ASSERT_EQ((in.*input).size(), found.size()) << name;
  for (size_t i = 0; i < found.size(); ++i) {
    float& value = (in.*input)[i];
    const float before = value, above = before + 0x1p-10f, below = before - 0x1p-10f;
    value = above;
    const double loss_above = loss_of_front(in);
    value = below;
    const double loss_below = loss_of_front(in);
    value = before;
    EXPECT_NEAR(found[i], (loss_above - loss_below) / (double(above) - below), 3e-5)
        << name << " " << i;
  }
}

TEST(ExactFront, GradientsAreSlopes) {
  for (Rms rms : {Rms::none, Rms::own, Rms::given, Rms::given_per_head})
    for (bool gain_per_head : {false, true})
      for (bool interleaved : {false, true}) {
        const FrontInputs in = front_case(rms, gain_per_head, interleaved);
        const FrontOutputs found = exact_front(in);
        expect_slopes(in, &FrontInputs::x, found.dx, "x");
        expect_slopes(in, &FrontInputs::gain, found.dgain, "gain");
        if (rms == Rms::given_per_head)
          expect_slopes(in, &FrontInputs::inv_rms, found.dinv_rms, "1/rms");
        if (rms != Rms::given)
          continue;
        std::vector<double> shared(2 * 4); // what heads share has the sum of theirs
        for (size_t row = 0; row < found.dinv_rms.size(); ++row)
          shared[row / 12 * 4 + row % 4] += found.dinv_rms[row];
        expect_slopes(in, &FrontInputs::inv_rms, shared, "1/rms");
      }
}

TEST(ExactFront, KnownResults) {
  FrontInputs in{.batch = 1, .heads = 1, .tokens = 1, .head_dim = 4};
  in.x = {2, 2, 2, 2}, in.dy = {0, 0, 0, 0};
  in.normed = true, in.gain = {1, 2, 3, 1};
  EXPECT_EQ(exact_front(in).y, (std::vector<double>{1, 2, 3, 1}));
  in.eps = 12;
  EXPECT_EQ(exact_front(in).y, (std::vector<double>{.5, 1, 1.5, .5}));
  in.x = {3, 4, 0, 0};
  in.normed = false, in.gain.clear();
  in.cos = {0, 1}, in.sin = {1, 0}; // a quarter turn of the first pair
  EXPECT_EQ(exact_front(in).y, (std::vector<double>{0, 4, 3, 0}));
  in.interleaved = true;
  EXPECT_EQ(exact_front(in).y, (std::vector<double>{-4, 3, 0, 0}));
  in.cos = {0}, in.sin = {1}, in.rope_begin = 1;
  EXPECT_EQ(exact_front(in).y, (std::vector<double>{3, 0, 4, 0}));
}

} // namespace
