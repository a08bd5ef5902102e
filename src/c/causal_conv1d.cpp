// SPDX-License-Identifier: Apache-2.0
#include "ops/conv1d/causal_conv1d.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "c/compressed.hpp"
#include "c/conv1d_spec.hpp"
#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"

struct ringattn_causal_conv1d : ringattn::c::Object<ringattn::CausalConv1d> {
  static constexpr const char* kName = "causal_conv1d";

  // Number of sequences whose initial halo, and whose final halo, this rank has.
  std::int64_t beginning() const { return static_cast<std::int64_t>(instance.beginning().size()); }
  std::int64_t ending() const { return static_cast<std::int64_t>(instance.ending().size()); }
  std::tuple<ringattn::CausalConv1dInputs, ringattn::CausalConv1dOutputs, ringattn::Stream> read(
      const ringattn_causal_conv1d_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

std::tuple<CausalConv1dInputs, CausalConv1dOutputs, Stream> ringattn_causal_conv1d::read(
    const ringattn_causal_conv1d_tensors* given) const {
  constexpr std::size_t kFirstTensors = 72;
  const auto tensors = read_struct("ringattn_causal_conv1d_tensors", given, kFirstTensors);
  need(tensors.x, "x");
  need(tensors.weight, "weight");
  need(tensors.y, "y");
  const TensorReader reader(*transport);
  const CausalConv1dSpec& spec = instance.job().spec;
  const std::array<std::int64_t, 2> weights{spec.channels, spec.width};
  const auto types = part_types(StoredType::kDtype, spec.dtype);
  const auto halos = [&](const char* name, const DLTensor* tensor, std::int64_t sequences) {
    return tensor == nullptr
               ? Part{}
               : reader.part(name, tensor, types,
                             std::array<std::int64_t, 3>{sequences, spec.halo_tokens(), spec.channels}, true);
  };
  CausalConv1dInputs inputs;
  CausalConv1dOutputs outputs;
  inputs.x = reader.rows("x", tensors.x);
  inputs.weight = reader.numbers("weight", tensors.weight, weights);
  inputs.bias = reader.numbers("bias", tensors.bias, std::array<std::int64_t, 1>{spec.channels});
  outputs.y = reader.rows("y", tensors.y);
  inputs.initial_halos = halos("initial_halos", tensors.initial_halos, beginning()).data;
  const Part final = halos("final_halos", tensors.final_halos, tensors.slots == nullptr ? ending() : -1);
  inputs.slots = reader.slots("slots", tensors.slots, inputs.x.tokens, final.lengths[0]);
  if (tensors.slots == nullptr || inputs.x.tokens > 0) outputs.final_halos = final.data;
  reader.check_written("y");
  reader.check_written("final_halos", "initial_halos");
  if (instance.job().update && tensors.initial_halos == nullptr) inputs.initial_halos = outputs.final_halos;
  return {inputs, outputs, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_causal_conv1d_create(ringattn_world* world, const ringattn_causal_conv1d_spec* spec,
                                              const ringattn_ssm_batch* batch, const ringattn_options* options,
                                              ringattn_causal_conv1d** conv1d) {
  return create(world, conv1d, [&](Transport& transport) {
    CausalConv1dJob job = read_conv1d_job(spec, batch);
    return new ringattn_causal_conv1d{
        {world->transport, CausalConv1d(std::move(job), transport, read_conv1d_options(options, transport))}};
  });
}

ringattn_status ringattn_causal_conv1d_get_facts(const ringattn_causal_conv1d* conv1d, ringattn_ssm_facts* facts) {
  return with(conv1d, [&](const ringattn_causal_conv1d& handle) {
    write_conv1d_facts(handle.instance, handle.transport->rank(), 2, facts);
  });
}

RINGATTN_CALLS(causal_conv1d);

}  // extern "C"
