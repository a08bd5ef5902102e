// SPDX-License-Identifier: Apache-2.0
#include "ops/attention/attention.hpp"

#include <array>
#include <span>
#include <string>
#include <tuple>
#include <utility>

#include "c/attention_handle.hpp"
#include "c/compressed.hpp"
#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "ops/attention/compressed_blocks.hpp"

using namespace ringattn;
using namespace ringattn::c;

std::tuple<Inputs, Outputs, std::span<std::byte>, Stream> ringattn_attention::read(
    const ringattn_attention_tensors* given) {
  constexpr std::size_t kFirstTensors = 72;
  const auto tensors = read_struct("ringattn_attention_tensors", given, kFirstTensors);
  need(tensors.q, "q");
  need(tensors.out, "out");
  const TensorReader reader(*transport);
  const Job& job = instance.job();
  const auto sequences = static_cast<std::int64_t>(job.batch.sequences.size());
  Inputs inputs;
  Outputs outputs;
  inputs.q = reader.rows("q", tensors.q);
  if (is_plain("k", job.format.k, tensors.k, tensors.compressed_k)) {
    inputs.k = reader.rows("k", tensors.k);
  } else {
    inputs.quantized_k =
        read_keys(reader, "k", tensors.compressed_k, job.format.k, k_shape(job.spec), instance.k_rows(), sequences);
  }
  if (is_plain("v", job.format.v, tensors.v, tensors.compressed_v)) {
    inputs.v = reader.rows("v", tensors.v);
  } else {
    inputs.quantized_v =
        read_keys(reader, "v", tensors.compressed_v, job.format.v, v_shape(job.spec), instance.k_rows(), sequences);
  }
  const std::int64_t heads = job.spec.heads;
  inputs.sinks = reader.numbers("sinks", tensors.sinks, std::array{heads});
  outputs.out = reader.rows("out", tensors.out);
  outputs.lse = reader.row_values("lse", tensors.lse, inputs.q.tokens, heads);
  const std::span<std::byte> bytes =
      workspace.choose(reader, tensors.workspace, instance.workspace_bytes(false), instance.backend());
  reader.check_written("out");
  reader.check_written("lse");
  return {inputs, outputs, bytes, Stream{tensors.stream}};
}

extern "C" {

ringattn_status ringattn_attention_create(ringattn_world* world, const ringattn_spec* spec, const ringattn_batch* batch,
                                          const ringattn_options* options, ringattn_attention** attention) {
  return create(world, attention, [&](Transport& transport) {
    Job job = read_job(spec, batch);
    Options read = read_options(options, job.batch, transport);
    Attention instance(std::move(job), transport, std::move(read));
    std::string machine = identity_of(*instance.kernel().row, instance.backend(), instance.job().spec.dtype);
    return new ringattn_attention{{world->transport, std::move(instance)}, {}, std::move(machine)};
  });
}

ringattn_status ringattn_attention_get_facts(const ringattn_attention* attention, ringattn_attention_facts* facts) {
  return with(attention,
              [&](const ringattn_attention& handle) { write_facts(handle.instance, handle.machine, facts); });
}

ringattn_status ringattn_attention_rows(const ringattn_attention* attention, int32_t side, int64_t count,
                                        int64_t* packed_tokens, int64_t* sequence_tokens) {
  return with(attention, [&](const ringattn_attention& handle) {
    write_rows(side_of(handle.instance.layout(), side), handle.transport->rank(), count, packed_tokens,
               sequence_tokens);
  });
}

RINGATTN_CALLS(attention);

}  // extern "C"
