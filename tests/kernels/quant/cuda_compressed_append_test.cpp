// SPDX-License-Identifier: Apache-2.0
// Compressed caches on a GPU that grow while a graph is replayed.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <vector>

#include "base/cuda.hpp"
#include "kernels/decode/cache_update.hpp"
#include "tests/support/cuda_graph.hpp"
#include "tests/support/device_pool.hpp"

namespace ringattn::testing {
namespace {

// A captured graph grows the lengths, appends rows to both caches and decodes: token by token, the bits of the plain
// cache that the compressed one is.
void expect_growing_bits(const DecodeRow& row, const CacheFormat& format) {
  const DecodeSpec spec = usual_compressed_spec(format);
  SCOPED_TRACE(fmt::format("{}: {}", row.name, describe(spec)));
  constexpr std::int64_t kSteps = 140;
  constexpr std::int64_t kSequences = 2;
  const RowShape shape{Dtype::kBf16, 2, 128};
  const std::vector<std::int64_t> lengths(kSequences, kSteps);
  const PageOrder order = shuffled_pages(lengths, 16, 5);
  const auto backend = row.make_backend({1, 0});
  const Stream stream = backend->stream();
  const std::vector<std::byte> rows[2] = {outlier_rows(shape, lengths, 1), outlier_rows(shape, lengths, 2)};
  CompressedPool k_host(format.k, shape, order, kSequences), v_host(format.v, shape, order, kSequences);
  const DevicePool k(*backend, k_host.view(), kSequences), v(*backend, v_host.view(), kSequences);
  DeviceArray table(*backend, order.table.size() * 4), now(*backend, kSequences * 4);
  table.write(bytes_of(order.table));
  now.write(bytes_of(std::vector<std::int32_t>(kSequences, 0)));
  constexpr std::size_t kRowBytes = 2 * 128 * 2;
  DeviceArray fresh_k(*backend, kSequences * kRowBytes), fresh_v(*backend, kSequences * kRowBytes);
  const std::vector<std::byte> q_rows = outlier_rows({Dtype::kBf16, 8, 128}, std::vector<std::int64_t>(2, 1), 3);
  DeviceArray q(*backend, q_rows.size()), out(*backend, q_rows.size()), lse(*backend, kSequences * 8 * 4);
  q.write(q_rows);

  CacheUpdate grow;
  grow.sequences = kSequences;
  grow.lengths = grow.new_lengths = reinterpret_cast<std::int32_t*>(now.data());
  grow.block_table = {reinterpret_cast<const std::int32_t*>(table.data()), order.columns};
  grow.table_pages = order.columns;
  grow.pages = order.pages;
  grow.page_size = 16;
  CacheUpdate places = grow;
  places.new_lengths = nullptr;
  DecodeStep step;
  step.q = dense_view(static_cast<const void*>(q.data()), Dtype::kBf16, kSequences, 8, 128);
  step.quantized_k = k.view();
  step.quantized_v = v.view();
  step.block_table = grow.block_table;
  step.lengths = grow.lengths;
  step.output = {
      dense_view(static_cast<void*>(out.data()), Dtype::kBf16, kSequences, 8, 128), {lse.floats(), 8, 1}, nullptr};
  const auto kernel = row.make_kernel(spec, *backend);
  kernel->reserve({kSequences, 1, kSteps});
  const auto rows_view = [&](const DeviceArray& fresh) {
    return dense_view(static_cast<const void*>(fresh.data()), Dtype::kBf16, kSequences, 2, 128);
  };
  CacheUpdate nothing;
  backend->update_cache(nothing, stream);  // both load their code
  backend->append({&nothing, k.view(), rows_view(fresh_k)}, stream);
  const Graph graph(stream, [&] {
    backend->update_cache(grow, stream);
    backend->append({&places, k.view(), rows_view(fresh_k)}, stream);
    backend->append({&places, v.view(), rows_view(fresh_v)}, stream);
    kernel->enqueue(step, stream);
  });
  for (std::int64_t length = 1; length <= kSteps; ++length) {
    for (int i = 0; i < 2; ++i) {
      std::vector<std::byte> fresh;
      for (std::int64_t s = 0; s < kSequences; ++s) {
        const std::byte* const from = rows[i].data() + static_cast<std::size_t>(s * kSteps + length - 1) * kRowBytes;
        fresh.insert(fresh.end(), from, from + kRowBytes);
      }
      (i == 0 ? fresh_k : fresh_v).write(fresh);
    }
    graph.launch();
    const std::vector<std::byte> got = out.read();
    if (length % 9 != 0 && length % 32 > 1) continue;
    const std::vector<std::int64_t> prefix_lengths(kSequences, length);
    // The plain cache of the prefix.
    std::unique_ptr<DevicePool> plain[2];
    const PageOrder prefix_order = shuffled_pages(prefix_lengths, 16, 9);
    for (int i = 0; i < 2; ++i) {
      std::vector<std::byte> prefix;
      for (std::int64_t s = 0; s < kSequences; ++s) {
        const std::byte* const from = rows[i].data() + static_cast<std::size_t>(s * kSteps) * kRowBytes;
        prefix.insert(prefix.end(), from, from + static_cast<std::size_t>(length) * kRowBytes);
      }
      CompressedTensor tensor =
          compress_tensor("k", i == 0 ? format.k : format.v, view_of(prefix, shape, kSequences * length),
                          prefix_lengths, {7, 1}, ErrorCode::kUsage);
      CompressedTensor decompressed = make_compressed({}, shape, prefix_lengths);
      decompressed.streams[0] = decompress_tensor(tensor, 1);
      CompressedPool host({}, shape, prefix_order, kSequences);
      host.fill(decompressed);
      plain[i] = std::make_unique<DevicePool>(*backend, host.view(), kSequences);
    }
    DeviceArray prefix_table(*backend, prefix_order.table.size() * 4);
    prefix_table.write(bytes_of(prefix_order.table));
    DecodeSpec plain_spec = spec;
    plain_spec.format = {};
    DecodeStep plain_step = step;
    plain_step.quantized_k = plain_step.quantized_v = {};
    plain_step.k = plain[0]->plain();
    plain_step.v = plain[1]->plain();
    plain_step.block_table = {reinterpret_cast<const std::int32_t*>(prefix_table.data()), prefix_order.columns};
    const auto plain_kernel = row.make_kernel(plain_spec, *backend);
    plain_kernel->reserve({kSequences, 1, kSteps});
    out.clear();
    plain_kernel->enqueue(plain_step, stream);
    ASSERT_TRUE(got == out.read()) << "length " << length;
  }
}

TEST(CudaCompressedAppend, AGraphAppendsAndDecodes) {
  RINGATTN_NEEDS_COMPRESSED_DECODER();
  for (const CacheFormat& format : {CacheFormat{kFp8, kFp8}, CacheFormat{kInt8, kInt8}, {kKeys32, kValues}}) {
    for (const DecodeRow* row : rows_here(usual_compressed_spec(format))) expect_growing_bits(*row, format);
  }
}

}  // namespace
}  // namespace ringattn::testing
