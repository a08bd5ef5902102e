// SPDX-License-Identifier: Apache-2.0
#include "ops/decode/decode.hpp"

#include <cstdint>
#include <tuple>
#include <utility>

#include "c/compressed.hpp"
#include "c/jobs.hpp"
#include "c/object.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/steps.hpp"
#include "c/tensors.hpp"
#include "ops/attention/compressed_blocks.hpp"

struct ringattn_decode : ringattn::c::Object<ringattn::Decode> {
  static constexpr const char* kName = "decode";

  const ringattn::Decode& steps() const { return instance; }
  std::uint64_t memory_bytes() const { return instance.memory().total(); }
  std::tuple<ringattn::DecodeInputs, ringattn::DecodeOutputs, ringattn::Stream> read(
      const ringattn_decode_tensors* given) const;
};

using namespace ringattn;
using namespace ringattn::c;

std::tuple<DecodeInputs, DecodeOutputs, Stream> ringattn_decode::read(const ringattn_decode_tensors* given) const {
  constexpr std::size_t kFirstTensors = 120;
  const auto tensors = read_tensors("ringattn_decode_tensors", given, kFirstTensors);
  const TensorReader reader(*transport);
  const DecodeJob& job = instance.job();
  DecodeInputs inputs;
  DecodeOutputs outputs;
  read_step(reader, tensors, job.spec.heads, inputs, outputs);
  const std::int64_t sequences = inputs.q.tokens / inputs.rows;
  if (is_plain("k", job.format.k, tensors.k, tensors.compressed_k)) {
    inputs.k = reader.cache("k", tensors.k);
  } else {
    inputs.quantized_k = read_cache(reader, "k", tensors.compressed_k, job.format.k, k_shape(job.spec), sequences);
  }
  if (is_plain("v", job.format.v, tensors.v, tensors.compressed_v)) {
    inputs.v = reader.cache("v", tensors.v);
  } else {
    inputs.quantized_v = read_cache(reader, "v", tensors.compressed_v, job.format.v, v_shape(job.spec), sequences);
  }
  inputs.k_new = reader.rows("k_new", tensors.k_new);
  inputs.v_new = reader.rows("v_new", tensors.v_new);
  reader.check_written("out");
  reader.check_written("lse");
  return {inputs, outputs, Stream{tensors.stream}};
}

namespace {

// `rotates`: there is a `rope`.
ringattn_status create_decode(ringattn_world* world, const ringattn_spec* spec, bool rotates,
                              const ringattn_rope_spec* rope, const ringattn_decode_limits* limits,
                              const ringattn_options* options, ringattn_decode** decode) {
  return create(world, decode, [&](Transport& transport) {
    DecodeJob job;
    job.spec = read_spec(spec, job.format);
    if (rotates) job.rope = read_rope_spec(rope);
    job.limits = read_limits(limits, job.page_size, job.pages);
    DecodeOptions read = read_decode_options(options, transport);
    return new ringattn_decode{{world->transport, Decode(std::move(job), transport, std::move(read))}};
  });
}

}  // namespace

extern "C" {

ringattn_status ringattn_decode_create(ringattn_world* world, const ringattn_spec* spec,
                                       const ringattn_decode_limits* limits, const ringattn_options* options,
                                       ringattn_decode** decode) {
  return create_decode(world, spec, false, nullptr, limits, options, decode);
}

ringattn_status ringattn_decode_create_with_rope(ringattn_world* world, const ringattn_spec* spec,
                                                 const ringattn_rope_spec* rope, const ringattn_decode_limits* limits,
                                                 const ringattn_options* options, ringattn_decode** decode) {
  return create_decode(world, spec, true, rope, limits, options, decode);
}

RINGATTN_STEPS(decode);
RINGATTN_CALLS(decode);

}  // extern "C"
