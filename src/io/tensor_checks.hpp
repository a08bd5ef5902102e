// SPDX-License-Identifier: Apache-2.0
// Checks of the tensors of an input that all ops share.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/message_template.hpp"
#include "io/safetensors_file.hpp"
#include "io/safetensors_rows.hpp"

namespace ringattn {

// "`q` of in.safetensors has BF16 [10, 8, 16]"
std::string described(const TensorSource& tensor);

// Refuses `tensor` (kFile) unless `agrees`; `why` says what it should be.
void require(bool agrees, const TensorSource& tensor, const MessageTemplate& why, const MessageTemplate& suggestion);

// The tensor called `name`, which must exist, or without a name the tensor with the role's own name, if it exists.
std::optional<TensorSource> find_optional(const SafetensorsFile& file, const std::optional<std::string>& name,
                                          std::string_view role);

// Number of entries of a one-dimensional tensor; −1 for another shape, which the tensor's reader refuses later.
std::int64_t entries(const TensorSource& tensor);

// Called before a list is read, because an invalid one may have any length. Throws kFile for more than kMaxSequences.
void check_count(const TensorSource& tensor, std::int64_t sequences);

// The cumulative lengths of packed sequences of `side` ("q" or "k"), whose tokens lie in `grid`. Throws kFile.
std::vector<std::int64_t> read_cumulative(const TensorSource& tensor, const RowGrid& grid, std::string_view side);

// A logit for each of `heads` query heads. Throws kFile.
std::vector<float> read_sinks(const TensorSource& tensor, std::int64_t heads);

}  // namespace ringattn
