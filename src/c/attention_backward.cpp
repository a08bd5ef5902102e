// SPDX-License-Identifier: Apache-2.0
#include "ops/attention_backward/attention_backward.hpp"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "base/error.hpp"
#include "c/attention_handle.hpp"
#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "c/workspace.hpp"

struct ringattn_attention_backward : ringattn::c::Object<ringattn::AttentionBackward> {
  static constexpr const char* kName = "backward";
  static constexpr const char* kOp = "attention_backward";
  ringattn::c::Workspace workspace;
  std::string machine;

  std::tuple<ringattn::BackwardInputs, ringattn::BackwardOutputs, std::span<std::byte>, ringattn::Stream> read(
      const ringattn_attention_backward_tensors* given);
};

using namespace ringattn;
using namespace ringattn::c;

namespace {

ringattn_attention_backward* make_backward(const std::shared_ptr<Transport>& transport, BackwardJob job,
                                           Options options) {
  AttentionBackward instance(std::move(job), *transport, std::move(options));
  std::string machine = identity_of(*instance.kernel().row, instance.backend(), instance.job().forward.spec.dtype);
  return new ringattn_attention_backward{{transport, std::move(instance)}, {}, std::move(machine)};
}

}  // namespace

std::tuple<BackwardInputs, BackwardOutputs, std::span<std::byte>, Stream> ringattn_attention_backward::read(
    const ringattn_attention_backward_tensors* given) {
  const auto tensors = read_struct("ringattn_attention_backward_tensors", given, sizeof *given);
  const std::pair<const char*, const DLTensor*> needed[] = {
      {"q", tensors.q},       {"k", tensors.k},   {"v", tensors.v},   {"out", tensors.out}, {"lse", tensors.lse},
      {"dout", tensors.dout}, {"dq", tensors.dq}, {"dk", tensors.dk}, {"dv", tensors.dv}};
  for (const auto& [name, tensor] : needed) need(tensor, name);
  const TensorReader reader(*transport);
  const std::int64_t heads = instance.job().forward.spec.heads;
  BackwardInputs inputs;
  inputs.q = reader.rows("q", tensors.q);
  inputs.k = reader.rows("k", tensors.k);
  inputs.v = reader.rows("v", tensors.v);
  inputs.sinks = reader.numbers("sinks", tensors.sinks, std::array{heads});
  inputs.out = reader.rows("out", tensors.out);
  inputs.lse = reader.row_values("lse", tensors.lse, inputs.q.tokens, heads);
  inputs.dout = reader.rows("dout", tensors.dout);
  inputs.dlse = reader.row_values("dlse", tensors.dlse, inputs.q.tokens, heads);
  BackwardOutputs outputs;
  outputs.dq = reader.rows("dq", tensors.dq);
  outputs.dk = reader.rows("dk", tensors.dk);
  outputs.dv = reader.rows("dv", tensors.dv);
  outputs.dsinks = reader.numbers("dsinks", tensors.dsinks, std::array{heads});
  const std::span<std::byte> bytes =
      workspace.choose(reader, tensors.workspace, instance.workspace_bytes(false), instance.backend());
  for (const char* written : {"dq", "dk", "dv", "dsinks"}) reader.check_written(written);
  return {inputs, outputs, bytes, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_attention_backward_create(ringattn_world* world, const ringattn_spec* spec,
                                                   const ringattn_batch* batch, int32_t gradients,
                                                   const ringattn_options* options,
                                                   ringattn_attention_backward** backward) {
  return create(world, backward, [&](Transport& transport) {
    BackwardJob job;
    job.forward = read_job(spec, batch);
    job.gradients = read_gradients(gradients, job.forward.spec.dtype);
    Options read = read_options(options, job.forward.batch, transport);
    return make_backward(world->transport, std::move(job), std::move(read));
  });
}

ringattn_status ringattn_attention_backward_create_from(ringattn_attention* attention, int32_t gradients,
                                                        ringattn_attention_backward** backward) {
  return with(attention, [&](const ringattn_attention& handle) {
    need(backward, ringattn_attention_backward::kName);
    const Job& forward = handle.instance.job();
    BackwardJob job{forward, read_gradients(gradients, forward.spec.dtype)};
    ringattn_attention_backward* const made =
        make_backward(handle.transport, std::move(job), backward_options(handle.instance));
    made->busy = handle.busy;
    *backward = made;
  });
}

ringattn_status ringattn_attention_backward_get_facts(const ringattn_attention_backward* backward,
                                                      ringattn_attention_facts* facts) {
  return with(backward,
              [&](const ringattn_attention_backward& handle) { write_facts(handle.instance, handle.machine, facts); });
}

ringattn_status ringattn_attention_backward_rows(const ringattn_attention_backward* backward, int32_t side,
                                                 int64_t count, int64_t* packed_tokens, int64_t* sequence_tokens) {
  return with(backward, [&](const ringattn_attention_backward& handle) {
    write_rows(side_of(handle.instance.layout(), side), handle.transport->rank(), count, packed_tokens,
               sequence_tokens);
  });
}

RINGATTN_CALLS(attention_backward);

}  // extern "C"
