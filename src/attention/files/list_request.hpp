// SPDX-License-Identifier: Apache-2.0
// Lists of key tiles as a user asks for them: a pattern in words, or a block mask in a file.
//
// A pattern is parts joined by "+": what is listed is the union of them.
//   window:W            keys at most W tokens from one of the block's queries
//   global:G            the first G keys for every query, every key for the first G queries
//   strided:S           the S keys before a query, and of every S keys the last one
//   random:N[,SEED]     N blocks drawn of those that the mask lets the queries see
//   bigbird:W,G,N[,SEED]  window:W+global:G+random:N,SEED
//   topk:K              K blocks by the scores of mean queries and mean keys, the first and the diagonal one among them
//   all                 every block
// and, once each, how lists are kept:
//   block:N or block:Q,K  blocks of N tokens, or of Q queries and K keys [128]
//   heads:all|kv|each     one list for all heads, for each KV head, or for each query head [all; kv with topk]
// Numbers of tokens may end in k, m or g.
//
// A file ends in ".safetensors" and has a tensor block_mask, U8 or BOOL, [heads, query blocks, key blocks] of one
// sequence, or [sequences, heads, query blocks, key blocks] of several with equal numbers of blocks. Its metadata may
// name query_block and key_block, which are 128 otherwise. Query blocks are counted by position: the first row of the
// mask is the block that the first query lies in.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "attention/files/safetensors_file.hpp"
#include "attention/tokens/job.hpp"
#include "attention/tokens/packed_run.hpp"
#include "base/tensor.hpp"
#include "kernels/synthetic.hpp"

namespace ringattn {

// Fills rows with packed tokens of q or of k, for what follows from the data.
using ReadTensor =
    std::function<void(SyntheticTensor tensor, std::span<const PackedRun> runs, const MutableTensorView& rows)>;

struct ListRequest {
  std::string text;  // the pattern, or the file's path
  // What the data are read from, beside the job: a file, or a seed in words. Lists of the same request, job and input
  // are the same.
  std::shared_ptr<const void> file = nullptr;
  std::string seed = {};
  std::size_t memory_budget = 0;  // bytes that they may take; 0, or more than that: 512 MiB
};

struct RequestedLists {
  std::shared_ptr<const TileLists> lists;
  std::shared_ptr<const SafetensorsFile> mask;  // the file that they were read from; null: a pattern
};

// The lists of a job, which has none yet. The same on every rank that has the same input; top-k reads all of q and k.
// They are made on the host, before there is a backend, because plans say by them who sends what to whom; the choice is
// that of a decoding step on a device (kernels/block_score.hpp). The ranks of a process share them: they are made by
// the first one that asks. Throws kUsage for words that make no pattern, kFile for a file that holds no mask for the
// job, and kMemory for lists that take more than they may; what they take is counted before data are read and before
// they are made.
RequestedLists requested_lists(const ListRequest& request, const Job& job, const ReadTensor& read);

}  // namespace ringattn
