// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/block_mask_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "base/error.hpp"
#include "base/rank_liveness.hpp"
#include "base/size.hpp"
#include "io/tensor_checks.hpp"
#include "ops/attention_jobs/block_mask_pattern.hpp"

namespace ringattn {

namespace {

constexpr const char* kMask = "block_mask";
constexpr const char* kBegins = "block_indptr";
constexpr const char* kBlocks = "block_indices";

// The bytes of a tensor, one piece of which is in memory at a time.
class TensorPieces {
 public:
  explicit TensorPieces(const TensorSource& tensor) : tensor_(tensor) {}

  // Elements from byte `byte` on: at least one, and as many as the piece has.
  std::span<const std::byte> from(std::int64_t byte) {
    constexpr std::int64_t kPieceBytes = std::int64_t{1} << 20;
    if (byte < first_ || byte >= first_ + static_cast<std::int64_t>(piece_.size())) {
      heartbeat();
      piece_.resize(static_cast<std::size_t>(std::min(kPieceBytes, tensor_.info->bytes() - byte)));
      tensor_.shard->read(*tensor_.info, byte, piece_);
      first_ = byte;
    }
    return std::span<const std::byte>(piece_).subspan(static_cast<std::size_t>(byte - first_));
  }

 private:
  TensorSource tensor_;
  std::int64_t first_ = 0;
  std::vector<std::byte> piece_;
};

// Appends the indices of the nonzero entries among `blocks` entries of a mask from `begin` on.
void add_mask_blocks(TensorPieces& mask, std::int64_t begin, std::int64_t blocks, std::vector<std::int32_t>& listed) {
  constexpr std::int64_t kWord = 8;
  constexpr std::byte kZeros[kWord] = {};
  for (std::int64_t block = 0; block < blocks;) {
    const std::span<const std::byte> some = mask.from(begin + block);
    const std::int64_t many = std::min(blocks - block, static_cast<std::int64_t>(some.size()));
    const std::byte* const entries = some.data();
    for (std::int64_t i = 0; i < many; ++i) {
      if (i + kWord <= many && std::memcmp(entries + i, kZeros, kWord) == 0) {
        i += kWord - 1;
      } else if (entries[i] != std::byte{0}) {
        listed.push_back(static_cast<std::int32_t>(block + i));
      }
    }
    block += many;
  }
}

// A tensor of one axis whose entries are integers.
class IntegerPieces {
 public:
  explicit IntegerPieces(const TensorSource& tensor)
      : tensor_(tensor), pieces_(tensor), wide_(tensor.info->dtype == FileDtype::kI64) {
    require((wide_ || tensor.info->dtype == FileDtype::kI32) && entries(tensor) >= 0, tensor,
            "it is I32 or I64, of one axis", "Write it so.");
  }

  const TensorSource& tensor() const { return tensor_; }
  std::int64_t size() const { return entries(tensor_); }
  std::int64_t at(std::int64_t index) {
    if (wide_) return load<std::int64_t>(index);
    return load<std::int32_t>(index);
  }
  [[noreturn]] void refuse(std::int64_t index, const std::string& why, const std::string& suggestion) {
    fail(ErrorCode::kFile, fmt::format("entry {} of {} is {}", index, tensor_.text(), at(index)), why, suggestion);
  }

 private:
  template <class T>
  T load(std::int64_t index) {
    T value;
    std::memcpy(&value, pieces_.from(index * static_cast<std::int64_t>(sizeof value)).data(), sizeof value);
    return value;
  }

  TensorSource tensor_;
  TensorPieces pieces_;
  bool wide_;
};

// A block mask in block compressed sparse rows (BSR).
class BsrTensors {
 public:
  BsrTensors(const TensorSource& begins, const TensorSource& blocks) : begins_(begins), blocks_(blocks) {}

  std::int64_t lists() const { return begins_.size() - 1; }
  // Makes the checks that are possible before the mask is read.
  void check_ends() {
    if (begins_.at(0) != 0) begins_.refuse(0, "the first list begins at 0", kSuggestion);
    if (begins_.at(lists()) == blocks_.size()) return;
    begins_.refuse(lists(), fmt::format("the last list ends with {}, which has {} entries", kBlocks, blocks_.size()),
                   kSuggestion);
  }
  // Appends row `number` of the mask, which is `mask_row`. The rows before it have been read.
  void add(std::int64_t number, const BlockMaskRow& mask_row, int key_block, std::vector<std::int32_t>& listed) {
    const std::int64_t begin = begins_.at(number);
    const std::int64_t end = begins_.at(number + 1);
    if (end < begin) {
      begins_.refuse(number + 1, fmt::format("entry {} is {}, and no list ends before it begins", number, begin),
                     kSuggestion);
    }
    if (end > blocks_.size()) {
      begins_.refuse(number + 1, fmt::format("{} has {} entries", kBlocks, blocks_.size()), kSuggestion);
    }
    std::int64_t last = -1;
    for (std::int64_t i = begin; i < end; ++i) {
      const std::int64_t block = blocks_.at(i);
      const auto refuse = [&](const std::string& why) {
        blocks_.refuse(i,
                       fmt::format("in the mask row of sequence {}, head {}, query block {}: {}", mask_row.sequence,
                                   mask_row.head, mask_row.block, why),
                       "List blocks of keys in ascending order, each once.");
      };
      if (block < 0 || block >= mask_row.blocks) {
        refuse(fmt::format("{} keys are {} blocks of {}", mask_row.keys, mask_row.blocks, key_block));
      }
      if (block <= last) refuse(fmt::format("it comes after {}", last));
      listed.push_back(static_cast<std::int32_t>(block));
      last = block;
    }
  }

 private:
  static constexpr const char* kSuggestion =
      "Write where each list begins in block_indices, and last how many entries that has.";

  IntegerPieces begins_, blocks_;
};

int block_size(const SafetensorsFile& file, std::string_view name) {
  const std::string* const text = file.metadata(name);
  if (text == nullptr) return kDefaultMaskBlock;
  const std::optional<std::int64_t> tokens = parse_size(*text);
  if (!tokens || *tokens < 1 || *tokens > kMaxMaskTokens) {
    fail(ErrorCode::kFile, fmt::format("{} of {} is {}", name, file.path(), in_quotes(*text)),
         "it is a number of tokens", "Blocks of 128 are usual.");
  }
  return static_cast<int>(*tokens);
}

std::int64_t query_blocks(const MaskedSequence& of, int query_block) {
  if (of.queries == 0) return 0;
  return query_block_of(of.position + of.queries - 1, query_block) + 1 - query_block_of(of.position, query_block);
}

BlockMask block_mask_from_tensor(const TensorSource& mask, BlockMaskShape lists, const Job& job,
                                 const BlockMaskBudget& budget) {
  const std::vector<std::int64_t>& shape = mask.info->shape;
  const bool bytes = mask.info->dtype == FileDtype::kU8 || mask.info->dtype == FileDtype::kBool;
  if (!bytes || (shape.size() != 3 && shape.size() != 4)) {
    fail(ErrorCode::kFile,
         fmt::format("{} is {} {}", mask.text(), file_dtype_name(mask.info->dtype), shape_text(shape)),
         "a block mask is U8 or BOOL, [heads, query blocks, key blocks]", "Write it so, a byte for each block.");
  }
  const std::size_t at = shape.size() - 3;
  lists.heads = static_cast<int>(std::min<std::int64_t>(shape[at], 1 << 16));
  const auto sequences = static_cast<std::int64_t>(job.batch.sequences.size());
  bool fits = (at == 0 ? 1 : shape[0]) == sequences && shape[at] >= 1;
  bool equal = true;
  const std::vector<MaskedSequence> listed = masked_sequences(job.batch);
  for (const MaskedSequence& of : listed) {
    const std::int64_t key_blocks = (of.keys + lists.key_block - 1) / lists.key_block;
    fits = fits && shape[at + 1] == query_blocks(of, lists.query_block) && shape[at + 2] == key_blocks;
    equal = equal && query_blocks(of, lists.query_block) == query_blocks(listed[0], lists.query_block) &&
            key_blocks == (listed[0].keys + lists.key_block - 1) / lists.key_block;
  }
  if (!fits) {
    fail(ErrorCode::kFile, fmt::format("{} is {}", mask.text(), shape_text(shape)),
         fmt::format("the job has {} in blocks of {} queries and {} keys; it is {}",
                     counted(static_cast<std::uint64_t>(sequences), "sequence"), lists.query_block, lists.key_block,
                     describe(job)),
         equal ? "Give [sequences, heads, query blocks, key blocks]; metadata query_block and key_block say how large "
                 "blocks are."
               : "Sequences with different numbers of blocks need block_indptr and block_indices.");
  }
  TensorPieces pieces(mask);
  const std::int64_t rows = shape[at + 1];
  BlockMask made = make_block_mask(
      lists, listed,
      [&](const BlockMaskRow& mask_row, std::vector<std::int32_t>& blocks) {
        const std::int64_t first = query_block_of(listed[mask_row.sequence].position, lists.query_block);
        const auto list = static_cast<std::int64_t>(mask_row.sequence) * lists.heads + mask_row.head;
        add_mask_blocks(pieces, (list * rows + mask_row.block - first) * mask_row.blocks, mask_row.blocks, blocks);
      },
      budget);
  mask.shard->check_unchanged();
  return made;
}

BlockMask block_mask_from_rows(const TensorSource& begins, const TensorSource& blocks, BlockMaskShape shape,
                               const Job& job, const BlockMaskBudget& budget) {
  BsrTensors rows(begins, blocks);
  const std::vector<MaskedSequence> listed = masked_sequences(job.batch);
  std::vector<std::int64_t> before;  // total number of query blocks in earlier sequences
  std::int64_t all = 0;
  for (const MaskedSequence& of : listed) {
    before.push_back(all);
    all += query_blocks(of, shape.query_block);
  }
  shape.heads = 0;
  for (const int heads : {job.spec.heads, job.spec.kv_heads, 1}) {
    if (rows.lists() == heads * all) shape.heads = heads;
  }
  require(
      shape.heads > 0, begins,
      fmt::format(
          "{} of {} queries have {} mask rows for all heads, {} for the K/V heads or {} for the query heads; the "
          "job is {}",
          counted(static_cast<std::uint64_t>(all), "block"), shape.query_block, all, all * job.spec.kv_heads,
          all * job.spec.heads, describe(job)),
      "It has one entry more than there are mask rows; metadata query_block and key_block give the sizes of blocks.");
  rows.check_ends();
  BlockMask made = make_block_mask(
      shape, listed,
      [&](const BlockMaskRow& mask_row, std::vector<std::int32_t>& own) {
        const MaskedSequence& of = listed[mask_row.sequence];
        const std::int64_t first = query_block_of(of.position, shape.query_block);
        const std::int64_t number = before[mask_row.sequence] * shape.heads +
                                    mask_row.head * query_blocks(of, shape.query_block) + mask_row.block - first;
        rows.add(number, mask_row, shape.key_block, own);
      },
      budget);
  for (const TensorSource& tensor : {begins, blocks}) tensor.shard->check_unchanged();
  return made;
}

}  // namespace

std::vector<TensorSource> block_mask_tensors(const SafetensorsFile& file) {
  const bool mask = file.contains(kMask);
  const bool begins = file.contains(kBegins);
  const bool blocks = file.contains(kBlocks);
  if (!mask && !begins && !blocks) {
    fail(ErrorCode::kFile, fmt::format("{} holds no block mask", file.path()),
         fmt::format("it has neither {} nor {} and {}", kMask, kBegins, kBlocks), "Write one or the other.");
  }
  if (mask && (begins || blocks)) {
    require(false, file.tensor(kMask), fmt::format("the file has {}, too", begins ? kBegins : kBlocks),
            "Leave out one of the two forms of the mask.");
  }
  if (mask) return {file.tensor(kMask)};
  if (begins != blocks) {
    require(false, file.tensor(begins ? kBegins : kBlocks),
            fmt::format("it belongs to {}, which the file lacks", begins ? kBlocks : kBegins), "Write both.");
  }
  return {file.tensor(kBegins), file.tensor(kBlocks)};
}

BlockMask block_mask_from_file(const SafetensorsFile& file, const Job& job, const BlockMaskBudget& budget) {
  const std::vector<TensorSource> tensors = block_mask_tensors(file);
  const BlockMaskShape shape{block_size(file, "query_block"), block_size(file, "key_block"), 0};
  if (tensors.size() == 1) return block_mask_from_tensor(tensors[0], shape, job, budget);
  return block_mask_from_rows(tensors[0], tensors[1], shape, job, budget);
}

}  // namespace ringattn
