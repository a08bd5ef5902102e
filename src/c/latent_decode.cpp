// SPDX-License-Identifier: Apache-2.0
#include "attention/latent_decode.hpp"

#include <array>
#include <memory>
#include <utility>

#include "c/jobs.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/step_tensors.hpp"
#include "c/tensors.hpp"
#include "c/world.hpp"

struct ringattn_latent_decode {
  std::shared_ptr<ringattn::Transport> transport;
  ringattn::LatentDecode door;
};

namespace ringattn::c {

namespace {

constexpr std::size_t kFirstFacts = 48, kFirstTensors = 128;

struct Step {
  LatentDecodeInputs inputs;
  LatentOutputs outputs;
  Stream stream;
};

Step read_tensors(const ringattn_latent_decode& decode, const ringattn_latent_decode_tensors* given) {
  const auto tensors = read_struct("ringattn_latent_decode_tensors", given, kFirstTensors);
  need(tensors.q, "q");
  need(tensors.cache, "cache");
  need(tensors.out, "out");
  const TensorReader reader(*decode.transport);
  const std::array<std::int64_t, 1> heads{decode.door.job().spec.heads};
  Step step;
  step.inputs.q = reader.rows("q", tensors.q);
  step.inputs.cache = reader.cache("cache", tensors.cache);
  read_step(reader, tensors, step.inputs);
  step.inputs.sinks = reader.numbers("sinks", tensors.sinks, heads);
  step.inputs.latent = reader.rows("latent", tensors.latent);
  step.inputs.k_rope = reader.rows("k_rope", tensors.k_rope);
  step.inputs.w_uk = reader.matrices("w_uk", tensors.w_uk);
  step.inputs.w_uv = reader.matrices("w_uv", tensors.w_uv);
  step.outputs.out = reader.rows("out", tensors.out);
  step.outputs.lse = reader.row_values("lse", tensors.lse, step.outputs.out.tokens, heads[0]);
  step.stream.handle = tensors.stream;
  return step;
}

}  // namespace

}  // namespace ringattn::c

using namespace ringattn;
using namespace ringattn::c;

extern "C" {

ringattn_status ringattn_latent_decode_create(ringattn_world* world, const ringattn_latent_spec* spec,
                                              const ringattn_decode_limits* limits, const ringattn_options* options,
                                              ringattn_latent_decode** decode) {
  return guarded([&] {
    need(world, "world");
    need(decode, "decode");
    LatentDecodeJob job;
    job.spec = read_latent_spec(spec);
    job.limits = read_limits(limits, job.page_size, job.pages);
    DecodeOptions read = read_decode_options(options, *world->transport);
    *decode =
        new ringattn_latent_decode{world->transport, LatentDecode(std::move(job), *world->transport, std::move(read))};
  });
}

ringattn_status ringattn_latent_decode_get_facts(ringattn_latent_decode* decode, ringattn_decode_facts* facts) {
  return guarded([&] {
    need(decode, "decode");
    const Decode& inner = decode->door.in_latent();
    const GroupShare share = inner.share();
    write_struct(
        "ringattn_decode_facts",
        {0, inner.group_keys(), share.first, share.every, decode->door.memory_bytes(), inner.kernel().row->name.data()},
        facts, kFirstFacts);
  });
}

ringattn_status ringattn_latent_decode_owned(ringattn_latent_decode* decode, int64_t sequences, int64_t* first,
                                             int64_t* count) {
  return guarded([&] {
    need(decode, "decode");
    need(first, "first");
    need(count, "count");
    const SequenceRange owned = decode->door.in_latent().owned(sequences);
    *first = owned.first;
    *count = owned.count;
  });
}

int64_t ringattn_latent_decode_cache_tokens(ringattn_latent_decode* decode, int64_t length) {
  return decode == nullptr ? -1 : decode->door.in_latent().cache_tokens(length);
}

ringattn_status ringattn_latent_decode_run(ringattn_latent_decode* decode,
                                           const ringattn_latent_decode_tensors* tensors) {
  return guarded([&] {
    need(decode, "decode");
    const Step step = read_tensors(*decode, tensors);
    decode->door.run(step.inputs, step.outputs, step.stream);
  });
}

ringattn_status ringattn_latent_decode_enqueue(ringattn_latent_decode* decode,
                                               const ringattn_latent_decode_tensors* tensors) {
  return guarded([&] {
    need(decode, "decode");
    const Step step = read_tensors(*decode, tensors);
    decode->door.enqueue(step.inputs, step.outputs, step.stream);
  });
}

ringattn_status ringattn_latent_decode_wait(ringattn_latent_decode* decode) {
  return guarded([&] {
    need(decode, "decode");
    decode->door.wait();
  });
}

void ringattn_latent_decode_destroy(ringattn_latent_decode* decode) { delete decode; }

}  // extern "C"
