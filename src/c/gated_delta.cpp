// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_delta/gated_delta.hpp"

#include <fmt/format.h>

#include <tuple>
#include <utility>

#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/state_op.hpp"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_gated_delta : ringattn::c::Object<ringattn::GatedDelta> {
  static constexpr const char* kName = "gated_delta";

  std::tuple<ringattn::GatedDeltaInputs, ringattn::GatedDeltaOutputs, ringattn::Stream> read(
      const ringattn_gated_delta_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

// Sizes of structs in the interface version that they came with.
constexpr std::size_t kFirstDeltaTensors = 88, kFirstDeltaSpec = 40;

GatedDeltaSpec read_gated_delta_spec(const ringattn_gated_delta_spec* given) {
  const auto read = read_struct("ringattn_gated_delta_spec", given, kFirstDeltaSpec);
  GatedDeltaSpec spec;
  spec.dtype = read_dtype(read.dtype);
  spec.key_heads = read.key_heads;
  spec.value_heads = read.value_heads;
  spec.key_dim = read.key_dim;
  spec.value_dim = read.value_dim;
  spec.key_decays = read.key_decays != 0;
  spec.qk_l2norm = read.qk_l2norm != 0;
  spec.scale = read.scale;
  return spec;
}

}  // namespace

std::tuple<GatedDeltaInputs, GatedDeltaOutputs, Stream> ringattn_gated_delta::read(
    const ringattn_gated_delta_tensors* given) const {
  const auto tensors = read_struct("ringattn_gated_delta_tensors", given, kFirstDeltaTensors);
  need(tensors.q, "q");
  need(tensors.k, "k");
  need(tensors.v, "v");
  need(tensors.log_decay, "log_decay");
  need(tensors.beta, "beta");
  need(tensors.out, "out");
  const TensorReader reader(*transport);
  const GatedDeltaSpec& spec = instance.job().spec;
  const StateShape state{spec.value_heads, spec.key_dim, spec.value_dim};
  GatedDeltaInputs inputs;
  GatedDeltaOutputs outputs;
  inputs.q = reader.rows("q", tensors.q);
  inputs.k = reader.rows("k", tensors.k);
  inputs.v = reader.rows("v", tensors.v);
  inputs.log_decay = reader.rows("log_decay", tensors.log_decay);
  inputs.beta = reader.rows("beta", tensors.beta);
  inputs.initial_states = read_initial_states(reader, "initial_states", tensors.initial_states, instance, state);
  outputs.out = reader.rows("out", tensors.out);
  const FinalStates finals =
      read_final_states(reader, tensors.final_states, tensors.slots, instance, inputs.q.tokens, state);
  outputs.final_states = finals.data;
  inputs.slots = finals.slots;
  reader.check_written("out");
  reader.check_written("final_states", "initial_states");
  if (instance.job().update && tensors.initial_states == nullptr) inputs.initial_states = outputs.final_states;
  return {inputs, outputs, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_gated_delta_create(ringattn_world* world, const ringattn_gated_delta_spec* spec,
                                            const ringattn_ssm_batch* batch, const ringattn_options* options,
                                            ringattn_gated_delta** gated_delta) {
  return create(world, gated_delta, [&](Transport& transport) {
    SsmBatch read = read_ssm_batch(batch);
    GatedDeltaJob job{read_gated_delta_spec(spec), std::move(read.lengths), read.initial, read.final, read.update};
    return new ringattn_gated_delta{
        {world->transport,
         GatedDelta(std::move(job), transport, read_ssm_options(options, transport, "a gated delta rule"))}};
  });
}

ringattn_status ringattn_gated_delta_get_facts(const ringattn_gated_delta* gated_delta, ringattn_ssm_facts* facts) {
  return with(gated_delta, [&](const ringattn_gated_delta& handle) {
    write_ssm_facts(handle.instance, handle.transport->rank(), facts);
  });
}

ringattn_status ringattn_gated_delta_rows(const ringattn_gated_delta* gated_delta, int64_t count,
                                          int64_t* packed_tokens, int64_t* sequence_tokens) {
  return with(gated_delta, [&](const ringattn_gated_delta& handle) {
    write_rows(handle.instance.layout(), handle.transport->rank(), count, packed_tokens, sequence_tokens);
  });
}

ringattn_status ringattn_gated_delta_sequences(const ringattn_gated_delta* gated_delta, int32_t* beginning,
                                               int32_t* ending) {
  return with(gated_delta,
              [&](const ringattn_gated_delta& handle) { write_sequences(handle.instance, beginning, ending); });
}

RINGATTN_CALLS(gated_delta);

}  // extern "C"
