// SPDX-License-Identifier: Apache-2.0
#include "ops/common/input_tensors.hpp"

#include <fmt/format.h>

#include <string_view>

#include "base/error.hpp"
#include "base/size.hpp"
#include "io/input_names.hpp"
#include "io/tensor_checks.hpp"

namespace ringattn {

namespace {

constexpr std::int64_t kFarthestOffset = std::int64_t{1} << 60;
constexpr std::string_view kOffsets =
    "It holds one position for each sequence: that of its first query among its keys.";

MessageTemplate one_pair() {
  return {"k and v are of the same tokens and K/V heads; ", setting("order"), " says which axis is which."};
}

std::string job_has(std::size_t sequences) { return fmt::format("the job has {}", counted(sequences, "sequence")); }

void check_shapes(const InputTensors& input) {
  const RowGrid& q = input.q_grid;
  const RowGrid& k = input.k_grid;
  const RowGrid& v = input.v_grid;
  const std::pair<const TensorSource*, const RowGrid*> all[] = {{&input.q, &q}, {&input.k, &k}, {&input.v, &v}};
  for (const auto& [tensor, grid] : all) {
    require(grid->heads > 0 && grid->dim > 0, *tensor, "it needs at least one head and one dim",
            {"Check how it was written; ", setting("order"), " says which axis is which."});
    require(row_dtype(*tensor) == input.dtype, *tensor, fmt::format("q is {}", file_dtype_name(input.q.info->dtype)),
            "q, k and v have one dtype.");
    require(grid->order == q.order, *tensor, fmt::format("q has {} axes", input.q.info->shape.size()),
            "q, k and v have one order of axes.");
    require(grid->batch == q.batch, *tensor, fmt::format("q has a batch of {}", q.batch),
            "q, k and v hold the same sequences.");
  }
  require(k.dim == q.dim, input.k, fmt::format("q's head_dim is {}", q.dim),
          {setting("order"), " says which axis is which; this is ", axis_order_name(q.order), "."});
  require(v.heads == k.heads, input.v, fmt::format("k has {} heads", k.heads), one_pair());
  require(v.length == k.length, input.v, fmt::format("k has {} tokens", k.length), one_pair());
  if (q.heads % k.heads != 0) {
    fail(ErrorCode::kFile, fmt::format("K has {} heads, Q has {}", k.heads, q.heads),
         fmt::format("{} is not a multiple of {}", q.heads, k.heads),
         fmt::format("Check the file's k shape {}. It is {}, read as {}.", shape_text(input.k.info->shape),
                     input.k.text(), axis_order_name(q.order)));
  }
}

}  // namespace

SequenceList read_sequences(const SafetensorsFile& file, const InputNames& names, InputTensors& input) {
  const auto cu_q = find_optional(file, names.cu_seqlens_q, "cu_seqlens_q");
  const auto cu_k = find_optional(file, names.cu_seqlens_k, "cu_seqlens_k");
  const auto offset = find_optional(file, names.q_offset, "q_offset");
  for (const auto& list : {cu_q, cu_k, offset}) {
    if (list) input.used.push_back(*list);
  }
  const std::int64_t sequences = cu_q ? entries(*cu_q) - 1 : input.q_grid.batch;
  check_count(cu_q ? *cu_q : input.q, sequences);
  std::vector<std::int64_t> offsets;
  if (offset) {
    require(offset->info->dtype == FileDtype::kI64, *offset, "it must be I64", "Write the positions as I64.");
    require(entries(*offset) < 0 || sequences < 0 || entries(*offset) == sequences, *offset,
            job_has(static_cast<std::size_t>(sequences)), kOffsets);
    offsets = read_integers(*offset);
    for (const std::int64_t value : offsets) {
      require(value >= -kFarthestOffset && value <= kFarthestOffset, *offset,
              fmt::format("it holds {}, beyond 2^60 tokens", value), kOffsets);
    }
  }
  // If keys are packed as the queries are, they need no list of their own.
  const bool shared = cu_q && !cu_k && input.q_grid.tokens() == input.k_grid.tokens();
  if (cu_q.has_value() != cu_k.has_value() && !shared) {
    fail(ErrorCode::kFile, fmt::format("{} is given without the other", (cu_q ? cu_q : cu_k)->text()),
         "lengths of sequences are given for queries and keys", "Add the other of cu_seqlens_q and cu_seqlens_k.");
  }
  if (!cu_q) {
    const SequenceList aligned = uniform_batch(input.q_grid.batch, input.q_grid.length, input.k_grid.length).sequences;
    if (!offset) return aligned;
    std::vector<Sequence> placed(aligned.begin(), aligned.end());
    for (std::size_t i = 0; i < placed.size(); ++i) placed[i].q_offset = offsets[i];
    return placed;
  }
  require(!input.q_grid.has_batch(), *cu_q,
          fmt::format("order {} has an axis for the batch already", axis_order_name(input.q_grid.order)),
          "Leave the cu_seqlens out, or pack all sequences into one axis of tokens.");
  const auto cumulative_q = read_cumulative(*cu_q, input.q_grid, "q");
  const auto cumulative_k = shared ? cumulative_q : read_cumulative(*cu_k, input.k_grid, "k");
  try {
    return packed_batch(cumulative_q, cumulative_k, offsets).sequences;
  } catch (const Error& error) {
    throw Error(error.code(), {file.path(), ": ", error.problem()}, error.why(), error.suggestion());
  }
}

void read_sinks(const SafetensorsFile& file, const InputNames& names, InputTensors& input) {
  const auto sinks = find_optional(file, names.sinks, "sinks");
  if (!sinks) return;
  input.used.push_back(*sinks);
  input.sinks = read_sinks(*sinks, input.q_grid.heads);
}

RowGrid InputTensors::out_grid() const {
  RowGrid grid = q_grid;
  grid.dim = v_grid.dim;
  return grid;
}

InputTensors find_input(const SafetensorsFile& file, const InputNames& given, std::optional<AxisOrder> order) {
  const InputNames names = resolve_names(file, given, JobKind::kAttention);
  InputTensors input;
  input.q = file.tensor(names.q.value_or("q"));
  input.k = file.tensor(names.k.value_or("k"));
  input.v = file.tensor(names.v.value_or("v"));
  input.q_grid = row_grid(input.q, order);
  input.k_grid = row_grid(input.k, order);
  input.v_grid = row_grid(input.v, order);
  input.dtype = row_dtype(input.q);
  check_shapes(input);
  input.used = {input.q, input.k, input.v};
  input.sequences = read_sequences(file, names, input);
  read_sinks(file, names, input);
  return input;
}

}  // namespace ringattn
