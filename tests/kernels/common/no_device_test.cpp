// SPDX-License-Identifier: Apache-2.0
// Plans make kernels on backends without a device and ask them for their tiles and memory: every row of every table,
// also on a host that has none of the devices which the rows run on.
#include <gtest/gtest.h>

#include <cstddef>
#include <memory>
#include <set>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/decode.hpp"
#include "kernels/gated_delta/gated_delta.hpp"
#include "kernels/gemm/weight_gradient.hpp"
#include "kernels/linear/linear.hpp"
#include "kernels/quant/latent_rows.hpp"
#include "kernels/rope/rope.hpp"
#include "kernels/ssd_backward/ssd_backward.hpp"
#include "kernels/ssm/causal_conv1d.hpp"
#include "kernels/ssm/ssm.hpp"
#include "tests/support/kernel_dims.hpp"

namespace ringattn::testing {
namespace {

constexpr DecodeLimits kSteps{.sequences = 3, .rows = 2, .keys = 20000};

void ask(const AttentionKernel& kernel) {
  EXPECT_GT(kernel.key_tile(), 0);
  EXPECT_GT(kernel.query_tile(), 0);
  EXPECT_GT(kernel.state_bytes(100), std::size_t{0});
  kernel.scratch_bytes({.rows = 100, .query_runs = 2, .key_runs = 2, .tiles = 9, .sources = 1, .sequences = 2});
}
void ask(const AttentionBackwardKernel& kernel) {
  EXPECT_GT(kernel.key_tile(), 0);
  EXPECT_EQ(kBackwardKvSplit % kernel.key_tile(), 0);
  EXPECT_EQ(kernel.key_tile() % kBackwardTile, 0);
  EXPECT_GT(kernel.dq_state_bytes(100), std::size_t{0});
  EXPECT_GT(kernel.dkv_state_bytes(100), std::size_t{0});
  kernel.scratch_bytes({.rows = 100, .row_runs = 2, .tile_runs = 2, .tiles = 9, .sequences = 2});
}
void ask(const DecodeKernel& kernel) {
  EXPECT_GT(kernel.key_tile(), 0);
  EXPECT_GT(kernel.partial_floats(), 0);
  EXPECT_NO_THROW(kernel.check(kSteps, 2));
  kernel.scratch_bytes(kSteps);
}
void ask(const BatchedGemmKernel& kernel) { kernel.scratch_bytes(8); }
void ask(const LinearKernel& kernel) {
  kernel.scratch_bytes(100);
  kernel.packed_bytes({});
}
void ask(const RopeKernel& kernel) { kernel.memory_bytes(); }
void ask(const SsmKernel& kernel) {
  EXPECT_GT(kernel.heads_together(), 0);
  EXPECT_GT(kernel.scratch_bytes({.runs = 1, .segments = 2, .super_segments = 1}), std::size_t{0});
}
void ask(const SsdBackwardKernel& kernel) {
  EXPECT_GT(kernel.heads_together(), 0);
  EXPECT_GT(kernel.scratch_bytes({.runs = {.runs = 1, .segments = 2, .super_segments = 1}, .rows = 4000}),
            std::size_t{0});
}
void ask(const GatedDeltaKernel& kernel) { EXPECT_GT(kernel.heads_together(), 0); }
void ask(const CausalConv1dKernel&) {}
void ask(const WeightGradientKernel&) {}

// A spec for every dtype and set of head dims that attention kernels have.
std::vector<AttentionSpec> attention_specs() {
  std::set<std::pair<Dtype, std::pair<int, int>>> dims;
  for (const AttentionRow& row : kernel_table<AttentionSpec>()) {
    for (const Dims& of : all_dims(row)) dims.insert({of.dtype, {of.head_dim, of.head_dim_v}});
  }
  std::vector<AttentionSpec> specs;
  for (const auto& [dtype, of] : dims) specs.push_back(make_spec(Dims{dtype, of.first, of.second}, 4, 1, {-1, 0}));
  return specs;
}

std::vector<AttentionBackwardSpec> backward_specs() {
  std::vector<AttentionBackwardSpec> specs;
  for (const AttentionSpec& forward : attention_specs()) {
    specs.push_back({forward, forward.dtype});
    specs.push_back({forward, Dtype::kF32});
  }
  return specs;
}

// The same from caches of each kind, and with the values in the keys.
std::vector<DecodeSpec> decode_specs() {
  std::vector<DecodeSpec> specs;
  for (const AttentionSpec& fold : attention_specs()) {
    for (const char* format : {"plain", "fp8 token_head", "int8", "int4_channel group 32"}) {
      const RowFormat of = parse_row_format(format);
      specs.push_back({fold, false, {of, of}});
    }
    specs.push_back({fold, true, {}});
    specs.push_back({fold, true, {latent_format(64), {}}});
  }
  return specs;
}

class Made {
 public:
  // Makes kernels for all that a row can do of `specs`, and asks them.
  template <class Spec>
  void make_all(std::string_view op, const std::vector<Spec>& specs) {
    for (const KernelRow<Spec>& row : kernel_table<Spec>()) {
      SCOPED_TRACE(row.name);
      for (const Spec& spec : specs) {
        if (!row.missing(spec).empty()) continue;
        SCOPED_TRACE(describe(spec));
        EXPECT_NO_THROW({
          const std::unique_ptr<Backend> backend = row.make_backend({1, kNoDevice});
          ask(*row.make_kernel(spec, *backend));
        });
        rows_.emplace(op, row.name);
      }
    }
  }
  bool has(const OpKernel& of) const { return rows_.contains({of.op, of.row->name}); }

 private:
  std::set<std::pair<std::string_view, std::string_view>> rows_;
};

TEST(WithoutADevice, EveryRowIsMadeAndSaysItsMemory) {
  Made made;
  made.make_all("attention", attention_specs());
  made.make_all("attention_backward", backward_specs());
  made.make_all("decode", decode_specs());
  made.make_all<BatchedGemmSpec>("batched_gemm", {{Dtype::kBf16, 512, 128}});
  made.make_all<WeightGradientSpec>("weight_gradient", {{Dtype::kBf16, 128, 512}, {Dtype::kF32, 128, 512}});
  made.make_all<LinearSpec>("linear", {{.in_features = 512, .out_features = 64},
                                       {.dtype = Dtype::kF32, .in_features = 512, .out_features = 64},
                                       {.weights = WeightFormat::kInt8, .in_features = 512, .out_features = 64},
                                       {.weights = WeightFormat::kInt4, .in_features = 512, .out_features = 64}});
  RopeSpec rope;
  rope.frequencies.assign(static_cast<std::size_t>(rope.pair_count()), 1.0);
  made.make_all<RopeSpec>("rope", {rope});
  made.make_all<SsmSpec>("ssm", {{.heads = 4},
                                 {.dtype = Dtype::kF16, .heads = 4},
                                 {.heads = 64, .head_dim = 1, .state_dim = 16, .state_decays = true},
                                 {.heads = 4, .groups = 4, .decay = SsmDecay::kDim}});
  made.make_all<GatedDeltaSpec>("gated_delta", {GatedDeltaSpec()});
  made.make_all<SsdBackwardSpec>(
      "ssd_backward", {{.forward = {.heads = 4}},
                       {.forward = {.dtype = Dtype::kF16, .heads = 4, .head_dim = 128}, .gradients = Dtype::kF32}});
  made.make_all<CausalConv1dSpec>("conv1d", {{.channels = 64}});
  for (const OpKernel& kernel : all_kernels()) {
    EXPECT_TRUE(made.has(kernel)) << kernel.op << ": no spec of the test is one that " << kernel.row->name << " can do";
  }
}

}  // namespace
}  // namespace ringattn::testing
