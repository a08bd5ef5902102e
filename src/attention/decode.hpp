// SPDX-License-Identifier: Apache-2.0
// The library's front door for decoding: a few new rows at the end of each of many sequences, over keys and values that
// lie in a cache, dense or in pages.
//
//   Decode decode(job, transport, options);   // collective: kernel, agreement, memory
//   for (;;) {
//     // q, k_new and v_new: this step's rows, in the kernel's kind of memory, as are cache, block table and lengths
//     decode.enqueue({.q = q, .k = k, .v = v, .block_table = table, .table_pages = most_pages, .lengths_before =
//     lengths,
//                     .update_lengths = true, .k_new = k_new, .v_new = v_new},
//                    {out, lse}, stream);
//   }
//   decode.wait();
//
// A row's O and LSE have the bits that the same row has in an Attention over the whole sequence, with any batch, page
// size, order of pages and number of ranks.
//
// Several ranks hold one cache together: rank r of P keeps the groups of keys r, r + P, … of every sequence, in pages
// of its own, and a block table that names those alone. Queries, lengths and new rows are the same on every rank. Each
// rank folds what it keeps, for all rows, and the partial results travel to the rank that owns the row.
//
// With lists of key blocks ranks don't deal groups of keys: a list's group may hold keys from anywhere in the sequence,
// and one rank folds a group. They share out the sequences: each keeps kept() alone, and their entries in the block
// table and the block_mask; of others it reads nothing. Steps then have equally many sequences. And, where that leaves
// them unevenly loaded, they deal the K/V heads: each rank's cache, and the lists that it is given, are those of the
// heads kv_heads(); it folds them for all rows, and the results travel to the rank that owns the row.
// DecodeJob::head_parts says which of both.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "attention/decode_memory.hpp"
#include "attention/tokens/decode_deal.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/cache_partition.hpp"
#include "kernels/decode.hpp"
#include "kernels/registry.hpp"

namespace ringattn {

using DecodeChoice = KernelChoice<DecodeSpec>;

// How steps are done. Nothing here changes a bit of the result.
struct DecodeOptions {
  KernelRequest kernel;
  std::size_t memory_budget = 0;  // bytes a rank may use, cache and rows included; 0: no limit
  // Whether lengths and block tables in device memory are checked by every step, on the device. Those in host memory
  // always are.
  bool check_tables = true;
  int threads = 0;  // of a host kernel; 0: this rank's share of the processors it may use
  // Of a wait for a peer that should be ready and gives no signs of life.
  double timeout_seconds = 60.0;
};

// One step: `rows` rows of each of q.tokens / rows sequences. All pointers are in the kernel's kind of memory, but for
// the host copies; strides are free. The memory is in use until the stream has passed the step.
struct DecodeInputs {
  TensorView q;  // [sequences · rows, heads, head_dim], sequence by sequence
  int rows = 1;  // of a sequence, at most DecodeLimits::rows
  MutableCacheView
      k;  // [pages, page_size, own kv_heads, head_dim]: this rank's partition, of the heads Decode::kv_heads()
  MutableCacheView v;  // [pages, page_size, own kv_heads, head_dim_v]
  // [sequences, table_pages] of pages of k and v; none for a dense cache. Entry i of sequence s is the page of tokens
  // [i · page_size, (i + 1) · page_size) of what this rank's cache holds of it (Decode::cache_tokens()). Entries behind
  // a sequence's last token may hold anything; those before it name pages, also where the mask hides them.
  BlockTable block_table;
  std::int64_t table_pages = 0;
  // [sequences] keys of each sequence, over all ranks; equal numbers in memory of each rank's own. Exactly one of both
  // is given. `lengths` counts the rows of this step: row i of sequence s stands at position lengths[s] − rows + i.
  // `lengths_before` doesn't count them, as cache_seqlens of flash_attn_with_kvcache() with new keys: row i stands at
  // lengths_before[s] + i.
  const std::int32_t* lengths = nullptr;
  std::int32_t* lengths_before = nullptr;
  // Adds `rows` to each of lengths_before in place, before anything else is done. Else both are only read.
  bool update_lengths = false;
  // Sequences that begin with the same keys, in the same pages: these keys are then read once for all of them, where
  // the kernel can, as many as whole key tiles have (of 128 keys for most head dims). A prefix may have any number of
  // keys; a sequence has at least as many, and the pages that they fill are those of all its sequences. Keys in a page
  // that the prefix doesn't fill are read by each sequence. It pays from two sequences and one tile on. At most
  // DecodeLimits::prefixes.
  SharedPrefixes prefixes;
  // Which keys the rows see, where AttentionSpec::block_mask has a shape and DecodeJob::top_k_blocks is 0
  // (kernels/decode_block_mask.hpp): the lists of the heads Decode::kv_heads(), or the one of all heads. In memory of
  // the kernel's kind: what stands there when the step begins is what it follows, also in a graph.
  DecodeBlockMask block_mask;
  const float* sinks = nullptr;  // [heads], present exactly when AttentionSpec::sinks
  // [sequences · rows, kv_heads, …] keys and values of the rows, written into the cache at the rows' positions before
  // the step reads it: each by the rank that keeps its group. No data: the cache holds them already, as it does of a
  // sequence whose pages others share. A row whose place lies outside of the table or the pool is not written.
  TensorView k_new;
  TensorView v_new;
  // What `lengths` (with this step's rows), `block_table` and `prefixes` hold, in host memory, where the caller knows
  // it. They are then checked at once, and several ranks send no more than these lengths need. Not for captured steps.
  const std::int32_t* host_lengths = nullptr;  // [sequences]
  BlockTable host_table = {};
  SharedPrefixes host_prefixes = {};
  // Instead of k, and of v, exactly where DecodeJob::format is not plain; of values in compressed keys, quantized_k is
  // instead of both. Rows of k_new and v_new are compressed as
  // they are written: with the tables that are there, and into tails, which have a place for each sequence of the step
  // (kernels/compressed_rows.hpp).
  CompressedCache quantized_k = {};
  CompressedCache quantized_v = {};
};

struct DecodeOutputs {
  MutableTensorView out;  // [own rows, heads, head_dim_v]: rows of the sequences Decode::owned() alone
  RowView lse;            // [own rows, heads] natural logarithm, −∞ for a row without keys; no data: not wanted
};

// Rows may see some blocks of keys alone. The lists are given to each step (DecodeInputs::block_mask), or a step makes
// them by itself (DecodeJob::top_k_blocks): of each KV head, or of all together, the first block, those that the rows
// stand in, and of the others those of the highest scores, by the mean keys of blocks (kernels/block_choice.hpp).
// Scores, lists and the step are enqueued one behind the other. Means are kept from step to step: pool() makes those of
// keys that no step has appended. Sequences of a step have the means of the same place in the steps before, so each
// layer of a model has an object of its own.
class Decode {
 public:
  // Prepares. Collective. Chooses the kernel, agrees with the other ranks on job, options, build, kernel and device,
  // and allocates what steps need. Throws Error: kUsage (the job contradicts itself), kUnsupported (no kernel; unlike
  // ranks), kMemory (the budget is too small), kPeer (deadline). `transport` outlives the object.
  Decode(DecodeJob job, Transport& transport, DecodeOptions options);
  // Gives up steps that were not waited for; with several ranks that ends the use of the transport.
  ~Decode();
  Decode(Decode&&) noexcept;
  Decode& operator=(Decode&&) = delete;

  const DecodeJob& job() const;
  const DecodeOptions& options() const;
  const DecodeChoice& kernel() const;
  Backend& backend();
  const DecodeMemory& memory() const;  // of the rank that needs most

  // Keys of a tile of the kernel's.
  int key_tile() const;
  // Keys of a group: what ranks deal to each other.
  std::int64_t kv_split_keys() const;
  // The groups of each sequence that this rank's cache holds. Only these have a place in it
  // (kernels/cache_partition.hpp).
  KvPartition partition() const;
  // Tokens that this rank's cache holds of a sequence of `length` keys.
  std::int64_t cache_tokens(std::int64_t length) const;
  // The K/V heads that this rank's cache holds, and has lists of: all of them, but where ranks deal heads.
  HeadRange kv_heads() const;
  // The sequences of a step of `sequences` that this rank's cache holds: all of them, but where ranks share them out.
  SequenceRange kept(std::int64_t sequences) const;
  // The sequences of a step of `sequences` whose results this rank gets.
  SequenceRange owned(std::int64_t sequences) const;

  // Collective. Does one step; the work on `stream` is complete when it returns, and so is what was enqueued before.
  // Throws, on all ranks alike, kUsage where shapes don't fit the job, or a length, a page or a prefix lies beyond its
  // limit (the sequence, the page and the limit are named); kPeer for a deadline or a dead peer. Where a host's tables
  // are wrong, nothing has been changed.
  void run(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream = {});

  // The same step without the waiting: no collective, no allocation, no wait for the device. Every rank enqueues the
  // same steps in the same order, on streams that follow each other: they share the object's memory. Layers of a model
  // may share one object; the first of them then updates the lengths. kUsage is thrown here alone, before anything is
  // enqueued. With several ranks, steps of fewer sequences or rows than the limits are not announced to peers, so hosts
  // may wait for each other here. A host kernel does the work before this returns.
  //
  // While `stream` is being captured the step becomes part of the graph: each launch updates the lengths, appends the
  // rows that lie in k_new and v_new by then, and decodes. The object outlives the graph. kUnsupported with several
  // ranks; kUsage with host copies.
  void enqueue(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream = {});

  // Makes the means of all keys in front of the rows' own blocks: where a cache was filled by others than steps, or a
  // place has got another sequence, before the next step with DecodeJob::top_k_blocks. `inputs` are that step's, with
  // `lengths` (which count the step's rows); only q's shape, the cache, its table and the lengths
  // are read. Reads all keys once. Enqueued as a step is; throws as enqueue() does.
  void pool(const DecodeInputs& inputs, Stream stream = {});

  // Returns when the device has passed every step that was enqueued; at once if there is none. Throws what they failed
  // with: kPeer for a deadline or a dead peer, and kUsage for the first sequence that a check on the device has found
  // wrong, once. Launches of graphs are the caller's to wait for; what their checks found is thrown here, too.
  //
  // A step that finds a sequence wrong takes it for one without keys, and reads and writes nothing outside of the
  // cache; all other sequences have their results. With several ranks, one of which has a wrong table, the sequence's
  // rows are of no use.
  void wait();

 private:
  friend class MlaDecode;
  // In two parts, both collective: kernel and memory, without a look at the budget, and then the rest. A MlaDecode
  // looks at the memory of both before anything is allocated.
  struct KernelOnly {};
  Decode(DecodeJob job, Transport& transport, DecodeOptions options, KernelOnly);
  void prepare();
  // Products come before a step, and are enqueued only where the step is not refused.
  void check(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream) const;
  void enqueue_checked(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
