// SPDX-License-Identifier: Apache-2.0
#include "io/tensor_checks.hpp"

#include <fmt/format.h>

#include "base/error.hpp"
#include "base/packed_tokens.hpp"

namespace ringattn {

namespace {

constexpr std::string_view kCumulative = "Write 0, and then the end of every sequence in packed tokens.";

}  // namespace

std::string described(const TensorSource& tensor) {
  return fmt::format("{} has {} {}", tensor.text(), file_dtype_name(tensor.info->dtype),
                     shape_text(tensor.info->shape));
}

void require(bool agrees, const TensorSource& tensor, const MessageTemplate& why, const MessageTemplate& suggestion) {
  if (!agrees) fail(ErrorCode::kFile, described(tensor), why, suggestion);
}

std::optional<TensorSource> find_optional(const SafetensorsFile& file, const std::optional<std::string>& name,
                                          std::string_view role) {
  if (name) return file.tensor(*name);
  if (!file.contains(role)) return std::nullopt;
  return file.tensor(role);
}

std::int64_t entries(const TensorSource& tensor) { return tensor.info->shape.size() == 1 ? tensor.info->shape[0] : -1; }

void check_count(const TensorSource& tensor, std::int64_t sequences) {
  require(sequences <= kMaxSequences, tensor,
          fmt::format("it names {} sequences, of at most {}", sequences, kMaxSequences),
          "Compute them in several jobs.");
}

std::vector<std::int64_t> read_cumulative(const TensorSource& tensor, const RowGrid& grid, std::string_view side) {
  check_count(tensor, entries(tensor) - 1);
  std::vector<std::int64_t> cumulative = read_integers(tensor);
  require(cumulative.size() >= 2, tensor, "it holds 0 and one entry for each sequence", kCumulative);
  require(cumulative.back() == grid.tokens(), tensor,
          fmt::format("its last entry is {} and {} has {} tokens", cumulative.back(), side, grid.tokens()),
          kCumulative);
  return cumulative;
}

std::vector<float> read_sinks(const TensorSource& tensor, std::int64_t heads) {
  require(entries(tensor) < 0 || entries(tensor) == heads, tensor, fmt::format("q has {} heads", heads),
          "It holds one value for each head of q.");
  return read_floats(tensor);
}

}  // namespace ringattn
