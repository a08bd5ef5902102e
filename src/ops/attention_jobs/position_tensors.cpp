// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_jobs/position_tensors.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <span>
#include <vector>

#include "base/error.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kPositions = "k_positions";
constexpr std::string_view kLengths = "k_lengths";

constexpr std::int64_t kPieceBytes = 1 << 20;

MessageTemplate write_anew() { return {command("compress"), " writes such files."}; }

// Checks positions in pieces, so that an invalid tensor is refused without memory for all of it.
void check_in_pieces(const TensorSource& positions, std::int64_t heads, std::span<const KeptSequence> kept) {
  const std::int64_t row_bytes = heads * static_cast<std::int64_t>(sizeof(std::int32_t));
  const std::int64_t most = std::max<std::int64_t>(1, kPieceBytes / row_bytes) * row_bytes;
  const std::int64_t all = positions.info->bytes();
  PositionCheck check(positions.text(), static_cast<int>(heads), kept, ErrorCode::kFile);
  std::vector<std::int32_t> piece;
  for (std::int64_t at = 0; at < all; at += most) {
    piece.resize(static_cast<std::size_t>(std::min(most, all - at)) / sizeof(std::int32_t));
    positions.shard->read(*positions.info, at, std::as_writable_bytes(std::span(piece)));
    check.next(piece);
  }
}

}  // namespace

bool holds_positions(const SafetensorsFile& file) {
  if (file.contains(kPositions)) return true;
  if (file.contains(kLengths)) {
    require(false, file.tensor(std::string(kLengths)),
            fmt::format("it belongs to {}, which the file lacks", kPositions), write_anew());
  }
  return false;
}

void refuse_positions(const SafetensorsFile& file, std::string_view kind) {
  require(false, file.tensor(std::string(kPositions)), fmt::format("the file holds {}", kind),
          "Keys and values may have positions; leave them out, or give k and v.");
}

void read_positions(const SafetensorsFile& file, const InputNames& names, InputTensors& input) {
  const TensorSource positions = file.tensor(std::string(kPositions));
  const TensorSource lengths = file.tensor(std::string(kLengths));
  input.used.push_back(positions);
  input.used.push_back(lengths);
  std::int64_t keys = 0;
  for (std::size_t s = 0; s < input.sequences.size(); ++s) keys += input.sequences[s].k_len;
  const std::int64_t heads = positions.info->shape.size() == 2 ? positions.info->shape[1] : 0;
  require(positions.info->dtype == FileDtype::kI32 && (heads == 1 || heads == input.k_grid.heads) &&
              positions.info->shape[0] == keys,
          positions,
          fmt::format("the sequences have {} keys of {} heads: it is I32 [{}, 1 or {}]", keys, input.k_grid.heads, keys,
                      input.k_grid.heads),
          write_anew());
  const auto count = static_cast<std::int64_t>(input.sequences.size());
  require(entries(lengths) == count, lengths, fmt::format("the job has {} sequences", count), write_anew());
  const std::vector<std::int64_t> whole = read_integers(lengths);
  std::vector<KeptSequence> kept;
  for (std::size_t s = 0; s < whole.size(); ++s) {
    require(whole[s] >= input.sequences[s].k_len && whole[s] <= std::numeric_limits<std::int32_t>::max(), lengths,
            fmt::format("sequence {} had {} tokens, and k has {} of them", s, whole[s], input.sequences[s].k_len),
            write_anew());
    kept.push_back({input.sequences[s].k_len, whole[s]});
  }
  check_in_pieces(positions, heads, kept);
  std::vector<std::int32_t> rows(static_cast<std::size_t>(keys * heads));
  positions.shard->read(*positions.info, 0, std::as_writable_bytes(std::span(rows)));
  positions.shard->check_unchanged();
  input.positions =
      std::make_shared<const KeyPositions>(positions.text(), static_cast<int>(heads), kept, rows, ErrorCode::kFile);
  if (find_optional(file, names.q_offset, "q_offset")) return;
  std::vector<Sequence> aligned(input.sequences.begin(), input.sequences.end());
  for (std::size_t s = 0; s < aligned.size(); ++s) aligned[s].q_offset = whole[s] - aligned[s].q_len;
  input.sequences = std::move(aligned);
}

}  // namespace ringattn
