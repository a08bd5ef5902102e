// SPDX-License-Identifier: Apache-2.0
#include "ops/gated_delta/gated_delta.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
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
constexpr DLDataType kStateType[] = {{kDLFloat, 32, 1}};
constexpr std::size_t kFirstDeltaFacts = 48, kFirstDeltaTensors = 88, kFirstDeltaSpec = 40;

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
  const auto states = [&](std::int64_t sequences) {
    return std::array<std::int64_t, 4>{sequences, spec.value_heads, spec.key_dim, spec.value_dim};
  };
  GatedDeltaInputs inputs;
  GatedDeltaOutputs outputs;
  inputs.q = reader.rows("q", tensors.q);
  inputs.k = reader.rows("k", tensors.k);
  inputs.v = reader.rows("v", tensors.v);
  inputs.log_decay = reader.rows("log_decay", tensors.log_decay);
  inputs.beta = reader.rows("beta", tensors.beta);
  inputs.initial_states =
      reader.numbers("initial_states", tensors.initial_states, states(std::ssize(instance.beginning())));
  outputs.out = reader.rows("out", tensors.out);
  if (tensors.slots != nullptr) {
    const Part slots = reader.part("final_states", tensors.final_states, kStateType, states(-1), true);
    inputs.slots = reader.slots("slots", tensors.slots, inputs.q.tokens, slots.lengths[0]);
    if (inputs.q.tokens > 0) outputs.final_states = reinterpret_cast<float*>(slots.data);
  } else {
    outputs.final_states = reader.numbers("final_states", tensors.final_states, states(std::ssize(instance.ending())));
  }
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
        {world->transport, GatedDelta(std::move(job), transport, read_ssm_options(options, transport))}};
  });
}

ringattn_status ringattn_gated_delta_get_facts(const ringattn_gated_delta* gated_delta, ringattn_ssm_facts* facts) {
  return with(gated_delta, [&](const ringattn_gated_delta& handle) {
    const GatedDelta& instance = handle.instance;
    write_struct("ringattn_ssm_facts",
                 {0, instance.layout().tokens(handle.transport->rank()), std::ssize(instance.beginning()),
                  std::ssize(instance.ending()), instance.memory().total(), instance.kernel().row->name.data()},
                 facts, kFirstDeltaFacts);
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
  return with(gated_delta, [&](const ringattn_gated_delta& handle) {
    if (beginning != nullptr) std::ranges::copy(handle.instance.beginning(), beginning);
    if (ending != nullptr) std::ranges::copy(handle.instance.ending(), ending);
  });
}

RINGATTN_CALLS(gated_delta);

}  // extern "C"
