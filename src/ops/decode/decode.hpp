// SPDX-License-Identifier: Apache-2.0
// Public API of decode: a few new query tokens at the end of each of many sequences, over a dense or paged KV cache.
//
//   Decode decode(job, transport, options);   // collective: kernel, config comparison, memory
//   for (;;) {
//     // q, k_new and v_new: tokens of this step; cache, block table and lengths: all in the kernel's kind of memory
//     decode.enqueue({.q = q, .k = k, .v = v, .block_table = table, .table_pages = max_pages,
//                     .lengths_before = lengths, .update_lengths = true, .k_new = k_new, .v_new = v_new},
//                    {out, lse}, stream);
//   }
//   decode.wait();
//
// A row of O and LSE has the bits of the same row of an Attention over the whole sequence, with any batch, page size,
// page order and number of ranks.
//
// Several ranks share one cache: rank r of P holds the KV splits r, r + P, … of every sequence, in its own pages and
// with a block table of only those pages. Queries, lengths and new tokens are equal on every rank. Each rank attends to
// its splits for all query tokens, and the partials are sent to the rank that owns the sequence.
//
// With a block mask, all KV splits of a sequence and head are decoded on one rank, because a split of the mask's blocks
// may have keys from anywhere in the sequence. The ranks distribute sequences: each holds only the sequences kept(),
// with their entries of the block table and the block mask, and ignores entries of other sequences. All steps then have
// the same number of sequences. If that balances badly, ranks distribute K/V heads: the cache and block mask of a rank
// have only the heads kv_heads(), and its results for all query tokens are sent to the owner. DecodeJob::head_parts
// selects between them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "attention/tokens/decode_deal.hpp"
#include "base/memory.hpp"
#include "base/tensor.hpp"
#include "comm/transport.hpp"
#include "kernels/common/registry.hpp"
#include "kernels/decode/cache_partition.hpp"
#include "kernels/decode/decode.hpp"
#include "ops/decode/decode_memory.hpp"

namespace ringattn {

using DecodeChoice = KernelChoice<DecodeSpec>;

// Options of decode. Only the kernel may change bits of the result.
struct DecodeOptions {
  KernelRequest kernel;
  std::size_t memory_budget = 0;  // bytes a rank may use, cache and rows included; 0: no limit
  // Check lengths and block tables in device memory on the device in every step. Those in host memory are always
  // checked.
  bool check_tables = true;
  int threads = 0;  // of a host kernel; 0: this rank's share of the processors it may use
  // Timeout of a wait for a peer that should be ready and sends no heartbeats.
  double timeout_seconds = 60.0;
};

// One decode step of `rows` query tokens for each of q.tokens / rows sequences. All pointers are in the kernel's kind
// of memory, except the host copies. Strides are free. The memory is in use until the stream has passed the step.
struct DecodeInputs {
  TensorView q;  // [sequences · rows, heads, head_dim], sequence by sequence; with DecodeJob::rope not yet rotated
  int rows = 1;  // query tokens per sequence, at most DecodeLimits::rows
  // [pages, page_size, own kv_heads, head_dim]: this rank's partition of the cache, with the heads Decode::kv_heads()
  MutableCacheView k;
  MutableCacheView v;  // [pages, page_size, own kv_heads, head_dim_v]
  // [sequences, table_pages] page indices of k and v; none for a dense cache. Entry i of sequence s is the page of
  // tokens [i · page_size, (i + 1) · page_size) of those that this rank's cache holds (Decode::cache_tokens()). Entries
  // after a sequence's last token are not read. Entries before it must be valid, even if the mask hides their tokens.
  BlockTable block_table;
  std::int64_t table_pages = 0;
  // [sequences] keys of each sequence over all ranks; every rank has the same values. Exactly one of the two is given.
  // `lengths` includes the tokens of this step: token i of sequence s has position lengths[s] − rows + i.
  // `lengths_before` excludes them, as cache_seqlens of flash_attn_with_kvcache() with new keys: token i has position
  // lengths_before[s] + i.
  const std::int32_t* lengths = nullptr;
  std::int32_t* lengths_before = nullptr;
  // Adds `rows` to each of lengths_before in place, before anything else. If false, both are only read.
  bool update_lengths = false;
  // Shared prefixes (cascade): sequences that begin with the same keys in the same pages. Kernels that support it read
  // the whole key tiles of a prefix (128 keys for most head dims) once for all of its sequences. A prefix may have any
  // number of keys; each of its sequences has at least as many, and names the same pages for them. Keys in a page that
  // the prefix only partly fills are read once per sequence. Pays from two sequences and one tile on. At most
  // DecodeLimits::prefixes.
  SharedPrefixes prefixes;
  // The key blocks that the query tokens attend to, if AttentionSpec::block_mask has a shape and
  // DecodeJob::top_k_blocks is 0 (kernels/decode/decode_block_mask.hpp): one mask for each of the heads
  // Decode::kv_heads(), or one for all heads. In the kernel's kind of memory; read when the step runs, also in a graph.
  DecodeBlockMask block_mask;
  const float* sinks = nullptr;  // [heads], exactly if AttentionSpec::sinks
  // [sequences · rows, kv_heads, head_dim or head_dim_v], appended to the cache at the tokens' positions before the
  // step reads it, on the rank that holds their KV split. With DecodeJob::rope, keys are rotated on the way. No data:
  // the cache has them already, as for sequences that share their last page. A token whose position lies outside of the
  // table or the pool is not written.
  TensorView k_new;
  TensorView v_new;
  // Host copies of `lengths` (including the tokens of this step), `block_table` and `prefixes`, if the caller has them.
  // They are then checked before the step is enqueued, and several ranks send only the partials that these lengths
  // need. Not for captured steps.
  const std::int32_t* host_lengths = nullptr;  // [sequences]
  BlockTable host_table = {};
  SharedPrefixes host_prefixes = {};
  // Instead of k and v, exactly if DecodeJob::format is not plain. With DecodeJob::values_in_keys, quantized_k replaces
  // both. k_new and v_new are compressed when they are appended, with the existing tables. Tail tables have one entry
  // per sequence of the step (kernels/quant/compressed_rows.hpp).
  CompressedCache quantized_k = {};
  CompressedCache quantized_v = {};
};

struct DecodeOutputs {
  MutableTensorView out;  // [own rows, heads, head_dim_v]: query tokens of the sequences Decode::owned()
  RowView lse;            // [own rows, heads] natural logarithm, −∞ for a row without keys; no data: not wanted
};

// With a block mask the query tokens attend to only some key blocks. The caller passes the mask of each step
// (DecodeInputs::block_mask), or the step makes it (DecodeJob::top_k_blocks): for each K/V head, or for all heads
// together, the first block, the blocks of the query tokens, and the blocks of highest score against mean keys
// (kernels/decode/block_choice.hpp). Scoring, selection and attention are enqueued one after the other. Mean keys are
// kept between steps, by index of the sequence in the step, so each layer of a model needs its own object.
// update_mean_keys() computes the means of keys that were not appended by a step.
class Decode {
 public:
  // Collective. Chooses the kernel, compares job, options, build, kernel and device with the other ranks, and allocates
  // what steps need. `transport` must outlive the object. Throws Error: kUsage (the job contradicts itself),
  // kUnsupported (no kernel, or ranks differ), kMemory (the budget is too small), kPeer (deadline).
  Decode(DecodeJob job, Transport& transport, DecodeOptions options);
  // Abandons steps that were not waited for. With several ranks the transport is then unusable.
  ~Decode();
  Decode(Decode&&) noexcept;
  Decode& operator=(Decode&&) = delete;

  const DecodeJob& job() const;
  const DecodeOptions& options() const;
  const DecodeChoice& kernel() const;
  Backend& backend();
  const DecodeMemory& memory() const;  // of the rank that needs most

  // Keys per key tile of the kernel.
  int key_tile() const;
  // Keys per KV split, the unit in which a cache is partitioned over the ranks.
  std::int64_t kv_split_keys() const;
  // The KV splits of each sequence that this rank's cache holds (kernels/decode/cache_partition.hpp).
  KvPartition partition() const;
  // Number of tokens that this rank's cache holds of a sequence of `length` keys.
  std::int64_t cache_tokens(std::int64_t length) const;
  // The K/V heads of this rank's cache and block mask: all heads, unless the ranks distribute heads.
  HeadRange kv_heads() const;
  // The sequences of a step of `sequences` that this rank's cache holds: all, unless the ranks distribute sequences.
  SequenceRange kept(std::int64_t sequences) const;
  // The sequences of a step of `sequences` whose results this rank gets.
  SequenceRange owned(std::int64_t sequences) const;

  // Collective. Runs one step; returns when the stream has completed it. Throws on all ranks: kUsage if shapes don't
  // fit the job, ranks run different jobs, or a length, page or prefix is out of range (the message names the sequence,
  // the page and the limit); kPeer for a deadline or a dead peer. If tables in host memory are wrong, nothing is
  // changed.
  void run(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream = {});

  // Enqueues a step: not collective, no allocation, no wait for the device. Every rank enqueues the same steps in the
  // same order, on streams that are ordered among themselves, because steps share the object's memory. Layers of a
  // model may share one object; the first layer then updates the lengths. kUsage is thrown only on this rank, before
  // anything is enqueued. With several ranks, the buffers of steps with fewer sequences or rows than the limits are not
  // announced to peers, so hosts may wait for each other here. A host kernel has done the work on return.
  //
  // If `stream` is being captured, the step becomes part of the graph: each launch updates the lengths, appends the
  // current k_new and v_new, and decodes. The object must outlive the graph. Throws kUnsupported with several ranks,
  // and kUsage with host copies.
  void enqueue(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream = {});

  // Computes the mean keys of all blocks before the blocks of the query tokens. Call it before a step with
  // DecodeJob::top_k_blocks if the cache was filled by other means than steps, or if an index of the step has got
  // another sequence. `inputs` are those of that step, with `lengths`. Only the shape of q, the cache, its table and
  // the lengths are read. Reads all keys once. Enqueued, and throws, as enqueue().
  void update_mean_keys(const DecodeInputs& inputs, Stream stream = {});

  // Returns when the device has passed all enqueued steps. Throws their failures: kPeer for a deadline or a dead peer;
  // kUsage, once, for the first sequence that a check on the device has found wrong, also in a graph launch. The caller
  // waits for graph launches itself.
  //
  // A step treats a wrong sequence as one without keys, and accesses no memory outside of the cache. The other
  // sequences get their results. With several ranks, the sequence's rows are undefined if any rank has a wrong table.
  void wait();

 private:
  friend class MlaDecode;
  // Construction in two collective steps: KernelOnly chooses the kernel without a check of the budget, and prepare()
  // does the rest. MlaDecode checks the memory of both before anything is allocated.
  struct KernelOnly {};
  Decode(DecodeJob job, Transport& transport, DecodeOptions options, KernelOnly);
  void prepare();
  // A MlaDecode enqueues its GEMMs between check() and enqueue_checked().
  void check(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream) const;
  void enqueue_checked(const DecodeInputs& inputs, const DecodeOutputs& outputs, Stream stream);

  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace ringattn
