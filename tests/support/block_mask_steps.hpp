// SPDX-License-Identifier: Apache-2.0
// Decode steps with a block mask, and what Attention with the same mask gives: for tests of Decode on hosts and on
// GPUs.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/attention/block_mask_patterns.hpp"
#include "kernels/attention/top_k_selection.hpp"
#include "kernels/common/platform.hpp"
#include "tests/support/decode_rank.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

// A job in which all tokens are queries, its tensors, and the expected results of decode steps at the ends of its
// sequences.
class BlockMaskSteps {
 public:
  BlockMaskSteps(const AttentionSpec& spec, const std::vector<std::int64_t>& longest, std::uint64_t seed,
                 std::string_view backend)
      : backend_(backend) {
    job_.spec = spec;
    for (const std::int64_t length : longest) job_.batch.sequences.push_back({length, length, 0});
    tensors_ = random_tensors(job_, seed);
  }

  const Job& job() const { return job_; }
  const JobTensors& tensors() const { return tensors_; }

  // The block mask of the last `rows` rows of sequences of these lengths: `maker`'s mask, and the rows' own blocks.
  std::shared_ptr<const BlockMask> block_mask(const BlockMaskShape& shape, const std::vector<std::int64_t>& lengths,
                                              int rows, const BlockMaskPattern& maker) const {
    const std::vector<MaskedSequence> sequences = masked_sequences(step_job(lengths, rows).batch);
    const BlockMaskPattern own = [&](const BlockMaskRow& place, std::vector<std::int32_t>& blocks) {
      const std::int64_t first = std::max<std::int64_t>(0, sequences[place.sequence].position) / shape.key_block;
      for (std::int64_t b = first; b < place.blocks; ++b) blocks.push_back(static_cast<std::int32_t>(b));
    };
    return std::make_shared<const BlockMask>(make_block_mask(shape, sequences, union_of_patterns({maker, own})));
  }
  // Prefill's choice of the best blocks.
  std::shared_ptr<const BlockMask> best(const BlockMaskShape& shape, const std::vector<std::int64_t>& lengths, int rows,
                                        int count) const {
    const Job step = step_job(lengths, rows);
    const JobTensors of = step_tensors(lengths, rows);
    AttentionSpec spec = job_.spec;
    spec.block_mask = shape;
    const std::vector<MaskedSequence> sequences = masked_sequences(step.batch);
    const RowSource source = packed_rows(sequences, view(of.q, spec.heads, 0, step.batch.q_tokens()),
                                         view(of.k, spec.kv_heads, 0, step.batch.k_tokens()));
    const auto host = cpu::make_cpu_backend({1, 0});
    return std::make_shared<const BlockMask>(top_k_selection(spec, sequences, count, source, *host, {}));
  }

  // The results of these rows with this mask (none: all keys), at their places in the job of all tokens; NaN elsewhere.
  // `attend` computes them if a world of one rank is not wanted.
  using Attend = std::function<JobResult(const Job& job, const JobTensors& tensors)>;
  JobResult attended(std::shared_ptr<const BlockMask> block_mask, const std::vector<std::int64_t>& lengths, int rows,
                     const Attend& attend = nullptr) const {
    Job step = step_job(lengths, rows);
    set_block_mask(step, std::move(block_mask));
    const JobTensors tensors = step_tensors(lengths, rows);
    Options options;
    options.kernel.backend = backend_;
    options.threads = 1;
    const JobResult here = attend              ? attend(step, tensors)
                           : backend_ == "cpu" ? run_job(step, options, tensors, 1)
                                               : run_gpu_job(step, options, tensors, 1);
    JobResult all = poisoned_result(job_, 1);
    const auto row_bytes = static_cast<std::int64_t>(here.out.size()) / step.batch.q_tokens();
    const std::int64_t heads = job_.spec.heads;
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      const std::int64_t from = step.batch.cu_q()[s];
      const std::int64_t to = job_.batch.cu_q()[s] + lengths[s] - rows;
      std::copy_n(here.out.begin() + from * row_bytes, rows * row_bytes, all.out.begin() + to * row_bytes);
      std::copy_n(here.lse.begin() + from * heads, rows * heads, all.lse.begin() + to * heads);
    }
    return all;
  }

 private:
  Job step_job(const std::vector<std::int64_t>& lengths, int rows) const {
    Job step;
    step.spec = job_.spec;
    for (const std::int64_t length : lengths) step.batch.sequences.push_back({rows, length, length - rows});
    return step;
  }
  JobTensors step_tensors(const std::vector<std::int64_t>& lengths, int rows) const {
    JobTensors step;
    step.sinks = tensors_.sinks;
    const auto append = [&](std::vector<std::byte>& to, const std::vector<std::byte>& from, std::int64_t first,
                            std::int64_t tokens) {
      const std::int64_t token = static_cast<std::int64_t>(from.size()) / job_.batch.k_tokens();
      to.insert(to.end(), from.begin() + first * token, from.begin() + (first + tokens) * token);
    };
    for (std::size_t s = 0; s < lengths.size(); ++s) {
      const std::int64_t first = job_.batch.cu_k()[s];
      append(step.q, tensors_.q, first + lengths[s] - rows, rows);
      append(step.k, tensors_.k, first, lengths[s]);
      append(step.v, tensors_.v, first, lengths[s]);
    }
    return step;
  }
  TensorView view(const std::vector<std::byte>& rows, int heads, std::int64_t first, std::int64_t tokens) const {
    const std::int64_t token = heads * job_.spec.head_dim * static_cast<std::int64_t>(size_of(job_.spec.dtype));
    return dense_view(static_cast<const void*>(rows.data() + first * token), job_.spec.dtype, tokens, heads,
                      job_.spec.head_dim);
  }

  std::string backend_;
  Job job_;
  JobTensors tensors_;
};

}  // namespace ringattn::testing
