// SPDX-License-Identifier: Apache-2.0
// The check of gradients against fp64: it accepts what a run gives, and finds one wrong value in any of them.
#include "ops/attention_backward/backward_accuracy.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "comm/self.hpp"
#include "ops/jobs/op_entry.hpp"

namespace ringattn::testing {
namespace {

class NothingGiven final : public SettingSources {
 public:
  bool given(std::string_view) const override { return false; }
  bool chosen(std::string_view) const override { return false; }
};

Settings settings(Dtype dtype) {
  Settings settings;
  settings.synthetic = 5;
  settings.heads = 4;
  settings.kv_heads = 2;
  settings.head_dim = 16;
  settings.dtype = dtype;
  settings.own["gradients"] = "input";
  return settings;
}

class BackwardCheck {
 public:
  explicit BackwardCheck(Dtype dtype)
      : settings_(settings(dtype)), input_({settings_, sources_, std::make_shared<JobShare>(), 200}) {
    Options options;
    options.kernel.backend = "cpu";
    backward_.emplace(input_.job(), *world_, options);
    LoadedBackward loaded(input_, *backward_, collective_, *world_);
    result_ = loaded.fetch(loaded.run());
  }

  BackwardAccuracy accuracy() const {
    return check_gradients(collective_, input_, backward_->plan().kernel.key_tile, 2000, result_, 1);
  }
  // With one value changed, which is then restored.
  BackwardAccuracy changed(Buffer BackwardRankResult::*gradient, std::size_t index,
                           const std::function<float(float)>& change) {
    std::byte* const at = (result_.*gradient).data() + index * size_of(input_.job().gradients);
    const float before = load_element(at, input_.job().gradients);
    store_element(at, input_.job().gradients, change(before));
    const BackwardAccuracy accuracy = this->accuracy();
    store_element(at, input_.job().gradients, before);
    return accuracy;
  }

 private:
  NothingGiven sources_;
  Settings settings_;
  BackwardInput input_;
  std::unique_ptr<Transport> world_ = make_self_transport();
  Collective collective_{*world_, Timeouts(60.0)};
  std::optional<AttentionBackward> backward_;
  BackwardRankResult result_;
};

TEST(BackwardAccuracy, FindsOneWrongValue) {
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kF32}) {
    BackwardCheck check(dtype);
    const BackwardAccuracy right = check.accuracy();
    EXPECT_TRUE(right.passes());
    EXPECT_EQ(right.q_rows, 800);
    EXPECT_EQ(right.k_rows, 400);
    EXPECT_GT(right.dk.compared, 0);
    const auto shifted = [](float value) { return value + 0.25F; };
    const auto nan = [](float) { return NAN; };
    const BackwardAccuracy dq = check.changed(&BackwardRankResult::dq, (130 * 4 + 3) * 16 + 5, shifted);
    EXPECT_FALSE(dq.passes());
    EXPECT_EQ(dq.dq.worst, (RowSample{130, 3}));
    EXPECT_TRUE(dq.dk.passes() && dq.dv.passes());
    const BackwardAccuracy dk = check.changed(&BackwardRankResult::dk, (199 * 2 + 1) * 16, shifted);
    EXPECT_FALSE(dk.passes());
    EXPECT_EQ(dk.dk.worst, (RowSample{199, 1}));
    const BackwardAccuracy dv = check.changed(&BackwardRankResult::dv, 7, nan);
    EXPECT_FALSE(dv.passes());
    EXPECT_EQ(dv.dv.misplaced, 1);
    EXPECT_EQ(dv.dv.first_misplaced, (RowSample{0, 0}));
  }
}

}  // namespace
}  // namespace ringattn::testing
