// SPDX-License-Identifier: Apache-2.0
#include "tests/support/mla_steps.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>

#include "kernels/quant/latent_rows.hpp"
#include "tests/support/device_pool.hpp"

namespace ringattn::testing {

namespace {

std::int64_t sequences_of(const MlaJob& job) { return static_cast<std::int64_t>(job.batch.sequences.size()); }

// A view of no rows has memory, too.
std::size_t at_least_one(std::int64_t bytes) { return static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)); }

}  // namespace

MlaJob stepwise_job(const MlaSpec& spec, const std::vector<std::int64_t>& lengths, int rows, int steps) {
  MlaJob job{spec, {}, MlaForm::kAbsorbed};
  for (const std::int64_t length : lengths)
    job.batch.sequences.push_back({steps * rows, length, length - steps * rows});
  return job;
}

MlaDecodeJob mla_decode_job(const MlaJob& job, int rows, std::int64_t page_size, const RowFormat& format) {
  std::int64_t longest = 0;
  for (const Sequence& s : job.batch.sequences) longest = std::max(longest, s.k_len);
  return {job.spec, {sequences_of(job), rows, longest}, page_size, 0, format};
}

MlaSteps::MlaSteps(MlaDecode& decode, const MlaJob& job, const MlaTensors& tensors)
    : decode_(decode),
      backend_(decode.in_latent().backend()),
      job_(job),
      tensors_(tensors),
      rows_(decode.job().limits.rows),
      mine_(decode.in_latent().owned(sequences_of(job))),
      table_pages_([&] {
        const std::int64_t page = decode.job().page_size;
        const std::int64_t most = decode.in_latent().cache_tokens(decode.job().limits.keys);
        return page > 0 ? (most + page - 1) / page : 1;
      }()),
      page_tokens_(decode.job().page_size > 0 ? decode.job().page_size
                                              : decode.in_latent().cache_tokens(decode.job().limits.keys)),
      row_bytes_(decode.job().format.is_plain() ? (job.spec.latent_dim + job.spec.rope_dim) * element()
                                                : latent_row_bytes(job.spec.latent_dim, job.spec.rope_dim)),
      cache_(backend_, static_cast<std::size_t>(sequences_of(job) * table_pages_ * page_tokens_ * row_bytes_)),
      table_there_(backend_, static_cast<std::size_t>(sequences_of(job) * table_pages_) * sizeof(std::int32_t)),
      lengths_(backend_, static_cast<std::size_t>(sequences_of(job)) * sizeof(std::int32_t)),
      q_(backend_, static_cast<std::size_t>(sequences_of(job) * rows_ * job.spec.heads *
                                            (job.spec.head_dim + job.spec.rope_dim) * element())),
      latent_(backend_, static_cast<std::size_t>(sequences_of(job) * rows_ * job.spec.latent_dim * element())),
      k_rope_(backend_, static_cast<std::size_t>(sequences_of(job) * rows_ * job.spec.rope_dim * element())),
      w_uk_(backend_, tensors.w_uk.size()),
      w_uv_(backend_, tensors.w_uv.size()),
      sinks_(backend_, at_least_one(static_cast<std::int64_t>(tensors.sinks.size() * sizeof(float)))),
      out_(backend_, at_least_one(own_rows() * out_bytes())),
      lse_(backend_, at_least_one(own_rows() * lse_bytes())) {
  table_.resize(static_cast<std::size_t>(sequences_of(job) * table_pages_));
  std::iota(table_.begin(), table_.end(), 0);
  std::mt19937_64 generator(1);
  if (decode.job().page_size > 0) std::ranges::shuffle(table_, generator);
  table_there_.write(bytes_of(table_));
  std::vector<std::int32_t> lengths;
  for (const Sequence& s : job.batch.sequences) lengths.push_back(static_cast<std::int32_t>(s.q_offset));
  lengths_.write(bytes_of(lengths));
  w_uk_.write(tensors.w_uk);
  w_uv_.write(tensors.w_uv);
  sinks_.write(bytes_of(tensors.sinks));
  fill(tensors);
}

// The keys before the first step that are this rank's share.
void MlaSteps::fill(MlaTensors tensors) {
  const MlaSpec& spec = job_.spec;
  const bool codes = !decode_.job().format.is_plain();
  if (codes) tensors = with_fp8_latents(spec, std::move(tensors));
  const std::int64_t c_bytes = spec.latent_dim * element();
  const std::int64_t r_bytes = spec.rope_dim * element();
  const std::int64_t group = decode_.in_latent().kv_split_keys();
  const KvPartition partition = decode_.in_latent().partition();
  std::vector<std::byte> bytes = cache_.read();
  const std::vector<std::int64_t> cu = job_.batch.cu_k();
  for (std::size_t s = 0; s < job_.batch.sequences.size(); ++s) {
    for (std::int64_t key = 0; key < job_.batch.sequences[s].q_offset; ++key) {
      const std::int64_t number = key / group;
      if (number % partition.stride != partition.first) continue;
      const std::int64_t place = number / partition.stride * group + key % group;
      const std::int64_t page =
          table_[s * static_cast<std::size_t>(table_pages_) + static_cast<std::size_t>(place / page_tokens_)];
      std::byte* const to = bytes.data() + (page * page_tokens_ + place % page_tokens_) * row_bytes_;
      const std::int64_t from = cu[s] + key;
      if (codes) {
        std::memcpy(to, tensors.packed.data() + from * row_bytes_, static_cast<std::size_t>(row_bytes_));
        continue;
      }
      std::memcpy(to, tensors.latent.data() + from * c_bytes, static_cast<std::size_t>(c_bytes));
      std::memcpy(to + c_bytes, tensors.k_rope.data() + from * r_bytes, static_cast<std::size_t>(r_bytes));
    }
  }
  cache_.write(bytes);
}

std::vector<std::byte> MlaSteps::rows_of(const std::vector<std::byte>& packed, std::int64_t row_bytes,
                                         const std::vector<std::int64_t>& first) const {
  std::vector<std::byte> rows;
  for (const std::int64_t row : first) {
    const auto begin = packed.begin() + row * row_bytes;
    rows.insert(rows.end(), begin, begin + rows_ * row_bytes);
  }
  return rows;
}

std::vector<std::int64_t> MlaSteps::first_queries(int step) const {
  std::vector<std::int64_t> first = job_.batch.cu_q();
  first.pop_back();
  for (std::int64_t& row : first) row += std::int64_t{step} * rows_;
  return first;
}

void MlaSteps::load(int step) {
  const MlaSpec& spec = job_.spec;
  std::vector<std::int64_t> keys = job_.batch.cu_k();
  keys.pop_back();
  for (std::size_t s = 0; s < keys.size(); ++s) {
    keys[s] += job_.batch.sequences[s].q_offset + std::int64_t{step} * rows_;
  }
  q_.write(rows_of(tensors_.q, spec.heads * (spec.head_dim + spec.rope_dim) * element(), first_queries(step)));
  latent_.write(rows_of(tensors_.latent, spec.latent_dim * element(), keys));
  k_rope_.write(rows_of(tensors_.k_rope, spec.rope_dim * element(), keys));
  out_.clear();
  lse_.clear();
}

MlaDecodeInputs MlaSteps::inputs() const {
  const MlaSpec& spec = job_.spec;
  const std::int64_t count = sequences_of(job_) * rows_;
  const std::int64_t pages = sequences_of(job_) * table_pages_;
  const auto view = [&](const DeviceArray& rows, int heads, int dim) {
    return dense_view(static_cast<const void*>(rows.data()), spec.dtype, count, heads, dim);
  };
  MlaDecodeInputs inputs;
  inputs.q = view(q_, spec.heads, spec.head_dim + spec.rope_dim);
  inputs.rows = rows_;
  if (decode_.job().format.is_plain()) {
    inputs.cache = cache_view(cache_.data(), spec.dtype, pages, page_tokens_, 1, spec.latent_dim + spec.rope_dim);
  } else {
    inputs.fp8_rows = latent_cache(cache_.data(), spec.latent_dim, spec.rope_dim, pages, page_tokens_);
  }
  if (decode_.job().page_size > 0) {
    inputs.block_table = {reinterpret_cast<const std::int32_t*>(table_there_.data()), table_pages_};
    inputs.table_pages = table_pages_;
  }
  inputs.lengths_before = reinterpret_cast<std::int32_t*>(lengths_.data());
  inputs.update_lengths = true;
  inputs.latent = view(latent_, 1, spec.latent_dim);
  inputs.k_rope = view(k_rope_, 1, spec.rope_dim);
  inputs.w_uk = matrices_of(tensors_.w_uk, spec, spec.head_dim);
  inputs.w_uk.data = w_uk_.data();
  inputs.w_uv = matrices_of(tensors_.w_uv, spec, spec.head_dim_v);
  inputs.w_uv.data = w_uv_.data();
  if (spec.sinks) inputs.sinks = sinks_.floats();
  return inputs;
}

MlaOutputs MlaSteps::outputs() const {
  const MlaSpec& spec = job_.spec;
  return {dense_view(static_cast<void*>(out_.data()), spec.dtype, own_rows(), spec.heads, spec.head_dim_v),
          {lse_.floats(), spec.heads, 1}};
}

std::string MlaSteps::difference(const JobResult& reference, int step) const {
  JobResult found = reference;
  take(found, step);
  if (found.same_bits(reference)) return {};
  const std::vector<std::int64_t> first = first_queries(step);
  for (std::int64_t s = mine_.first; s < mine_.end(); ++s) {
    const auto at = static_cast<std::size_t>(first[static_cast<std::size_t>(s)] * out_bytes());
    const bool same = std::memcmp(found.out.data() + at, reference.out.data() + at,
                                  static_cast<std::size_t>(rows_ * out_bytes())) == 0;
    if (!same) return fmt::format("O of sequence {}", s);
  }
  return "LSE";
}

void MlaSteps::take(JobResult& result, int step) const {
  const std::vector<std::byte> out = out_.read();
  const std::vector<std::byte> lse = lse_.read();
  const std::vector<std::int64_t> first = first_queries(step);
  auto* const all_lse = reinterpret_cast<std::byte*>(result.lse.data());
  for (std::int64_t s = 0; s < mine_.count; ++s) {
    const std::int64_t row = first[static_cast<std::size_t>(mine_.first + s)];
    std::memcpy(result.out.data() + row * out_bytes(), out.data() + s * rows_ * out_bytes(),
                static_cast<std::size_t>(rows_ * out_bytes()));
    std::memcpy(all_lse + row * lse_bytes(), lse.data() + s * rows_ * lse_bytes(),
                static_cast<std::size_t>(rows_ * lse_bytes()));
  }
}

}  // namespace ringattn::testing
