// SPDX-License-Identifier: Apache-2.0
#include "ops/ssd_backward/ssd_backward.hpp"

#include <algorithm>
#include <array>
#include <span>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

namespace ringattn::c {

// The caller's arrays for the gradients of parameters, [heads] in host memory; null for those that the spec lacks.
struct ParameterArrays {
  float* da = nullptr;
  float* dd = nullptr;
  float* ddt_bias = nullptr;
};

// SsdBackward as the calls of an Object take it.
struct SsdBackwardCalls {
  SsdBackward backward;

  void run(const SsdBackwardInputs& inputs, const SsdBackwardOutputs& outputs, const ParameterArrays& parameters,
           Stream stream) {
    const SsdParameterGradients sums = backward.run(inputs, outputs, stream);
    std::ranges::copy(sums.da, parameters.da);
    std::ranges::copy(sums.dd, parameters.dd);
    std::ranges::copy(sums.ddt_bias, parameters.ddt_bias);
  }
  void enqueue(const SsdBackwardInputs&, const SsdBackwardOutputs&, const ParameterArrays&, Stream) {
    fail(ErrorCode::kUnsupported, "gradients of SSD can't be enqueued",
         "the gradients of a, d and dt_bias are summed over the ranks after a run", "Use ringattn_ssd_backward_run().");
  }
  void wait() { backward.wait(); }
};

}  // namespace ringattn::c

struct ringattn_ssd_backward : ringattn::c::Object<ringattn::c::SsdBackwardCalls> {
  static constexpr const char* kName = "backward";
  static constexpr const char* kOp = "ssd_backward";

  std::tuple<ringattn::SsdBackwardInputs, ringattn::SsdBackwardOutputs, ringattn::c::ParameterArrays, ringattn::Stream>
  read(const ringattn_ssd_backward_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

std::tuple<SsdBackwardInputs, SsdBackwardOutputs, ParameterArrays, Stream> ringattn_ssd_backward::read(
    const ringattn_ssd_backward_tensors* given) const {
  const auto tensors = read_struct("ringattn_ssd_backward_tensors", given, sizeof *given);
  const std::pair<const char*, const DLTensor*> needed[] = {
      {"x", tensors.x},   {"dt", tensors.dt}, {"b", tensors.b},   {"c", tensors.c},
      {"a", tensors.a},   {"dy", tensors.dy}, {"dx", tensors.dx}, {"ddt", tensors.ddt},
      {"db", tensors.db}, {"dc", tensors.dc}, {"da", tensors.da}};
  for (const auto& [name, tensor] : needed) need(tensor, name);
  const TensorReader reader(*transport);
  const TensorReader host(MemoryKind::kHost);
  const SsdBackward& backward = instance.backward;
  const SsmSpec& spec = backward.job().forward.spec;
  const std::array<std::int64_t, 1> heads{spec.heads};
  const auto states = [&](std::size_t sequences) {
    return std::array<std::int64_t, 4>{static_cast<std::int64_t>(sequences), spec.heads, spec.head_dim, spec.state_dim};
  };
  SsdBackwardInputs inputs;
  inputs.x = reader.rows("x", tensors.x);
  inputs.dt = reader.rows("dt", tensors.dt);
  inputs.b = reader.rows("b", tensors.b);
  inputs.c = reader.rows("c", tensors.c);
  inputs.z = reader.rows("z", tensors.z);
  inputs.dy = reader.rows("dy", tensors.dy);
  inputs.a = reader.numbers("a", tensors.a, heads);
  inputs.d = reader.numbers("d", tensors.d, heads);
  inputs.dt_bias = reader.numbers("dt_bias", tensors.dt_bias, heads);
  inputs.initial_states = reader.numbers("initial_states", tensors.initial_states, states(backward.beginning().size()));
  inputs.final_gradients = reader.numbers("dfinal_states", tensors.dfinal_states, states(backward.ending().size()));
  SsdBackwardOutputs outputs;
  outputs.dx = reader.rows("dx", tensors.dx);
  outputs.ddt = reader.rows("ddt", tensors.ddt);
  outputs.db = reader.rows("db", tensors.db);
  outputs.dc = reader.rows("dc", tensors.dc);
  outputs.dz = reader.rows("dz", tensors.dz);
  outputs.initial_gradients =
      reader.numbers("dinitial_states", tensors.dinitial_states, states(backward.beginning().size()));
  ParameterArrays parameters;
  parameters.da = host.numbers("da", tensors.da, heads);
  parameters.dd = host.numbers("dd", tensors.dd, heads);
  parameters.ddt_bias = host.numbers("ddt_bias", tensors.ddt_bias, heads);
  const auto both = [](const char* name, const void* input, const void* gradient) {
    if ((input == nullptr) == (gradient == nullptr)) return;
    fail(ErrorCode::kUsage, std::string("only one of ") + name + " and its gradient is given",
         "each parameter has one gradient", "Pass both, or neither.");
  };
  both("d", tensors.d, tensors.dd);
  both("dt_bias", tensors.dt_bias, tensors.ddt_bias);
  for (const char* written : {"dx", "ddt", "db", "dc", "dz", "dinitial_states"}) reader.check_written(written);
  return {inputs, outputs, parameters, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_ssd_backward_create(ringattn_world* world, const ringattn_ssm_spec* spec,
                                             const ringattn_ssm_batch* batch, int32_t gradients,
                                             const ringattn_options* options, ringattn_ssd_backward** backward) {
  return create(world, backward, [&](Transport& transport) {
    SsdBackwardJob job;
    job.forward.spec = read_ssm_spec(spec);
    SsmBatch read = read_ssm_batch(batch);
    job.forward.lengths = std::move(read.lengths);
    job.forward.initial_states = read.initial;
    job.forward.update = read.update;
    job.final_gradients = read.final;
    job.gradients = read_gradients(gradients, job.forward.spec.dtype);
    return new ringattn_ssd_backward{
        {world->transport, {SsdBackward(std::move(job), transport, read_ssm_options(options, transport))}}};
  });
}

ringattn_status ringattn_ssd_backward_get_facts(const ringattn_ssd_backward* backward, ringattn_ssm_facts* facts) {
  return with(backward, [&](const ringattn_ssd_backward& handle) {
    const SsdBackward& own = handle.instance.backward;
    write_struct("ringattn_ssm_facts",
                 {0, own.layout().tokens(handle.transport->rank()), static_cast<std::int64_t>(own.beginning().size()),
                  static_cast<std::int64_t>(own.ending().size()), own.memory().total(), own.kernel().row->name.data()},
                 facts, sizeof *facts);
  });
}

ringattn_status ringattn_ssd_backward_rows(const ringattn_ssd_backward* backward, int64_t count, int64_t* packed_tokens,
                                           int64_t* sequence_tokens) {
  return with(backward, [&](const ringattn_ssd_backward& handle) {
    write_rows(handle.instance.backward.layout(), handle.transport->rank(), count, packed_tokens, sequence_tokens);
  });
}

RINGATTN_CALLS(ssd_backward);

}  // extern "C"
