// SPDX-License-Identifier: Apache-2.0
#include "ops/ssm/ssm.hpp"

#include <fmt/format.h>

#include <array>
#include <span>
#include <tuple>
#include <utility>

#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/state_op.hpp"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_ssm : ringattn::c::Object<ringattn::Ssm> {
  static constexpr const char* kName = "ssm";

  std::tuple<ringattn::SsmInputs, ringattn::SsmOutputs, ringattn::Stream> read(const ringattn_ssm_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of structs in the interface version that they came with.
constexpr std::size_t kFirstTensors = 104;

}  // namespace

std::tuple<SsmInputs, SsmOutputs, Stream> ringattn_ssm::read(const ringattn_ssm_tensors* given) const {
  const auto tensors = read_struct("ringattn_ssm_tensors", given, kFirstTensors);
  need(tensors.x, "x");
  need(tensors.dt, "dt");
  need(tensors.b, "b");
  need(tensors.c, "c");
  need(tensors.a, "a");
  need(tensors.y, "y");
  const TensorReader reader(*transport);
  const SsmSpec& spec = instance.job().spec;
  const std::array<std::int64_t, 2> decays{spec.heads, spec.state_dim};
  const std::span<const std::int64_t> heads(decays.data(), 1);
  const StateShape state{spec.heads, spec.head_dim, spec.state_dim};
  SsmInputs inputs;
  SsmOutputs outputs;
  inputs.x = reader.rows("x", tensors.x);
  inputs.dt = reader.rows("dt", tensors.dt);
  inputs.b = reader.rows("b", tensors.b);
  inputs.c = reader.rows("c", tensors.c);
  inputs.z = reader.rows("z", tensors.z);
  inputs.a = reader.numbers("a", tensors.a, spec.state_decays ? std::span(decays) : heads);
  inputs.d = reader.numbers("d", tensors.d, heads);
  inputs.dt_bias = reader.numbers("dt_bias", tensors.dt_bias, heads);
  inputs.initial_states = read_initial_states(reader, "initial_states", tensors.initial_states, instance, state);
  outputs.y = reader.rows("y", tensors.y);
  const FinalStates finals =
      read_final_states(reader, tensors.final_states, tensors.slots, instance, inputs.x.tokens, state);
  outputs.final_states = finals.data;
  inputs.slots = finals.slots;
  reader.check_written("y");
  reader.check_written("final_states", "initial_states");
  if (instance.job().update && tensors.initial_states == nullptr) inputs.initial_states = outputs.final_states;
  return {inputs, outputs, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_ssm_create(ringattn_world* world, const ringattn_ssm_spec* spec,
                                    const ringattn_ssm_batch* batch, const ringattn_options* options,
                                    ringattn_ssm** ssm) {
  return create(world, ssm, [&](Transport& transport) {
    SsmJob job;
    job.spec = read_ssm_spec(spec);
    SsmBatch read = read_ssm_batch(batch);
    job.lengths = std::move(read.lengths);
    job.initial_states = read.initial;
    job.final_states = read.final;
    job.update = read.update;
    return new ringattn_ssm{{world->transport, Ssm(std::move(job), transport, read_ssm_options(options, transport))}};
  });
}

ringattn_status ringattn_ssm_get_facts(const ringattn_ssm* ssm, ringattn_ssm_facts* facts) {
  return with(ssm,
              [&](const ringattn_ssm& handle) { write_ssm_facts(handle.instance, handle.transport->rank(), facts); });
}

ringattn_status ringattn_ssm_rows(const ringattn_ssm* ssm, int64_t count, int64_t* packed_tokens,
                                  int64_t* sequence_tokens) {
  return with(ssm, [&](const ringattn_ssm& handle) {
    write_rows(handle.instance.layout(), handle.transport->rank(), count, packed_tokens, sequence_tokens);
  });
}

ringattn_status ringattn_ssm_sequences(const ringattn_ssm* ssm, int32_t* beginning, int32_t* ending) {
  return with(ssm, [&](const ringattn_ssm& handle) { write_sequences(handle.instance, beginning, ending); });
}

RINGATTN_CALLS(ssm);

}  // extern "C"
