// SPDX-License-Identifier: Apache-2.0
// Decoding over a cache of latents has the bits of an absorbed Latent over the whole sequences: dense and in pages, on
// one rank and on several, for rows that join the cache step by step.
#include "attention/latent_decode.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "comm/self.hpp"
#include "kernels/latent_rows.hpp"
#include "tests/support/error_of.hpp"
#include "tests/support/latent_products.hpp"
#include "tests/support/latent_rank.hpp"
#include "tests/support/random_elements.hpp"

namespace ringattn::testing {
namespace {

constexpr int kSteps = 3;

LatentSpec small_spec(bool everything) {
  LatentSpec spec;
  spec.heads = 2;
  spec.head_dim = 16;
  spec.rope_dim = 8;
  spec.head_dim_v = 24;
  spec.latent_dim = 40;
  spec.softmax_scale = default_softmax_scale(spec);
  spec.sinks = everything;
  spec.softcap = everything ? 5.0F : 0.0F;
  return spec;
}

// Sequences whose last kSteps · rows tokens are queries.
LatentJob whole_job(const LatentSpec& spec, const std::vector<std::int64_t>& lengths, int rows) {
  LatentJob job{spec, {}, LatentForm::kAbsorbed};
  for (const std::int64_t length : lengths) {
    job.batch.sequences.push_back({kSteps * rows, length, length - kSteps * rows});
  }
  return job;
}

LatentOptions prefill_options() {
  LatentOptions options;
  options.ring.kernel.backend = "cpu";
  options.ring.threads = 1;
  return options;
}

DecodeOptions decode_options() {
  DecodeOptions options;
  options.kernel.backend = "cpu";
  options.threads = 1;
  return options;
}

// Rows of packed tokens side by side: [sequences · rows].
std::vector<std::byte> step_rows(const std::vector<std::byte>& packed, std::size_t row_bytes,
                                 const std::vector<std::int64_t>& first_tokens, int rows) {
  std::vector<std::byte> picked;
  for (const std::int64_t first : first_tokens) {
    const auto begin = packed.begin() + first * static_cast<std::int64_t>(row_bytes);
    picked.insert(picked.end(), begin, begin + rows * static_cast<std::int64_t>(row_bytes));
  }
  return picked;
}

// Packed tokens' rows, of which one is `row` numbers of 16 bits.
MutableTensorView tokens_of(std::vector<std::byte>& packed, std::int64_t row) {
  return dense_view(static_cast<void*>(packed.data()), Dtype::kBf16,
                    static_cast<std::int64_t>(packed.size()) / (2 * row), 1, row);
}

// The tokens' rows of 8 bits, one behind the other.
std::vector<std::byte> packed_rows(const LatentSpec& spec, LatentTensors& tensors) {
  const MutableTensorView latent = tokens_of(tensors.latent, spec.latent_dim);
  const std::int64_t bytes = latent_row_bytes(spec.latent_dim, spec.rope_dim);
  std::vector<std::byte> rows(static_cast<std::size_t>(latent.tokens * bytes));
  pack_latent_rows(latent, tokens_of(tensors.k_rope, spec.rope_dim), rows.data(), bytes);
  return rows;
}

// The same tokens once they have been packed and unpacked.
LatentTensors unpacked(const LatentSpec& spec, LatentTensors tensors) {
  const std::vector<std::byte> rows = packed_rows(spec, tensors);
  unpack_latent_rows(rows.data(), latent_row_bytes(spec.latent_dim, spec.rope_dim),
                     tokens_of(tensors.latent, spec.latent_dim), tokens_of(tensors.k_rope, spec.rope_dim));
  return tensors;
}

// A rank's cache, filled with the tokens before the first step; all else is NaN.
struct Cache {
  std::vector<std::byte> bytes;
  std::vector<std::int32_t> table;
  std::int64_t table_pages = 1;
  MutableCacheView view;
  CompressedCache packed;

  Cache(const LatentDecode& decode, Decode& in_latent, const LatentJob& job, LatentTensors tensors) {
    const LatentSpec& spec = job.spec;
    const std::int64_t page_size = decode.job().page_size;
    const auto count = static_cast<std::int64_t>(job.batch.sequences.size());
    std::int64_t most = 1;
    for (const Sequence& s : job.batch.sequences) most = std::max(most, in_latent.cache_tokens(s.k_len));
    if (page_size > 0) table_pages = (most + page_size - 1) / page_size;
    const std::int64_t page_tokens = page_size > 0 ? page_size : most;
    const std::int64_t pages = count * table_pages;
    table.resize(static_cast<std::size_t>(pages));
    std::iota(table.begin(), table.end(), 0);
    std::mt19937_64 generator(1);
    if (page_size > 0) std::ranges::shuffle(table, generator);
    const std::int64_t wide = spec.latent_dim + spec.rope_dim;
    const bool codes = !decode.job().format.is_plain();
    const std::int64_t row = codes ? latent_row_bytes(spec.latent_dim, spec.rope_dim) : 2 * wide;
    bytes.assign(static_cast<std::size_t>(pages * page_tokens * row), std::byte{0xff});
    std::vector<std::byte> rows;
    if (codes) {
      packed = latent_cache(bytes.data(), spec.latent_dim, spec.rope_dim, pages, page_tokens);
      rows = packed_rows(spec, tensors);
    } else {
      view = cache_view(bytes.data(), spec.dtype, pages, page_tokens, 1, wide);
    }
    const std::int64_t group = in_latent.group_keys();
    const GroupShare share = in_latent.share();
    std::int64_t packed_keys = 0;
    for (std::int64_t s = 0; s < count; ++s) {
      const Sequence& sequence = job.batch.sequences[static_cast<std::size_t>(s)];
      for (std::int64_t key = 0; key < sequence.q_offset; ++key) {
        const std::int64_t number = key / group;
        if (number % share.every != share.first) continue;
        const std::int64_t place = number / share.every * group + key % group;
        const std::int64_t page = table[static_cast<std::size_t>(s * table_pages + place / page_tokens)];
        std::byte* const to = bytes.data() + (page * page_tokens + place % page_tokens) * row;
        if (codes) {
          std::memcpy(to, rows.data() + (packed_keys + key) * row, static_cast<std::size_t>(row));
          continue;
        }
        std::memcpy(to, tensors.latent.data() + (packed_keys + key) * spec.latent_dim * 2,
                    static_cast<std::size_t>(spec.latent_dim) * 2);
        std::memcpy(to + spec.latent_dim * 2, tensors.k_rope.data() + (packed_keys + key) * spec.rope_dim * 2,
                    static_cast<std::size_t>(spec.rope_dim) * 2);
      }
      packed_keys += sequence.k_len;
    }
  }
};

// One rank's steps against its rows of the reference. Returns how many rows were compared.
std::int64_t decode_steps(Transport& transport, const LatentJob& job, const LatentTensors& tensors,
                          const JobResult& reference, int rows, std::int64_t page_size, bool enqueued,
                          const RowFormat& format = {}) {
  const LatentSpec& spec = job.spec;
  const auto count = static_cast<std::int64_t>(job.batch.sequences.size());
  std::int64_t longest = 0;
  for (const Sequence& s : job.batch.sequences) longest = std::max(longest, s.k_len);
  LatentDecode decode({spec, {count, rows, longest}, page_size, 0, format}, transport, decode_options());
  Cache cache(decode, decode.in_latent(), job, tensors);
  std::vector<std::int32_t> lengths;
  for (const Sequence& s : job.batch.sequences) lengths.push_back(static_cast<std::int32_t>(s.q_offset));

  const SequenceRange mine = decode.in_latent().owned(count);
  const auto view = [&](const std::vector<std::byte>& bytes, std::int64_t tokens, int heads, int dim) {
    return dense_view(static_cast<const void*>(bytes.data()), spec.dtype, tokens, heads, dim);
  };
  const auto head_bytes = static_cast<std::size_t>(spec.heads) * 2;
  const std::size_t out_row = head_bytes * static_cast<std::size_t>(spec.head_dim_v);
  std::int64_t compared = 0;
  for (int step = 0; step < kSteps; ++step) {
    std::vector<std::int64_t> first_queries;
    std::vector<std::int64_t> first_keys;
    std::int64_t keys = 0;
    for (std::int64_t s = 0; s < count; ++s) {
      first_queries.push_back((s * kSteps + step) * rows);
      first_keys.push_back(keys + lengths[static_cast<std::size_t>(s)]);
      keys += job.batch.sequences[static_cast<std::size_t>(s)].k_len;
    }
    const auto q =
        step_rows(tensors.q, head_bytes * static_cast<std::size_t>(spec.head_dim + spec.rope_dim), first_queries, rows);
    const auto c = step_rows(tensors.latent, static_cast<std::size_t>(spec.latent_dim) * 2, first_keys, rows);
    const auto r = step_rows(tensors.k_rope, static_cast<std::size_t>(spec.rope_dim) * 2, first_keys, rows);
    std::vector<std::byte> out(static_cast<std::size_t>(mine.count * rows) * out_row, std::byte{0xff});
    std::vector<float> lse(static_cast<std::size_t>(mine.count * rows * spec.heads), -1.0F);
    LatentDecodeInputs inputs;
    inputs.q = view(q, count * rows, spec.heads, spec.head_dim + spec.rope_dim);
    inputs.rows = rows;
    inputs.cache = cache.view;
    inputs.packed = cache.packed;
    if (page_size > 0) inputs.block_table = {cache.table.data(), cache.table_pages};
    inputs.table_pages = page_size > 0 ? cache.table_pages : 0;
    inputs.lengths = lengths.data();
    inputs.grow = true;
    inputs.latent = view(c, count * rows, 1, spec.latent_dim);
    inputs.k_rope = view(r, count * rows, 1, spec.rope_dim);
    inputs.w_uk = matrices_of(tensors.w_uk, spec, spec.head_dim);
    inputs.w_uv = matrices_of(tensors.w_uv, spec, spec.head_dim_v);
    if (spec.sinks) inputs.sinks = tensors.sinks.data();
    const LatentOutputs outputs{
        dense_view(static_cast<void*>(out.data()), spec.dtype, mine.count * rows, spec.heads, spec.head_dim_v),
        {lse.data(), spec.heads, 1}};
    if (enqueued) {
      decode.enqueue(inputs, outputs);
      decode.wait();
    } else {
      decode.run(inputs, outputs);
    }
    for (std::int64_t s = 0; s < mine.count; ++s) {
      const auto first = static_cast<std::size_t>(first_queries[static_cast<std::size_t>(mine.first + s)]);
      const auto at = static_cast<std::size_t>(s * rows);
      const auto n = static_cast<std::size_t>(rows);
      const auto heads = static_cast<std::size_t>(spec.heads);
      EXPECT_EQ(std::memcmp(out.data() + at * out_row, reference.out.data() + first * out_row, n * out_row), 0)
          << "sequence " << mine.first + s << ", step " << step << ", rank " << transport.rank();
      EXPECT_EQ(std::memcmp(lse.data() + at * heads, reference.lse.data() + first * heads, n * heads * sizeof(float)),
                0)
          << "sequence " << mine.first + s << ", step " << step << ", rank " << transport.rank();
      compared += rows;
    }
  }
  return compared;
}

TEST(LatentDecode, HasTheBitsOfAnAbsorbedLatent) {
  const std::vector<std::int64_t> lengths = {12, 130, 300, 2 * 8192 + 5};
  for (const bool everything : {false, true}) {
    for (const int rows : {1, 2}) {
      const LatentJob job = whole_job(small_spec(everything), lengths, rows);
      const LatentTensors tensors = random_latents(job, 21);
      const JobResult reference = run_latent_job(job, prefill_options(), tensors, 1);
      for (const int world : {1, 2, 3}) {
        for (const std::int64_t page_size : {0, 16, 64}) {
          SCOPED_TRACE("world " + std::to_string(world) + ", pages of " + std::to_string(page_size));
          std::vector<std::int64_t> compared(static_cast<std::size_t>(world), 0);
          const auto rank = [&](Transport& transport) {
            compared[static_cast<std::size_t>(transport.rank())] =
                decode_steps(transport, job, tensors, reference, rows, page_size, page_size == 16);
          };
          if (world == 1) {
            rank(*make_self_transport());
          } else {
            run_threads_world(world, {}, rank);
          }
          EXPECT_EQ(std::accumulate(compared.begin(), compared.end(), std::int64_t{0}),
                    static_cast<std::int64_t>(lengths.size()) * rows * kSteps);
        }
      }
    }
  }
}

// Over rows of 8 bits, which new ones join: the bits over what they are unpacked to.
TEST(LatentDecode, PackedRowsAreWhatTheyAreUnpackedTo) {
  LatentSpec spec = small_spec(true);
  spec.latent_dim = 256;
  spec.softmax_scale = default_softmax_scale(spec);
  const LatentJob job = whole_job(spec, {12, 130, 8192 + 5}, 2);
  const LatentTensors tensors = random_latents(job, 22);
  const JobResult reference = run_latent_job(job, prefill_options(), unpacked(spec, tensors), 1);
  for (const int world : {1, 2}) {
    for (const std::int64_t page_size : {0, 16, 64}) {
      SCOPED_TRACE("world " + std::to_string(world) + ", pages of " + std::to_string(page_size));
      std::vector<std::int64_t> compared(static_cast<std::size_t>(world), 0);
      const auto rank = [&](Transport& transport) {
        compared[static_cast<std::size_t>(transport.rank())] = decode_steps(
            transport, job, tensors, reference, 2, page_size, page_size == 16, latent_format(spec.rope_dim));
      };
      if (world == 1) {
        rank(*make_self_transport());
      } else {
        run_threads_world(world, {}, rank);
      }
      EXPECT_EQ(std::accumulate(compared.begin(), compared.end(), std::int64_t{0}), 3 * 2 * kSteps);
    }
  }
}

// Queries that a caller has brought into the latent, and outputs that it brings back, have the bits of the matrices.
TEST(LatentDecode, ProductsOfTheCallersHaveTheSameBits) {
  constexpr std::int64_t kSequences = 3, kRows = 2, kKeys = 300;
  const LatentSpec spec = small_spec(true);
  const int wide = spec.latent_dim + spec.rope_dim;
  std::mt19937_64 random(23);
  const LatentTensors tensors =
      random_latents({spec, uniform_batch(kSequences, kRows, kRows), LatentForm::kAbsorbed}, 24);
  std::vector<std::byte> cache = random_elements(kSequences * kKeys * wide, spec.dtype, random);
  std::vector<std::int32_t> lengths{2, 131, 300};
  const auto self = make_self_transport();
  LatentDecode decode({spec, {kSequences, kRows, kKeys}, 0, 0}, *self, decode_options());
  const auto step = [&](const std::vector<std::byte>& q, const HeadMatrices& w_uk, const HeadMatrices& w_uv) {
    const auto view_dim = w_uk.data == nullptr ? wide : spec.head_dim + spec.rope_dim;
    const int out_dim = w_uv.data == nullptr ? spec.latent_dim : spec.head_dim_v;
    LatentDecodeInputs inputs;
    inputs.q = dense_view(static_cast<const void*>(q.data()), spec.dtype, kSequences * kRows, spec.heads, view_dim);
    inputs.rows = kRows;
    inputs.cache = cache_view(cache.data(), spec.dtype, kSequences, kKeys, 1, wide);
    inputs.lengths = lengths.data();
    inputs.w_uk = w_uk;
    inputs.w_uv = w_uv;
    inputs.sinks = tensors.sinks.data();
    std::vector<std::byte> out(static_cast<std::size_t>(kSequences * kRows * spec.heads * out_dim) * 2,
                               std::byte{0xff});
    decode.run(inputs,
               {dense_view(static_cast<void*>(out.data()), spec.dtype, kSequences * kRows, spec.heads, out_dim), {}});
    return out;
  };
  const HeadMatrices w_uk = matrices_of(tensors.w_uk, spec, spec.head_dim);
  const HeadMatrices w_uv = matrices_of(tensors.w_uv, spec, spec.head_dim_v);
  const std::vector<std::byte> whole = step(tensors.q, w_uk, w_uv);
  const std::vector<std::byte> absorbed = queries_in_latent(spec, tensors.q, tensors.w_uk, "cpu");
  EXPECT_EQ(step(absorbed, {}, w_uv), whole);
  EXPECT_EQ(outputs_of_latent(spec, step(absorbed, {}, {}), tensors.w_uv, "cpu"), whole);
  EXPECT_EQ(outputs_of_latent(spec, step(tensors.q, w_uk, {}), tensors.w_uv, "cpu"), whole);
}

TEST(LatentDecode, RefusesWhatDoesNotFit) {
  const auto self = make_self_transport();
  const LatentSpec spec = small_spec(false);
  DecodeOptions options = decode_options();
  LatentDecode decode({spec, {2, 1, 100}, 16, 0}, *self, options);
  const std::vector<std::byte> zeros(1 << 16, std::byte{0});
  std::vector<std::byte> out(1 << 12);
  LatentDecodeInputs inputs;
  const auto view = [&](std::int64_t tokens, int heads, int dim) {
    return dense_view(static_cast<const void*>(zeros.data()), spec.dtype, tokens, heads, dim);
  };
  inputs.q = view(2, spec.heads, 48);  // in the latent, though w_uk is given
  inputs.w_uk = matrices_of(zeros, spec, spec.head_dim);
  inputs.w_uv = matrices_of(zeros, spec, spec.head_dim_v);
  const LatentOutputs outputs{dense_view(static_cast<void*>(out.data()), spec.dtype, 2, spec.heads, 24), {}};
  const auto message = [&] { return std::string(error_of([&] { decode.run(inputs, outputs); }).what()); };
  EXPECT_NE(message().find("q is bf16 [2, 2, 48]"), std::string::npos) << message();
  EXPECT_NE(message().find("bf16 [2, 2, 24]"), std::string::npos) << message();
  inputs.q = view(2, spec.heads, 24);
  inputs.latent = view(2, 1, 40);
  EXPECT_NE(message().find("k_rope is "), std::string::npos) << message();
  inputs.latent = {};
  inputs.w_uv = {};
  EXPECT_NE(message().find("out is bf16 [2, 2, 24]"), std::string::npos) << message();

  const auto made = [&](const RowFormat& format, int latent_dim) {
    LatentSpec other = spec;
    other.latent_dim = latent_dim;
    return std::string(error_of([&] { LatentDecode({other, {2, 1, 100}, 16, 0, format}, *self, options); }).what());
  };
  EXPECT_NE(made(latent_format(4), 128).find("cached latents stored as latent rope 4"), std::string::npos);
  EXPECT_NE(made({RowCoding::kInt8}, 128).find("plain or latent rope 8"), std::string::npos);
  EXPECT_NE(made(latent_format(8), 40).find("40 of 48 channels in codes"), std::string::npos);
  LatentSpec coded = spec;
  coded.latent_dim = 128;
  LatentSpec half = coded;
  half.dtype = Dtype::kF16;
  const Error of_half = error_of([&] { LatentDecode({half, {2, 1, 100}, 16, 0, latent_format(8)}, *self, options); });
  EXPECT_NE(std::string(of_half.what()).find("8-bit cached latents in a job of fp16"), std::string::npos)
      << of_half.what();
  EXPECT_EQ(LatentDecode({coded, {2, 1, 100}, 16, 0, latent_format(8)}, *self, options).in_latent().memory().cache,
            2U * 7U * 16U * (128U + 4U + 16U));

  EXPECT_GT(decode.memory_bytes(), decode.in_latent().memory().total());
  EXPECT_EQ(decode.in_latent().memory().cache, 2U * 7U * 16U * 48U * 2U) << "values lie in the keys";
  options.memory_budget = decode.in_latent().memory().total();
  EXPECT_EQ(error_of([&] { LatentDecode({spec, {2, 1, 100}, 16, 0}, *self, options); }).code(), ErrorCode::kMemory);
}

}  // namespace
}  // namespace ringattn::testing
