// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mla_files.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "attention/tokens/page_table.hpp"
#include "base/gpu.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/common/synthetic.hpp"
#include "kernels/gemm/batched_gemm.hpp"
#include "kernels/quant/latent_rows.hpp"

namespace ringattn::testing {

namespace {

NamedTensor made(const MlaFile& shape, SyntheticTensor tensor, std::int64_t tokens, std::int64_t heads,
                 std::int64_t dim, std::vector<std::int64_t> dims) {
  NamedTensor rows{file_dtype(shape.dtype), std::move(dims), {}};
  rows.bytes.resize(static_cast<std::size_t>(tokens * heads * dim) * size_of(shape.dtype));
  const PackedRun all[] = {{0, tokens}};
  fill_synthetic(shape.seed, tensor, all,
                 dense_view(static_cast<void*>(rows.bytes.data()), shape.dtype, tokens, heads, dim), 1);
  return rows;
}

Batch batch_of(const MlaFile& shape) {
  std::vector<Sequence> sequences;
  for (std::size_t s = 0; s < shape.lengths.size(); ++s) {
    sequences.push_back({shape.q_lens[s], shape.lengths[s], shape.lengths[s] - shape.q_lens[s]});
  }
  return sequences;
}

std::int64_t row_bytes(const NamedTensor& rows) {
  return static_cast<std::int64_t>(rows.bytes.size()) / std::max<std::int64_t>(1, rows.shape[0]);
}

// w_uk or w_uv as they lie.
GemmWeights matrices_of(const NamedTensor& matrix, const MlaFile& shape) {
  const auto outer = static_cast<int>(matrix.shape[1]);
  return {matrix.bytes.data(), shape.dtype,
          shape.heads,         outer,
          shape.latent_dim,    matrix.shape[1] * shape.latent_dim,
          shape.latent_dim,    1};
}

void multiply(const BatchedGemmSpec& spec, const TensorView& rows, const GemmWeights& weights,
              const MutableTensorView& out) {
  const auto choice = choose_kernel(spec, {"cpu", "auto"});
  const auto backend = choice.row->make_backend({1, kNoDevice});
  const auto kernel = choice.row->make_kernel(spec, *backend);
  kernel->reserve(weights.heads);
  kernel->multiply({rows, weights, out}, backend->stream(), {});
}

MutableTensorView view_of(NamedTensor& rows) {
  return dense_view(static_cast<void*>(rows.bytes.data()), Dtype::kBf16, rows.shape[0], 1, rows.shape[1]);
}

}  // namespace

NamedTensors mla_tensors(const MlaFile& shape) {
  const Batch batch = batch_of(shape);
  const std::int64_t q = batch.q_tokens();
  const std::int64_t k = batch.k_tokens();
  const int q_dim = shape.head_dim + shape.rope_dim;
  NamedTensors tensors;
  tensors["q"] = made(shape, SyntheticTensor::kQ, q, shape.heads, q_dim, {q, shape.heads, q_dim});
  tensors["latent"] = made(shape, SyntheticTensor::kLatent, k, 1, shape.latent_dim, {k, shape.latent_dim});
  tensors["k_rope"] = made(shape, SyntheticTensor::kKeyRope, k, 1, shape.rope_dim, {k, shape.rope_dim});
  tensors["w_uk"] = made(shape, SyntheticTensor::kWeightKeys, shape.heads, shape.head_dim, shape.latent_dim,
                         {shape.heads, shape.head_dim, shape.latent_dim});
  tensors["w_uv"] = made(shape, SyntheticTensor::kWeightValues, shape.heads, shape.head_dim_v, shape.latent_dim,
                         {shape.heads, shape.head_dim_v, shape.latent_dim});
  tensors["cu_seqlens_q"] = long_list(batch.cu_q());
  tensors["cu_seqlens_k"] = long_list(batch.cu_k());
  return tensors;
}

NamedTensors with_projection(NamedTensors tensors) {
  const NamedTensor keys = std::exchange(tensors["w_uk"], {});
  const NamedTensor values = std::exchange(tensors["w_uv"], {});
  tensors.erase("w_uk");
  tensors.erase("w_uv");
  const std::int64_t heads = keys.shape[0];
  NamedTensor joined{keys.dtype, {heads * (keys.shape[1] + values.shape[1]), keys.shape[2]}, {}};
  for (std::int64_t head = 0; head < heads; ++head) {
    for (const NamedTensor* const matrix : {&keys, &values}) {
      const auto* const from = matrix->bytes.data() + head * row_bytes(*matrix);
      joined.bytes.insert(joined.bytes.end(), from, from + row_bytes(*matrix));
    }
  }
  tensors["kv_b_proj"] = std::move(joined);
  return tensors;
}

NamedTensors with_fp8_latent(NamedTensors tensors) {
  NamedTensor latent = std::exchange(tensors["latent"], {});
  NamedTensor rope = std::exchange(tensors["k_rope"], {});
  tensors.erase("latent");
  tensors.erase("k_rope");
  const std::int64_t bytes = latent_row_bytes(latent.shape[1], rope.shape[1]);
  NamedTensor codes{FileDtype::kU8, {latent.shape[0], bytes}, {}};
  codes.bytes.resize(static_cast<std::size_t>(latent.shape[0] * bytes));
  quantize_latent_rows(view_of(latent), view_of(rope), codes.bytes.data(), bytes);
  tensors["latent_fp8"] = std::move(codes);
  return tensors;
}

NamedTensors with_queries_in_latent(NamedTensors tensors, const MlaFile& shape) {
  const NamedTensor q = tensors["q"];
  const NamedTensor& matrix = tensors["w_uk"];
  const std::int64_t tokens = q.shape[0];
  const int in_latent = shape.latent_dim + shape.rope_dim;
  NamedTensor wide{q.dtype, {tokens, shape.heads, in_latent}, {}};
  wide.bytes.resize(static_cast<std::size_t>(tokens * shape.heads * in_latent) * size_of(shape.dtype));
  TensorView from = dense_view(static_cast<const void*>(q.bytes.data()), shape.dtype, tokens, shape.heads, q.shape[2]);
  MutableTensorView to = dense_view(static_cast<void*>(wide.bytes.data()), shape.dtype, tokens, shape.heads, in_latent);
  const auto rotary_bytes = static_cast<std::size_t>(shape.rope_dim) * size_of(shape.dtype);
  for (std::int64_t token = 0; token < tokens; ++token) {
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      std::memcpy(to.at(token, head) + static_cast<std::size_t>(shape.latent_dim) * size_of(shape.dtype),
                  from.at(token, head) + static_cast<std::size_t>(shape.head_dim) * size_of(shape.dtype), rotary_bytes);
    }
  }
  from.dim = shape.head_dim;
  to.dim = shape.latent_dim;
  multiply({shape.dtype, shape.head_dim, shape.latent_dim}, from, matrices_of(matrix, shape).transposed(), to);
  tensors["q"] = std::move(wide);
  return tensors;
}

std::vector<std::byte> multiplied_by_w_uv(const std::vector<std::byte>& in_latent, const NamedTensor& w_uv,
                                          const MlaFile& shape) {
  const auto row_bytes = static_cast<std::int64_t>(size_of(shape.dtype)) * shape.heads;
  const std::int64_t tokens = static_cast<std::int64_t>(in_latent.size()) / (row_bytes * shape.latent_dim);
  std::vector<std::byte> out(static_cast<std::size_t>(tokens * row_bytes * shape.head_dim_v));
  multiply({shape.dtype, shape.latent_dim, shape.head_dim_v},
           dense_view(static_cast<const void*>(in_latent.data()), shape.dtype, tokens, shape.heads, shape.latent_dim),
           matrices_of(w_uv, shape),
           dense_view(static_cast<void*>(out.data()), shape.dtype, tokens, shape.heads, shape.head_dim_v));
  return out;
}

NamedTensors with_fp8_rounded_latent(NamedTensors tensors) {
  const NamedTensors packed = with_fp8_latent(tensors);
  const NamedTensor& codes = packed.at("latent_fp8");
  dequantize_latent_rows(codes.bytes.data(), codes.shape[1], view_of(tensors["latent"]), view_of(tensors["k_rope"]));
  return tensors;
}

NamedTensors with_pages(NamedTensors tensors, const MlaFile& shape) {
  const Batch batch = batch_of(shape);
  const PageTable table = deal_pages(batch, shape.page_size, shape.seed);
  std::vector<NamedTensor> parts;
  for (const char* name : {"latent", "k_rope", "latent_fp8"}) {
    if (tensors.contains(name)) parts.push_back(std::move(tensors[name]));
    tensors.erase(name);
  }
  std::int64_t bytes = 0;
  for (const NamedTensor& part : parts) bytes += row_bytes(part);
  const FileDtype dtype = parts.front().dtype;
  const std::int64_t width = bytes * 8 / bits_of(dtype);
  NamedTensor pages{dtype, {table.pages, table.page_size, width}, {}};
  pages.bytes.assign(static_cast<std::size_t>(table.pages * table.page_size * bytes), std::byte{0xff});
  const std::vector<PackedRun> all{{0, batch.k_tokens()}};
  std::int64_t token = 0;
  for (const PackedRun& run : pool_runs(table, batch.cu_k(), all)) {
    for (std::int64_t slot = run.begin; slot < run.end; ++slot, ++token) {
      std::byte* to = pages.bytes.data() + slot * bytes;
      for (const NamedTensor& part : parts) {
        to = std::copy_n(part.bytes.data() + token * row_bytes(part), row_bytes(part), to);
      }
    }
  }
  std::int64_t columns = 1;
  for (const std::int64_t length : shape.lengths) columns = std::max(columns, pages_of(length, shape.page_size));
  std::vector<std::int32_t> entries(shape.lengths.size() * static_cast<std::size_t>(columns), -1);
  for (std::size_t s = 0; s < shape.lengths.size(); ++s) {
    std::ranges::copy(table.of(s), entries.begin() + static_cast<std::ptrdiff_t>(s) * columns);
  }
  tensors["latent_pages"] = std::move(pages);
  tensors["block_table"] = int_list(entries, {static_cast<std::int64_t>(shape.lengths.size()), columns});
  tensors["lengths_k"] = long_list(shape.lengths);
  tensors.erase("cu_seqlens_k");
  return tensors;
}

}  // namespace ringattn::testing
