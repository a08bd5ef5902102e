// SPDX-License-Identifier: Apache-2.0
#include "attention/files/list_request.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/memory.hpp"
#include "base/pulse.hpp"
#include "base/pulsing_lock.hpp"
#include "base/size.hpp"
#include "kernels/list_makers.hpp"
#include "kernels/top_k_lists.hpp"

namespace ringattn {

namespace {

constexpr int kUsualBlock = 128;
constexpr std::int64_t kMostTokens = std::int64_t{1} << 30;
constexpr std::int64_t kPieceTokens = 1024;

[[noreturn]] void refuse(std::string_view part, const std::string& why) {
  fail(ErrorCode::kUsage, fmt::format("no lists of key blocks follow from \"{}\"", part), why,
       "Patterns are such as window:4k+global:128, strided:512, bigbird:256,128,3 and topk:16.");
}

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  for (;;) {
    const std::size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    if (end == std::string_view::npos) return parts;
    text.remove_prefix(end + 1);
  }
}

// One part: its word and its numbers.
struct Part {
  std::string_view text;
  std::string_view word;
  std::vector<std::string_view> values;

  explicit Part(std::string_view whole) : text(whole), word(whole.substr(0, whole.find(':'))) {
    if (word.size() < whole.size()) values = split(whole.substr(word.size() + 1), ',');
  }
  void expect(std::size_t least, std::size_t most) const {
    if (values.size() >= least && values.size() <= most) return;
    refuse(text, least == most ? fmt::format("{} takes {}", word, counted(least, "value"))
                               : fmt::format("{} takes {} to {} values", word, least, most));
  }
  std::int64_t number(std::size_t index, std::int64_t least = 0) const {
    const std::optional<std::int64_t> value = parse_size(values[index]);
    if (!value || *value < least || *value > kMostTokens) {
      refuse(text, fmt::format("\"{}\" is not a number from {} to {}", values[index], least, kMostTokens));
    }
    return *value;
  }
  std::uint64_t seed(std::size_t index) const {
    std::uint64_t value = 0;
    if (index >= values.size()) return 0;
    const std::string_view digits = values[index];
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    if (error != std::errc() || end != digits.data() + digits.size()) {
      refuse(text, fmt::format("\"{}\" is no seed", digits));
    }
    return value;
  }
};

// What a pattern says, before anything is made of it.
struct Pattern {
  ListShape shape{kUsualBlock, kUsualBlock, 0};
  std::vector<Part> parts;
  std::optional<int> top_k;
};

Pattern parse(std::string_view text, const FoldSpec& spec) {
  Pattern pattern;
  bool block = false;
  for (const std::string_view whole : split(text, '+')) {
    const Part part(whole);
    if (part.word == "block") {
      part.expect(1, 2);
      if (std::exchange(block, true)) refuse(whole, "blocks are named twice");
      pattern.shape.query_block = static_cast<int>(part.number(0, 1));
      pattern.shape.key_block = static_cast<int>(part.number(part.values.size() - 1, 1));
    } else if (part.word == "heads") {
      part.expect(1, 1);
      if (pattern.shape.heads != 0) refuse(whole, "heads are named twice");
      const std::string_view which = part.values[0];
      pattern.shape.heads = which == "all" ? 1 : which == "kv" ? spec.kv_heads : which == "each" ? spec.heads : 0;
      if (pattern.shape.heads == 0) refuse(whole, "heads are all, kv or each");
    } else if (part.word == "topk") {
      part.expect(1, 1);
      if (pattern.top_k) refuse(whole, "topk stands there twice");
      pattern.top_k = static_cast<int>(part.number(0, 1));
    } else {
      pattern.parts.push_back(part);
    }
  }
  if (pattern.shape.heads == 0) pattern.shape.heads = pattern.top_k ? spec.kv_heads : 1;
  return pattern;
}

ListMaker maker_of(const Part& part, const ListShape& shape, const Mask& mask) {
  const auto random = [&](std::size_t index) {
    return random_blocks(shape, mask, static_cast<int>(part.number(index)), part.seed(index + 1));
  };
  if (part.word == "all") {
    part.expect(0, 0);
    return all_blocks();
  }
  if (part.word == "window") {
    part.expect(1, 1);
    return window_blocks(shape, part.number(0));
  }
  if (part.word == "global") {
    part.expect(1, 1);
    return global_blocks(shape, part.number(0));
  }
  if (part.word == "strided") {
    part.expect(1, 1);
    return strided_blocks(shape, part.number(0, 1));
  }
  if (part.word == "random") {
    part.expect(1, 2);
    return random(0);
  }
  if (part.word == "bigbird") {
    part.expect(3, 4);
    return union_of({window_blocks(shape, part.number(0)), global_blocks(shape, part.number(1)), random(2)});
  }
  constexpr std::string_view kWords[] = {"all",    "block",   "bigbird", "global", "heads",
                                         "random", "strided", "topk",    "window"};
  const std::string nearest = nearest_name(part.word, kWords, std::size(kWords));
  refuse(part.text, nearest.empty() ? "there is no such pattern" : fmt::format("did you mean {}?", nearest));
}

PooledRows pool(const Job& job, SyntheticTensor tensor, std::int64_t origin, std::int64_t position, std::int64_t rows,
                int heads, int block, const ReadTensor& read) {
  RowPool pooled(position, rows, heads, job.spec.head_dim, block);
  const std::int64_t piece = std::min(kPieceTokens, rows);
  const Buffer bytes =
      allocate_host(static_cast<std::size_t>(piece * heads * job.spec.head_dim) * size_of(job.spec.dtype));
  for (std::int64_t row = 0; row < rows; row += piece) {
    beat();
    const PackedRun run{origin + row, std::min(origin + row + piece, origin + rows)};
    const MutableTensorView view =
        dense_view(static_cast<void*>(bytes.data()), job.spec.dtype, run.tokens(), heads, job.spec.head_dim);
    read(tensor, {&run, 1}, view);
    pooled.add(view);
  }
  return pooled.finish();
}

TileLists top_k(const Job& job, const ListShape& shape, int count, const ReadTensor& read, const ListRoom& room) {
  check_top_k(job.spec, shape, listed_sequences(job.batch), count, room);
  const std::vector<std::int64_t> cu_q = job.batch.cu_q();
  const std::vector<std::int64_t> cu_k = job.batch.cu_k();
  std::vector<PooledSequence> pooled;
  for (std::size_t s = 0; s < job.batch.sequences.size(); ++s) {
    const Sequence& of = job.batch.sequences[s];
    pooled.push_back(
        {pool(job, SyntheticTensor::kQ, cu_q[s], of.q_offset, of.q_len, job.spec.heads, shape.query_block, read),
         pool(job, SyntheticTensor::kK, cu_k[s], 0, of.k_len, job.spec.kv_heads, shape.key_block, read)});
  }
  return top_k_lists(job.spec, shape, listed_sequences(job.batch), pooled, count);
}

TileLists lists_of_pattern(std::string_view text, const Job& job, const ReadTensor& read, const ListRoom& room) {
  const Pattern pattern = parse(text, job.spec);
  std::vector<ListMaker> makers;
  for (const Part& part : pattern.parts) makers.push_back(maker_of(part, pattern.shape, job.spec.mask));
  if (makers.empty() && !pattern.top_k) refuse(text, "it lists nothing");
  if (!pattern.top_k) return make_lists(pattern.shape, listed_sequences(job.batch), union_of(std::move(makers)), room);
  const TileLists best = top_k(job, pattern.shape, *pattern.top_k, read, room);
  if (makers.empty()) return best;
  makers.push_back([&best](const ListPlace& place, std::vector<std::int32_t>& blocks) {
    const auto list = best.list(place.sequence, place.head, place.block);
    blocks.insert(blocks.end(), list.begin(), list.end());
  });
  return make_lists(pattern.shape, listed_sequences(job.batch), union_of(std::move(makers)), room);
}

// A mask in a file, of which a piece is in memory at a time.
class MaskRows {
 public:
  explicit MaskRows(const TensorSource& mask) : mask_(mask) {}

  // Appends the numbers of the `blocks` entries from `begin` on that aren't 0.
  void add(std::int64_t begin, std::int64_t blocks, std::vector<std::int32_t>& listed) {
    for (std::int64_t block = 0; block < blocks;) {
      const std::span<const std::uint8_t> some = from(begin + block);
      const std::int64_t many = std::min(blocks - block, static_cast<std::int64_t>(some.size()));
      const std::uint8_t* const entries = some.data();
      for (std::int64_t i = 0; i < many; ++i) {
        if (i + kWord <= many && std::memcmp(entries + i, kZeros, kWord) == 0) {
          i += kWord - 1;
        } else if (entries[i] != 0) {
          listed.push_back(static_cast<std::int32_t>(block + i));
        }
      }
      block += many;
    }
  }

 private:
  // Of the tensor, from that byte on.
  std::span<const std::uint8_t> from(std::int64_t byte) {
    constexpr std::int64_t kPieceBytes = std::int64_t{1} << 20;
    if (byte < first_ || byte >= first_ + static_cast<std::int64_t>(piece_.size())) {
      beat();
      piece_.resize(static_cast<std::size_t>(std::min(kPieceBytes, mask_.info->bytes() - byte)));
      mask_.shard->read(*mask_.info, byte, std::as_writable_bytes(std::span(piece_)));
      first_ = byte;
    }
    return std::span<const std::uint8_t>(piece_).subspan(static_cast<std::size_t>(byte - first_));
  }

  static constexpr std::int64_t kWord = 8;
  static constexpr std::uint8_t kZeros[kWord] = {};

  TensorSource mask_;
  std::int64_t first_ = 0;
  std::vector<std::uint8_t> piece_;
};

TileLists lists_of_file(const SafetensorsFile& file, const Job& job, const ListRoom& room) {
  const auto block = [&](std::string_view name) {
    const std::string* text = file.metadata(name);
    if (text == nullptr) return kUsualBlock;
    const std::optional<std::int64_t> tokens = parse_size(*text);
    if (!tokens || *tokens < 1 || *tokens > kMostTokens) {
      fail(ErrorCode::kFile, fmt::format("{} of {} is \"{}\"", name, file.path(), *text), "it is a number of tokens",
           "Blocks of 128 are usual.");
    }
    return static_cast<int>(*tokens);
  };
  const TensorSource mask = file.tensor("block_mask");
  const std::vector<std::int64_t>& shape = mask.info->shape;
  const bool bytes = mask.info->dtype == FileDtype::kU8 || mask.info->dtype == FileDtype::kBool;
  if (!bytes || (shape.size() != 3 && shape.size() != 4)) {
    fail(ErrorCode::kFile,
         fmt::format("{} is {} {}", mask.text(), file_dtype_name(mask.info->dtype), shape_text(shape)),
         "a block mask is U8 or BOOL, [heads, query blocks, key blocks]", "Write it so, a byte for each block.");
  }
  const std::size_t at = shape.size() - 3;
  const ListShape lists{block("query_block"), block("key_block"),
                        static_cast<int>(std::min<std::int64_t>(shape[at], 1 << 16))};
  const auto sequences = static_cast<std::int64_t>(job.batch.sequences.size());
  bool fits = (at == 0 ? 1 : shape[0]) == sequences && shape[at] >= 1;
  for (const ListedSequence& of : listed_sequences(job.batch)) {
    if (!fits) break;
    const std::int64_t query_blocks = of.queries == 0
                                          ? 0
                                          : query_block_of(of.position + of.queries - 1, lists.query_block) + 1 -
                                                query_block_of(of.position, lists.query_block);
    fits = shape[at + 1] == query_blocks && shape[at + 2] == (of.keys + lists.key_block - 1) / lists.key_block;
  }
  if (!fits) {
    fail(ErrorCode::kFile, fmt::format("{} is {}", mask.text(), shape_text(shape)),
         fmt::format("the job has {} in blocks of {} queries and {} keys; it is {}",
                     counted(static_cast<std::uint64_t>(sequences), "sequence"), lists.query_block, lists.key_block,
                     describe(job)),
         "Give [sequences, heads, query blocks, key blocks]; metadata query_block and key_block say how large blocks "
         "are.");
  }
  MaskRows rows(mask);
  const std::int64_t query_blocks = shape[at + 1];
  const auto row = [&](const ListPlace& place, std::vector<std::int32_t>& blocks) {
    const std::int64_t first = query_block_of(job.batch.sequences[place.sequence].q_offset, lists.query_block);
    const auto list = static_cast<std::int64_t>(place.sequence) * lists.heads + place.head;
    rows.add((list * query_blocks + place.block - first) * place.blocks, place.blocks, blocks);
  };
  TileLists made = make_lists(lists, listed_sequences(job.batch), row, room);
  mask.shard->check_unchanged();
  return made;
}

constexpr std::string_view kSuffix = ".safetensors";

RequestedLists make_requested(const ListRequest& request, const Job& job, const ReadTensor& read) {
  constexpr std::int64_t kMostBytes = std::int64_t{1} << 29;
  ListRoom room{kMostBytes, "they lie in the host's memory, and may take no more"};
  if (request.memory_budget > 0 && request.memory_budget < static_cast<std::size_t>(kMostBytes)) {
    room = {static_cast<std::int64_t>(request.memory_budget), "a rank's memory budget is no larger"};
  }
  if (!request.text.ends_with(kSuffix)) {
    return {std::make_shared<const TileLists>(lists_of_pattern(request.text, job, read, room)), nullptr};
  }
  auto mask = std::make_shared<const SafetensorsFile>(request.text);
  auto lists = std::make_shared<const TileLists>(lists_of_file(*mask, job, room));
  return {std::move(lists), std::move(mask)};
}

// What was asked for, and the answer.
struct SharedLists {
  ListRequest request;
  Job job;
  RequestedLists made;

  bool answers(const ListRequest& other, const Job& of) const {
    return request.text == other.text && request.file == other.file && request.seed == other.seed &&
           request.memory_budget == other.memory_budget && job.spec == of.spec && job.format == of.format &&
           job.batch == of.batch && (made.mask == nullptr || made.mask->is_current());
  }
};

}  // namespace

RequestedLists requested_lists(const ListRequest& request, const Job& job, const ReadTensor& read) {
  static std::mutex mutex;
  static std::weak_ptr<const SharedLists> last;
  const auto lock = lock_with_pulse(mutex);
  std::shared_ptr<const SharedLists> shared = last.lock();
  if (!shared || !shared->answers(request, job)) {
    shared = std::make_shared<const SharedLists>(SharedLists{request, job, make_requested(request, job, read)});
    last = shared;
  }
  return {{shared, shared->made.lists.get()}, shared->made.mask};
}

}  // namespace ringattn
