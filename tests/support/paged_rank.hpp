// SPDX-License-Identifier: Apache-2.0
// A rank's side of an Attention whose keys lie in pages: its queries, and its keys in a pool, in the memory of the
// kernel. Unowned entries are NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "ops/attention/attention.hpp"
#include "tests/support/device_array.hpp"
#include "tests/support/page_pool.hpp"
#include "tests/support/ring_job.hpp"

namespace ringattn::testing {

class PagedRank {
 public:
  // Holds the rank's share of packed tensors, in the attention's current layout. The attention must outlive it.
  PagedRank(Attention& attention, int rank, const JobTensors& tensors, const PageLayout& pages);

  Inputs inputs() const;
  Outputs outputs() const;
  std::span<std::byte> workspace() const { return {workspace_.data(), workspace_bytes_}; }
  Stream stream() const { return backend_.stream(); }
  std::vector<std::int32_t>& table() { return table_; }
  const PagePool& pool() const { return pool_; }

  // Puts the rank's rows into a result of full size.
  void collect(JobResult& result) const;

 private:
  Backend& backend_;
  AttentionSpec spec_;
  int rank_;
  const Layout& queries_;
  std::int64_t rows_;
  std::size_t workspace_bytes_;
  AttentionInputs keys_;
  PagePool pool_;
  std::vector<std::int32_t> table_;
  DeviceArray q_, k_, v_, sinks_, out_, lse_, workspace_;
};

// The job with keys in such pages, on one rank: prepares, runs, and puts the rank's rows into `result`. Collective.
void run_paged_rank(Job job, const Options& options, const JobTensors& tensors, Transport& transport,
                    const PageLayout& pages, JobResult& result);

}  // namespace ringattn::testing
