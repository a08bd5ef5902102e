// SPDX-License-Identifier: Apache-2.0
// Keys dealt to several shares: what each leaves of its groups, merged, has the bits of a fold of all keys. For every
// kernel that decodes.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cache_view.hpp"
#include "kernels/decode.hpp"
#include "tests/kernels/kernel_row_test.hpp"
#include "tests/support/checks.hpp"
#include "tests/support/decode_runner.hpp"

namespace ringattn::testing {
namespace {

constexpr std::byte kPoison{0xff};

class DecodeShares : public ::testing::TestWithParam<DecodeRow> {
 protected:
  void SetUp() override {
    const std::string reason = GetParam().unavailable();
    if (!reason.empty()) GTEST_SKIP() << "needs: " << reason;
    checks_before_ = checks_made();
  }
  void TearDown() override {
    if (!IsSkipped() && !HasFailure()) expect_checks(GetParam().name, checks_made() - checks_before_);
  }

  static const FoldRow& fold() {
    const auto rows = kernel_table<FoldSpec>();
    return *std::ranges::find_if(rows, [](const FoldRow& row) { return row.name == GetParam().name; });
  }

 private:
  std::int64_t checks_before_ = 0;
};

// Folds the inputs in `shares` shares, with dense caches, and merges them. Caches, records and outputs are NaN before.
FoldResult merged(const DecodeRow& row, const FoldInputs& inputs, int shares) {
  const FoldSpec& spec = inputs.spec;
  const std::unique_ptr<Backend> backend = row.make_backend({2, 0});
  const std::unique_ptr<DecodeKernel> kernel = row.make_kernel({spec}, *backend);
  const auto sequences = static_cast<std::int64_t>(inputs.sequences.size());
  const auto rows = static_cast<int>(inputs.sequences[0].q_len);
  const std::int64_t group_keys = std::int64_t{kGroupTiles} * kernel->key_tile();
  std::int64_t longest = 1;
  std::vector<std::int32_t> lengths;
  for (const SequenceShape& shape : inputs.sequences) {
    longest = std::max(longest, shape.k_len);
    lengths.push_back(static_cast<std::int32_t>(shape.k_len));
  }
  const auto place = [&](const void* data, std::size_t bytes) {
    auto array = std::make_unique<DeviceArray>(*backend, std::max<std::size_t>(bytes, 1));
    std::vector<std::byte> host(bytes);
    if (bytes > 0) std::memcpy(host.data(), data, bytes);
    array->write(host);
    return array;
  };
  const auto q = place(inputs.q.data(), inputs.q.size());
  const auto sinks = place(inputs.sinks.data(), inputs.sinks.size() * sizeof(float));
  const auto there = place(lengths.data(), lengths.size() * sizeof(std::int32_t));
  kernel->reserve({sequences, rows, longest});

  DecodeStep step;
  step.q = dense_view(static_cast<const void*>(q->data()), spec.dtype, inputs.q_tokens(), spec.heads, spec.head_dim);
  step.rows = rows;
  step.lengths = reinterpret_cast<const std::int32_t*>(there->data());
  const std::int64_t groups = share_groups(longest, shares, kernel->key_tile()) + 1;  // more than there are
  const auto record_bytes =
      static_cast<std::size_t>(inputs.q_tokens() * groups * spec.heads * kernel->record_floats()) * sizeof(float);
  const std::int64_t capacity = keys_of_share({0, shares}, group_keys, longest) + 3;
  const auto element = static_cast<std::int64_t>(size_of(spec.dtype));
  std::vector<std::unique_ptr<DeviceArray>> records;
  std::vector<const float*> of_shares;
  for (int first = 0; first < shares; ++first) {
    const GroupShare share{first, shares};
    const auto cache = [&](const std::vector<std::byte>& all, std::int64_t dim) {
      const std::int64_t token_bytes = spec.kv_heads * dim * element;
      std::vector<std::byte> bytes(static_cast<std::size_t>(sequences * capacity * token_bytes), kPoison);
      for (std::int64_t s = 0; s < sequences; ++s) {
        for (std::int64_t key = 0; key < lengths[static_cast<std::size_t>(s)]; ++key) {
          if (!holds_key(share, group_keys, key)) continue;
          const std::int64_t to = s * capacity + token_of_key(share, group_keys, key);
          const std::int64_t from = inputs.k_begin(static_cast<std::size_t>(s)) + key;
          std::copy_n(all.begin() + from * token_bytes, token_bytes, bytes.begin() + to * token_bytes);
        }
      }
      return place(bytes.data(), bytes.size());
    };
    const auto k = cache(inputs.k, spec.head_dim);
    const auto v = cache(inputs.v, spec.head_dim_v);
    step.k = cache_view(k->data(), spec.dtype, sequences, capacity, spec.kv_heads, spec.head_dim);
    step.v = cache_view(v->data(), spec.dtype, sequences, capacity, spec.kv_heads, spec.head_dim_v);
    step.share = share;
    records.push_back(std::make_unique<DeviceArray>(*backend, record_bytes));
    of_shares.push_back(records.back()->floats());
    step.partials = {records.back()->floats(), groups};
    kernel->enqueue(step, backend->stream());
    backend->synchronize(backend->mark(backend->stream()), Deadline::after(60.0), {});
  }

  DeviceArray out(*backend, static_cast<std::size_t>(inputs.q_tokens() * spec.heads * spec.head_dim_v * element));
  DeviceArray lse(*backend, static_cast<std::size_t>(inputs.q_tokens() * spec.heads) * sizeof(float));
  // The rows of the first sequence, then those of the others: an owner has a part of the batch.
  for (const auto& [begin, end] : {std::pair{std::int64_t{0}, std::int64_t{1}}, {std::int64_t{1}, sequences}}) {
    const std::int64_t row0 = begin * rows;
    const std::int64_t count = (end - begin) * rows;
    if (count == 0) continue;
    std::vector<const float*> these = of_shares;
    for (const float*& share : these) share += row0 * groups * spec.heads * kernel->record_floats();
    DecodeMerge merge;
    merge.shares = these;
    merge.groups = groups;
    merge.rows = rows;
    merge.lengths = step.lengths + begin;
    merge.output = {dense_view(static_cast<void*>(out.data() + row0 * spec.heads * spec.head_dim_v * element),
                               spec.dtype, count, spec.heads, spec.head_dim_v),
                    {lse.floats() + row0 * spec.heads, spec.heads, 1},
                    spec.sinks ? sinks->floats() : nullptr};
    kernel->merge(merge, backend->stream());
    backend->synchronize(backend->mark(backend->stream()), Deadline::after(60.0), {});
  }
  return {out.read(), lse.read_floats(), {}};
}

TEST_P(DecodeShares, MergeToTheFoldOfAllKeys) {
  constexpr int kShares[] = {2, 3, 5, 1, 4};
  std::uint64_t seed = 1;
  for (const Dims& dims : varied_dims(fold())) {
    FoldSpec spec = make_spec(dims, 4, 2, seed % 2 == 0 ? Mask{9000, 0} : Mask{-1, 0});
    spec.sinks = seed % 3 == 0;
    spec.softcap = seed % 4 == 0 ? 20.0F : 0.0F;
    const std::int64_t group = std::int64_t{kGroupTiles} * FoldRunner(fold(), spec).kernel().key_tile();
    const int rows = seed % 2 == 0 ? 1 : 3;
    const FoldInputs inputs = decode_inputs(spec, rows, {2 * group + 130, 0, 1, group, group + 1, 300}, seed);
    const FoldResult expected = fold_with(fold(), inputs);
    const int shares = kShares[seed % std::size(kShares)];
    EXPECT_TRUE(merged(GetParam(), inputs, shares).same_bits(expected))
        << describe(spec) << ", " << rows << " rows, " << shares << " shares";
    ++seed;
  }
}

// A row outgrows the reference of a group that another share has.
TEST_P(DecodeShares, RowsThatOutgrowTheirReference) {
  const FoldSpec spec = make_spec(usual_dims(fold()).front(), 4, 2, {-1, 0});
  const std::int64_t group = std::int64_t{kGroupTiles} * FoldRunner(fold(), spec).kernel().key_tile();
  FoldInputs inputs = decode_inputs(spec, 2, {3 * group - 50}, 61);
  for (int head = 0; head < spec.heads; head += 2) inputs.set_q(1, head, 0, 1.0F / spec.softmax_scale);
  for (const auto& [key, level] : {std::pair{group + 3000, 120.0F}, {2 * group + 900, 300.0F}}) {
    for (int head = 0; head < spec.kv_heads; ++head) inputs.set_k(key, head, 0, level);
  }
  const FoldResult expected = fold_with(fold(), inputs);
  for (const int shares : {2, 3, 4}) EXPECT_TRUE(merged(GetParam(), inputs, shares).same_bits(expected)) << shares;
}

INSTANTIATE_TEST_SUITE_P(Kernels, DecodeShares,
                         ::testing::ValuesIn(kernel_table<DecodeSpec>().begin(), kernel_table<DecodeSpec>().end()),
                         [](const auto& test) { return std::string(test.param.name); });

}  // namespace
}  // namespace ringattn::testing
