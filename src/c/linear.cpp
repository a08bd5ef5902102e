// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/linear.hpp"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "c/compressed.hpp"
#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_linear : ringattn::c::Object<ringattn::Linear> {
  static constexpr const char* kName = "linear";
  std::tuple<ringattn::TensorView, ringattn::MutableTensorView, ringattn::Stream> read(
      const ringattn_linear_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of the structs in their first interface version.
constexpr std::size_t kFirstSpec = 72, kFirstFacts = 64, kFirstWeights = 80, kFirstTensors = 32;

constexpr DLDataType kInt8{kDLInt, 8, 1}, kUint8{kDLUInt, 8, 1};

// The member `named` of a struct as an enumerator from 0 to `last`.
template <class Enum>
Enum read_enumerator(const char* named, std::int64_t value, Enum last, const char* known) {
  if (value >= 0 && value <= static_cast<std::int64_t>(last)) return static_cast<Enum>(value);
  fail(ErrorCode::kUsage, fmt::format("{} {} is not known", named, value), known, "Choose one of these.");
}

}  // namespace

LinearJob ringattn::c::read_linear_job(const ringattn_linear_spec* given) {
  const auto read = read_struct("ringattn_linear_spec", given, kFirstSpec);
  LinearJob job;
  LinearSpec& spec = job.spec;
  spec.dtype = read_dtype(read.dtype);
  spec.weights = read_enumerator("weights", read.weights, WeightFormat::kInt4,
                                 "RINGATTN_WEIGHTS_FLOAT is 0, RINGATTN_WEIGHTS_INT8 1, RINGATTN_WEIGHTS_INT4 2");
  spec.in_features = read.in_features;
  spec.out_features = read.out_features;
  const std::string activation = read.activation == nullptr ? "none" : read.activation;
  if (!parse_activation(activation, spec.activation, spec.gated)) {
    fail(ErrorCode::kUsage, fmt::format("activation {} is not known", activation),
         "there are none, gelu, gelu_tanh, silu, swiglu, geglu and geglu_tanh", "Choose one of these.");
  }
  spec.bias = read.bias != 0;
  spec.parallel = read_enumerator("parallel", read.parallel, LinearParallel::kRow,
                                  "RINGATTN_PARALLEL_NONE is 0, RINGATTN_PARALLEL_COLUMN 1, RINGATTN_PARALLEL_ROW 2");
  job.max_tokens = read.max_tokens;
  job.output = read_enumerator("output", read.output, LinearOutput::kReplicated,
                               "RINGATTN_OUTPUT_SHARD is 0, RINGATTN_OUTPUT_TOKENS 1, RINGATTN_OUTPUT_REPLICATED 2");
  job.column_unit = read.column_unit;
  return job;
}

namespace {

// The tensors of one matrix, or of the gate and up matrices stacked, and their names for messages.
struct MatrixTensors {
  const DLTensor *weight, *scales, *zeros, *bias;
  const char *weight_name, *scales_name, *zeros_name, *bias_name;
};

LinearMatrix read_matrix(const TensorReader& reader, const LinearSpec& spec, const MatrixTensors& given,
                         std::int64_t rows, std::int64_t features) {
  const auto refuse_given = [&](const DLTensor* tensor, const char* name, const char* why) {
    if (tensor != nullptr) fail(ErrorCode::kUsage, fmt::format("{} is given", name), why, "Leave it NULL.");
  };
  need(given.weight, given.weight_name);
  const auto dtype = part_types(StoredType::kDtype, spec.dtype);
  const std::int64_t groups = features / kInt4Group;
  LinearMatrix matrix;
  Part weight;
  switch (spec.weights) {
    case WeightFormat::kFloat:
      weight = reader.part(given.weight_name, given.weight, dtype, std::array{rows, features}, false);
      refuse_given(given.scales, given.scales_name, "floating-point weights have no scales");
      break;
    case WeightFormat::kInt8:
      weight = reader.part(given.weight_name, given.weight, std::array{kInt8}, std::array{rows, features}, false);
      need(given.scales, given.scales_name);
      matrix.scales = reader.numbers(given.scales_name, given.scales, std::array{rows});
      break;
    case WeightFormat::kInt4:
      weight = reader.part(given.weight_name, given.weight, std::array{kUint8}, std::array{rows, features / 2}, false);
      need(given.scales, given.scales_name);
      matrix.scales = reader.numbers(given.scales_name, given.scales, std::array{rows, groups});
      if (given.zeros != nullptr) {
        const Part zeros =
            reader.part(given.zeros_name, given.zeros, std::array{kUint8}, std::array{rows, groups}, true);
        matrix.zeros = reinterpret_cast<const std::uint8_t*>(zeros.data);
      }
      matrix.group_stride = groups;
      break;
  }
  if (spec.weights != WeightFormat::kInt4) refuse_given(given.zeros, given.zeros_name, "only INT4 weights have zeros");
  matrix.data = weight.data;
  // A matrix of one row may state any stride.
  matrix.row_stride = rows > 1 ? weight.strides[0] : weight.lengths[1] * given.weight->dtype.bits / 8;
  if (!spec.bias) {
    refuse_given(given.bias, given.bias_name, "the spec has no bias");
    return matrix;
  }
  need(given.bias, given.bias_name);
  matrix.bias = reader.part(given.bias_name, given.bias, dtype, std::array{rows}, true).data;
  return matrix;
}

// The second half of the rows of a stacked matrix.
LinearMatrix lower_half(const LinearSpec& spec, const LinearMatrix& stacked, std::int64_t rows) {
  const auto after = [](const void* from, std::int64_t bytes) -> const void* {
    return from == nullptr ? nullptr : static_cast<const std::byte*>(from) + bytes;
  };
  LinearMatrix half = stacked;
  half.data = after(stacked.data, rows * stacked.row_stride);
  half.bias = after(stacked.bias, rows * static_cast<std::int64_t>(size_of(spec.dtype)));
  const std::int64_t scales = spec.weights == WeightFormat::kInt8 ? rows : rows * stacked.group_stride;
  if (half.scales != nullptr) half.scales += scales;
  if (half.zeros != nullptr) half.zeros += scales;
  return half;
}

LinearWeights read_weights(const ringattn_linear& handle, const ringattn_linear_weights& given) {
  const LinearSpec& spec = handle.instance.job().spec;
  const std::int64_t rows = handle.instance.columns().size(), features = handle.instance.features().size();
  const TensorReader reader(*handle.transport);
  const MatrixTensors first{given.weight, given.scales, given.zeros, given.bias, "weight", "scales", "zeros", "bias"};
  const MatrixTensors up{given.up_weight, given.up_scales, given.up_zeros, given.up_bias,
                         "up_weight",     "up_scales",     "up_zeros",     "up_bias"};
  LinearWeights weights;
  if (spec.gated && up.weight != nullptr) {
    weights.matrix = read_matrix(reader, spec, first, rows, features);
    weights.up = read_matrix(reader, spec, up, rows, features);
    return weights;
  }
  for (const auto& [tensor, name] : {std::pair{up.weight, up.weight_name}, std::pair{up.scales, up.scales_name},
                                     std::pair{up.zeros, up.zeros_name}, std::pair{up.bias, up.bias_name}}) {
    if (tensor == nullptr) continue;
    fail(ErrorCode::kUsage, fmt::format("{} is given", name),
         spec.gated ? "up_weight is NULL" : "the layer has no up matrix",
         spec.gated ? "Pass up_weight, or stack both matrices in weight." : "Leave it NULL.");
  }
  weights.matrix = read_matrix(reader, spec, first, spec.gated ? 2 * rows : rows, features);
  if (spec.gated) weights.up = lower_half(spec, weights.matrix, rows);
  return weights;
}

}  // namespace

std::tuple<TensorView, MutableTensorView, Stream> ringattn_linear::read(const ringattn_linear_tensors* given) const {
  const auto tensors = read_struct("ringattn_linear_tensors", given, kFirstTensors);
  need(tensors.x, "x");
  need(tensors.y, "y");
  const TensorReader reader(*transport);
  const TensorView x = reader.rows("x", tensors.x);
  const MutableTensorView y = reader.rows("y", tensors.y);
  reader.check_written("y");
  return {x, y, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_linear_create(ringattn_world* world, const ringattn_linear_spec* spec,
                                       const ringattn_options* options, ringattn_linear** linear) {
  return create(world, linear, [&](Transport& transport) {
    return new ringattn_linear{
        {world->transport, Linear(read_linear_job(spec), transport, read_linear_options(options, transport))}};
  });
}

ringattn_status ringattn_linear_get_facts(const ringattn_linear* linear, ringattn_linear_facts* facts) {
  return with(linear, [&](const ringattn_linear& handle) {
    const Linear& instance = handle.instance;
    const FeatureRange features = instance.features(), columns = instance.columns();
    write_struct("ringattn_linear_facts",
                 {0, features.begin, features.end, columns.begin, columns.end, instance.packed_bytes(),
                  instance.memory_bytes(), instance.kernel().row->name.data()},
                 facts, kFirstFacts);
  });
}

ringattn_status ringattn_linear_tokens(const ringattn_linear* linear, int64_t tokens, int64_t* first, int64_t* count) {
  return with(linear, [&](const ringattn_linear& handle) {
    need(first, "first");
    need(count, "count");
    if (tokens < 0) {
      fail(ErrorCode::kUsage, fmt::format("{} tokens are not possible", tokens), "a number of tokens is not negative",
           "Check how it is computed.");
    }
    const FeatureRange own = handle.instance.tokens_of_rank(tokens);
    *first = own.begin;
    *count = own.size();
  });
}

ringattn_status ringattn_linear_load(ringattn_linear* linear, const ringattn_linear_weights* weights) {
  return with(linear, [&](ringattn_linear& handle) {
    const auto given = read_struct("ringattn_linear_weights", weights, kFirstWeights);
    handle.instance.load(read_weights(handle, given), Stream{given.stream});
  });
}

RINGATTN_CALLS(linear);

}  // extern "C"
