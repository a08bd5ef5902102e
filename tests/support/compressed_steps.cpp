// SPDX-License-Identifier: Apache-2.0
#include "tests/support/compressed_steps.hpp"

#include <algorithm>

#include "attention/tokens/cost.hpp"
#include "tests/support/device_pool.hpp"
#include "tests/support/rank_bytes.hpp"

namespace ringattn::testing {

namespace {

std::int64_t row_bytes(const RowShape& shape) { return token_bytes({}, shape); }

// Tokens [begin, end) of each sequence of `tokens`.
std::vector<std::byte> part_of(const std::vector<std::byte>& rows, const RowShape& shape, std::int64_t tokens,
                               std::int64_t begin, std::int64_t end) {
  std::vector<std::byte> some;
  for (int s = 0; s < CompressedSteps::kSequences; ++s) {
    const auto* const from = rows.data() + s * tokens * row_bytes(shape);
    some.insert(some.end(), from + begin * row_bytes(shape), from + end * row_bytes(shape));
  }
  return some;
}

}  // namespace

CompressedSteps::CompressedSteps(const AttentionSpec& spec, const CacheFormat& format, int steps)
    : steps_(steps),
      tokens_(kStart + steps * kRows),
      k_shape_{spec.dtype, spec.kv_heads, spec.head_dim},
      v_shape_{spec.dtype, spec.kv_heads, spec.head_dim_v} {
  job_.spec = spec;
  job_.limits = {kSequences, kRows, tokens_};
  job_.page_size = kPage;
  job_.format = format;
  const std::vector<std::int64_t> all(kSequences, tokens_);
  k_rows_ = outlier_rows(k_shape_, all, 1);
  v_rows_ = outlier_rows(v_shape_, all, 2);
  const std::vector<std::int64_t> queries{kSequences * kRows};
  q_ = outlier_rows({spec.dtype, spec.heads, spec.head_dim}, queries, 3);
  k_ = compressed(format.k, k_shape_, k_rows_, kStart, nullptr);
  v_ = compressed(format.v, v_shape_, v_rows_, kStart, nullptr);
}

std::size_t CompressedSteps::step_bytes() const {
  return static_cast<std::size_t>(kSequences * kRows * out_token_bytes(job_.spec));
}

CompressedSteps::Outputs CompressedSteps::no_outputs() const {
  return Outputs(static_cast<std::size_t>(steps_), std::vector<std::byte>(step_bytes()));
}

CompressedTensor CompressedSteps::compressed(const RowFormat& format, const RowShape& shape,
                                             const std::vector<std::byte>& rows, std::int64_t length,
                                             const CompressedTensor* first) const {
  const std::vector<std::byte> some = part_of(rows, shape, tokens_, 0, length);
  const TensorView view = view_of(some, shape, kSequences * length);
  const std::vector<std::int64_t> lengths(kSequences, length);
  if (first == nullptr) return compress_tensor("k", format, view, lengths, {7, 2}, ErrorCode::kUsage);
  CompressedTensor tensor = make_compressed(format, shape, lengths);
  if (quantized_per_token(format)) tensor.tables = first->tables;
  const std::vector<CompressedRun> runs = tensor.runs();
  compress_on_host({format, shape, view, {}, runs, tensor.rows()}, 2);
  return tensor;
}

std::vector<std::byte> CompressedSteps::expected(int step, const KernelRequest& kernel) const {
  const std::int64_t length = kStart + (step + 1) * kRows;
  CompressedTensor k = compressed(job_.format.k, k_shape_, k_rows_, length, &k_);
  CompressedTensor v = compressed(job_.format.v, v_shape_, v_rows_, length, &v_);
  DecodeSpec spec;
  spec.attention = job_.spec;
  const auto choice = choose_kernel(spec, kernel);
  const auto backend = choice.row->make_backend({1, choice.row->backend == "cuda" ? 0 : kNoDevice});
  const auto decoder = choice.row->make_kernel(spec, *backend);
  decoder->reserve({kSequences, kRows, length});
  const DeviceArray plain_k = placed(*backend, decompress_tensor(k, 1));
  const DeviceArray plain_v = placed(*backend, decompress_tensor(v, 1));
  const DeviceArray q = placed(*backend, q_), out(*backend, step_bytes());
  const DeviceArray lengths =
      placed(*backend, bytes_of(std::vector<std::int32_t>(kSequences, static_cast<std::int32_t>(length))));
  const AttentionSpec& fold = job_.spec;
  const auto cache = [&](const DeviceArray& rows, const RowShape& shape) {
    return cache_view(rows.data(), shape.dtype, kSequences, length, static_cast<int>(shape.heads),
                      static_cast<int>(shape.dim));
  };
  DecodeStep inputs;
  inputs.q = dense_view(static_cast<const void*>(q.data()), fold.dtype, kSequences * kRows, fold.heads, fold.head_dim);
  inputs.rows = kRows;
  inputs.k = cache(plain_k, k_shape_);
  inputs.v = cache(plain_v, v_shape_);
  inputs.lengths = reinterpret_cast<const std::int32_t*>(lengths.data());
  inputs.output.out =
      dense_view(static_cast<void*>(out.data()), fold.dtype, kSequences * kRows, fold.heads, fold.head_dim_v);
  decoder->enqueue(inputs, backend->stream());
  return out.read();
}

void CompressedSteps::run(Transport& transport, const DecodeOptions& options, Outputs& outputs) const {
  Decode decode(job_, transport, options);
  Backend& backend = decode.backend();
  const AttentionSpec& fold = job_.spec;
  const std::vector<std::int64_t> held(kSequences, decode.cache_tokens(tokens_));
  const PageOrder order = shuffled_pages(held, kPage, static_cast<std::uint64_t>(transport.rank()) + 1);
  const auto pool_of = [&](const CompressedTensor& tensor) {
    CompressedPool pool(tensor.format, tensor.shape, order, kSequences);
    pool.fill(tensor, decode.partition(), decode.kv_split_keys());
    return DevicePool(backend, pool.view(), kSequences);
  };
  const DevicePool k = pool_of(k_), v = pool_of(v_);
  const DeviceArray q = placed(backend, q_), table = placed(backend, bytes_of(order.table));
  const DeviceArray lengths =
      placed(backend, bytes_of(std::vector<std::int32_t>(kSequences, static_cast<std::int32_t>(kStart))));
  const SequenceRange mine = decode.owned(kSequences);
  const std::size_t first = static_cast<std::size_t>(mine.first) * (step_bytes() / kSequences);
  for (int step = 0; step < steps_; ++step) {
    const std::int64_t begin = kStart + step * kRows;
    const DeviceArray k_new = placed(backend, part_of(k_rows_, k_shape_, tokens_, begin, begin + kRows));
    const DeviceArray v_new = placed(backend, part_of(v_rows_, v_shape_, tokens_, begin, begin + kRows));
    const DeviceArray out(backend, step_bytes());
    const auto rows_of = [&](const DeviceArray& rows, int heads, int dim) {
      return dense_view(static_cast<const void*>(rows.data()), fold.dtype, kSequences * kRows, heads, dim);
    };
    DecodeInputs inputs;
    inputs.q = rows_of(q, fold.heads, fold.head_dim);
    inputs.rows = kRows;
    inputs.block_table = {reinterpret_cast<const std::int32_t*>(table.data()), order.columns};
    inputs.table_pages = order.columns;
    inputs.lengths_before = reinterpret_cast<std::int32_t*>(lengths.data());
    inputs.update_lengths = true;
    inputs.k_new = rows_of(k_new, fold.kv_heads, fold.head_dim);
    inputs.v_new = rows_of(v_new, fold.kv_heads, fold.head_dim_v);
    inputs.quantized_k = k.view();
    inputs.quantized_v = v.view();
    DecodeOutputs own;
    own.out = dense_view(static_cast<void*>(out.data()), fold.dtype, mine.count * kRows, fold.heads, fold.head_dim_v);
    decode.run(inputs, own, backend.stream());
    const std::vector<std::byte> rows = out.read();
    std::copy_n(rows.begin(), mine.count * kRows * out_token_bytes(fold),
                outputs[static_cast<std::size_t>(step)].begin() + static_cast<std::ptrdiff_t>(first));
  }
  transport.barrier(Deadline::after(60.0));  // device memory may be freed only once no rank has work in flight
}

}  // namespace ringattn::testing
