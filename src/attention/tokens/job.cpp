// SPDX-License-Identifier: Apache-2.0
#include "attention/tokens/job.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.hpp"
#include "base/size.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kFar = std::int64_t{1} << 62;

template <typename Length>
std::vector<std::int64_t> cumulate(const std::vector<Sequence>& sequences, Length length) {
  std::vector<std::int64_t> cumulative{0};
  cumulative.reserve(sequences.size() + 1);
  for (const Sequence& sequence : sequences) cumulative.push_back(cumulative.back() + length(sequence));
  return cumulative;
}

// Sum of clamp(first + i, low, high) over i in [0, count): the number of keys that consecutive rows see on one side.
double clamped_sum(std::int64_t first, std::int64_t count, std::int64_t low, std::int64_t high) {
  if (count <= 0) return 0.0;
  const std::int64_t below = std::clamp(low - first, std::int64_t{0}, count);  // rows at `low`
  const std::int64_t until = std::clamp(high - first, below, count);           // rows before `high` is reached
  const auto ramp = static_cast<double>(until - below);
  const double ramp_sum = ramp * static_cast<double>(first + below) + ramp * (ramp - 1.0) / 2.0;
  return static_cast<double>(below) * static_cast<double>(low) + ramp_sum +
         static_cast<double>(count - until) * static_cast<double>(high);
}

void check_cumulative(std::string_view name, std::span<const std::int64_t> cu) {
  if (cu.size() < 2 || cu[0] != 0) {
    fail(ErrorCode::kFile, fmt::format("{} is no list of cumulative lengths", name),
         cu.empty()      ? "it is empty"
         : cu.size() < 2 ? "it has one entry"
                         : fmt::format("it starts with {}", cu[0]),
         "It starts with 0 and holds one entry more than there are sequences.");
  }
  for (std::size_t i = 1; i < cu.size(); ++i) {
    if (cu[i] < cu[i - 1]) {
      fail(ErrorCode::kFile, fmt::format("{} descends at entry {}", name, i),
           fmt::format("{} after {}", cu[i], cu[i - 1]),
           "It holds the ends of the sequences, each at least the one before.");
    }
  }
}

}  // namespace

std::int64_t Job::q_tokens() const { return cu_q().back(); }
std::int64_t Job::k_tokens() const { return cu_k().back(); }

std::vector<std::int64_t> Job::cu_q() const {
  return cumulate(sequences, [](const Sequence& s) { return s.q_len; });
}
std::vector<std::int64_t> Job::cu_k() const {
  return cumulate(sequences, [](const Sequence& s) { return s.k_len; });
}

std::vector<Sequence> uniform_sequences(std::int64_t batch, std::int64_t q_len, std::int64_t k_len) {
  return std::vector<Sequence>(static_cast<std::size_t>(batch), Sequence{q_len, k_len, k_len - q_len});
}

std::vector<Sequence> packed_sequences(std::span<const std::int64_t> cu_q, std::span<const std::int64_t> cu_k,
                                       std::span<const std::int64_t> q_offset) {
  check_cumulative("cu_seqlens_q", cu_q);
  check_cumulative("cu_seqlens_k", cu_k);
  if (cu_q.size() != cu_k.size()) {
    fail(ErrorCode::kFile,
         fmt::format("cu_seqlens_q names {} sequences, cu_seqlens_k {}", cu_q.size() - 1, cu_k.size() - 1),
         "every sequence has queries and keys", "Give both as many entries; a sequence may be empty on either side.");
  }
  if (!q_offset.empty() && q_offset.size() != cu_q.size() - 1) {
    fail(ErrorCode::kFile, fmt::format("q_offset has {} entries", q_offset.size()),
         fmt::format("the job has {}", counted(cu_q.size() - 1, "sequence")), "It holds one position per sequence.");
  }
  std::vector<Sequence> sequences;
  sequences.reserve(cu_q.size() - 1);
  for (std::size_t i = 0; i + 1 < cu_q.size(); ++i) {
    const std::int64_t q_len = cu_q[i + 1] - cu_q[i];
    const std::int64_t k_len = cu_k[i + 1] - cu_k[i];
    sequences.push_back({q_len, k_len, q_offset.empty() ? k_len - q_len : q_offset[i]});
  }
  return sequences;
}

double visible_pairs(const Mask& mask, std::int64_t position, std::int64_t rows, KeyRange keys) {
  if (keys.empty() || rows <= 0) return 0.0;
  // Row at p sees [clamp(p − left), clamp(p + right + 1)) of the keys; where that is empty both clamp to the same
  // bound.
  const auto all = static_cast<double>(rows);
  const double ends = mask.right < 0 ? all * static_cast<double>(keys.end)
                                     : clamped_sum(position + mask.right + 1, rows, keys.begin, keys.end);
  const double begins = mask.left < 0 ? all * static_cast<double>(keys.begin)
                                      : clamped_sum(position - mask.left, rows, keys.begin, keys.end);
  return ends - begins;
}

double visible_pairs(const Job& job) {
  double pairs = 0.0;
  for (const Sequence& s : job.sequences) pairs += visible_pairs(job.spec.mask, s.q_offset, s.q_len, {0, s.k_len});
  return pairs;
}

double job_flops(const Job& job) {
  return 2.0 * visible_pairs(job) * job.spec.heads * (job.spec.head_dim + job.spec.head_dim_v);
}

void check_job(const Job& job) {
  check_heads(job.spec);
  const Mask& mask = job.spec.mask;
  if (mask.left < -1 || mask.right < -1 || mask.left > kFar || mask.right > kFar) {
    fail(ErrorCode::kUsage, fmt::format("window {},{}", mask.left, mask.right),
         "each side is a number of tokens, or -1 for unlimited", "Use -1, or 0 to 2^62 tokens.");
  }
  for (std::size_t i = 0; i < job.sequences.size(); ++i) {
    const Sequence& s = job.sequences[i];
    if (s.q_len < 0 || s.k_len < 0 || s.q_len > kFar / 4 || s.k_len > kFar / 4) {
      fail(ErrorCode::kUsage, fmt::format("sequence {} has {} queries and {} keys", i, s.q_len, s.k_len),
           "lengths lie between 0 and 2^60", "Check the lengths of the job's sequences.");
    }
    if (s.q_offset > kFar / 4 || s.q_offset < -kFar / 4) {
      fail(ErrorCode::kUsage, fmt::format("sequence {} starts at position {}", i, s.q_offset),
           "positions lie between -2^60 and 2^60", {"Check ", setting("query_offset"), ", or q_offset."});
    }
  }
}

}  // namespace ringattn
