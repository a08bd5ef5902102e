// SPDX-License-Identifier: Apache-2.0
// Cuts a task of dQ and a task of dK and dV of the same pairs into chunks whose dS fits into a workspace. A chunk is a
// task of each: whole sequences, or of one sequence some KV heads, query splits and KV splits. Query splits are the
// outer loop and KV splits the inner one, so that the sums between chunks are those of all keys and of one range of
// queries. Chunks end where splits end. Plain host code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/attention_backward/attention_backward.hpp"
#include "kernels/attention_backward/cuda/backward_params.hpp"

namespace ringattn::cuda {

// Sizes and memory of chunks. Chunks end where splits end, so their sums never stop within a split. All 0: dS is not
// stored.
struct ChunkLimits {
  std::int64_t rows = 0;            // (query, head) rows of a chunk that does not have all of their keys
  int kv_heads = 0;                 // minimum for a chunk of a part of a sequence
  std::int64_t key_tiles = 0;       // minimum over all KV heads of the tasks; tasks with fewer are not cut
  std::int64_t ds_tiles = 0;        // tiles of dS: kBackwardTile keys, kBackwardTile positions, one query head
  std::int64_t dq_sum_floats = 0;   // [positions, heads, head_dim]
  std::int64_t dkv_sum_floats = 0;  // [keys, KV heads, head_dim + head_dim_v]
};
// The limits for chunks of any tasks within `limits`. All 0 if two separate calls are faster, because chunks would keep
// few multiprocessors busy, while separate calls share the splits of a key tile among CTAs.
ChunkLimits chunk_limits(const AttentionSpec& spec, const BackwardLimits& limits, int multiprocessors);

struct BackwardChunk {
  int first_kv_head = 0;  // first KV head of the tasks' tensors; row stats have all heads
  int kv_heads = 0;
  DqTask dq;  // without stats
  DkvTask dkv;
};

class BackwardChunker {
 public:
  BackwardChunker(const AttentionSpec& spec, int key_tile) : spec_(spec), key_tile_(key_tile) {}

  void reserve(const BackwardLimits& limits);
  // Calls `run` for each chunk, in order. False, without a call: the tasks are not cut, because they do not compute
  // gradients from zero to the end, have parts of sequences, or would have chunks with too few work tiles. Spans and
  // views of a chunk live until `run` returns.
  bool cut(const DqTask& dq, const DkvTask& dkv, const ChunkLimits& limits, float* dq_sums, float* dkv_sums,
           const std::function<void(const BackwardChunk&)>& run);

 private:
  struct Tasks;
  // The runs of one sequence in the tasks. Null: none.
  struct Part {
    const QueryRun* queries = nullptr;
    const QueryRun* keys = nullptr;
    const KeyRun* key_tiles = nullptr;
    const KeyRun* query_tiles = nullptr;
  };
  // Tiles [begin, end) of kBackwardTile rows. Those of queries are counted from first_query_tile().
  struct Interval {
    std::int64_t begin = 0, end = 0;
  };

  bool find_parts(const DqTask& dq, const DkvTask& dkv);
  std::int64_t count_pairs(const Part& part, const BackwardSequence& sequence) const;
  bool can_cut(const DqTask& dq, const ChunkLimits& limits) const;
  Interval seen_keys(const BackwardSequence& sequence, std::int64_t query_tile) const;
  std::int64_t count_pairs(const BackwardSequence& sequence, const Interval& queries, const Interval& keys) const;
  void add_whole(const Tasks& tasks, const Part& part);
  void run_whole(const Tasks& tasks);
  void cut_sequence(const Tasks& tasks, const Part& part, const BackwardSequence& sequence);
  void cut_keys(const Tasks& tasks, const Part& part, const BackwardSequence& sequence, const Interval& queries,
                bool is_last);
  void take(const Tasks& tasks, int first_kv_head, int kv_heads, std::int64_t first_query, std::int64_t first_key);
  void run(const Tasks& tasks);

  AttentionSpec spec_;
  int key_tile_;
  std::vector<Part> parts_;  // [sequences]
  // The current chunk, and what its spans point to.
  BackwardChunk chunk_;
  std::vector<QueryRun> queries_, keys_;
  std::vector<KeyRun> key_runs_, query_runs_;
  std::vector<PageRun> key_tiles_, query_tiles_;
  std::vector<BackwardKeySource> key_sources_;
  std::vector<BackwardQuerySource> query_sources_;
  MutableTensorView dq_, dk_, dv_;
};

}  // namespace ringattn::cuda
