// SPDX-License-Identifier: Apache-2.0
#include "ops/linear/linear_backward.hpp"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>

#include "base/error.hpp"
#include "c/compressed.hpp"
#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_linear_backward : ringattn::c::Object<ringattn::LinearBackward> {
  static constexpr const char* kName = "linear_backward";
  std::tuple<ringattn::LinearBackwardInputs, ringattn::LinearBackwardOutputs, ringattn::Stream> read(
      const ringattn_linear_backward_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

std::tuple<LinearBackwardInputs, LinearBackwardOutputs, Stream> ringattn_linear_backward::read(
    const ringattn_linear_backward_tensors* given) const {
  constexpr std::size_t kFirstTensors = 80;
  const auto tensors = read_struct("ringattn_linear_backward_tensors", given, kFirstTensors);
  need(tensors.x, "x");
  need(tensors.dy, "dy");
  const LinearJob& job = instance.job();
  const bool activated = job.spec.gated || job.spec.activation != LinearActivation::kNone;
  const std::int64_t matrix_rows = instance.columns().size(), features = instance.features().size();
  const std::int64_t rows = job.spec.gated ? 2 * matrix_rows : matrix_rows;
  const TensorReader reader(*transport);
  const auto dtype = part_types(StoredType::kDtype, job.spec.dtype);
  // Reads a matrix that is given exactly if it is wanted.
  const auto matrix = [&](const char* name, const DLTensor* tensor, bool wanted, std::int64_t first,
                          std::int64_t last) {
    LinearMatrix read;
    if (!wanted) {
      if (tensor == nullptr) return read;
      fail(ErrorCode::kUsage, fmt::format("{} is given", name), "these gradients do not depend on it",
           "Leave it NULL.");
    }
    need(tensor, name);
    const Part part = reader.part(name, tensor, dtype, std::array{first, last}, false);
    read.data = part.data;
    read.row_stride = first > 1 ? part.strides[0] : last * static_cast<std::int64_t>(size_of(job.spec.dtype));
    return read;
  };
  LinearBackwardInputs inputs;
  LinearBackwardOutputs outputs;
  inputs.x = reader.rows("x", tensors.x);
  inputs.dy = reader.rows("dy", tensors.dy);
  LinearMatrix& gate = inputs.weights.matrix;
  gate = matrix("weight", tensors.weight, activated, rows, features);
  const bool biased = activated && job.spec.bias;
  if (biased) need(tensors.bias, "bias");
  if (!biased && tensors.bias != nullptr) {
    fail(ErrorCode::kUsage, "bias is given", "these gradients do not depend on it", "Leave it NULL.");
  }
  if (biased) gate.bias = reader.part("bias", tensors.bias, dtype, std::array{rows}, true).data;
  if (job.spec.gated) {
    inputs.weights.up = gate;
    inputs.weights.up.data = static_cast<const std::byte*>(gate.data) + matrix_rows * gate.row_stride;
    if (biased) {
      inputs.weights.up.bias =
          static_cast<const std::byte*>(gate.bias) + matrix_rows * static_cast<std::int64_t>(size_of(job.spec.dtype));
    }
  }
  inputs.transposed = matrix("transposed", tensors.transposed, tensors.dx != nullptr, features, rows);
  outputs.dx = reader.rows("dx", tensors.dx);
  outputs.dweight = reader.numbers("dweight", tensors.dweight, std::array{rows, features});
  outputs.dbias = reader.numbers("dbias", tensors.dbias, std::array{rows});
  for (const char* name : {"dx", "dweight", "dbias"}) reader.check_written(name);
  return {inputs, outputs, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_linear_backward_create(ringattn_world* world, const ringattn_linear_spec* spec,
                                                const ringattn_options* options, ringattn_linear_backward** backward) {
  return create(world, backward, [&](Transport& transport) {
    return new ringattn_linear_backward{
        {world->transport, LinearBackward(read_linear_job(spec), transport, read_linear_options(options, transport))}};
  });
}

ringattn_status ringattn_linear_backward_get_facts(const ringattn_linear_backward* backward,
                                                   ringattn_linear_facts* facts) {
  return with(backward, [&](const ringattn_linear_backward& handle) {
    constexpr std::size_t kFirstFacts = 64;
    const LinearBackward& instance = handle.instance;
    const FeatureRange features = instance.features(), columns = instance.columns();
    write_struct("ringattn_linear_facts",
                 {0, features.begin, features.end, columns.begin, columns.end, 0, instance.memory_bytes(),
                  instance.kernel().row->name.data()},
                 facts, kFirstFacts);
  });
}

ringattn_status ringattn_linear_backward_order(const ringattn_linear_backward* backward, int64_t* begins, int64_t* ends,
                                               int64_t* count) {
  return with(backward, [&](const ringattn_linear_backward& handle) {
    need(begins, "begins");
    need(ends, "ends");
    need(count, "count");
    const Transport& transport = *handle.transport;
    *count = 0;
    for (const FeatureRange& run : linear_gradient_order(handle.instance.job(), transport.size(), transport.rank())) {
      begins[*count] = run.begin;
      ends[*count] = run.end;
      ++*count;
    }
  });
}

RINGATTN_CALLS(linear_backward);

}  // extern "C"
