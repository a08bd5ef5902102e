// SPDX-License-Identifier: Apache-2.0
#include "attention/latent.hpp"

#include <fmt/format.h>

#include <array>
#include <memory>
#include <span>
#include <utility>

#include "c/jobs.hpp"
#include "c/layouts.hpp"
#include "c/ringattn.h"
#include "c/status.hpp"
#include "c/tensors.hpp"
#include "c/workspace.hpp"
#include "c/world.hpp"

struct ringattn_latent {
  std::shared_ptr<ringattn::Transport> transport;
  ringattn::Latent door;
  ringattn::c::Workspace workspace;
};

namespace ringattn::c {

namespace {

constexpr std::size_t kFirstFacts = 48, kFirstTensors = 88;

struct Run {
  LatentInputs inputs;
  LatentOutputs outputs;
  std::span<std::byte> workspace;
  Stream stream;
};

std::optional<LatentForm> read_form(std::int32_t form) {
  if (form == RINGATTN_ANY_FORM) return std::nullopt;
  if (form == RINGATTN_EXPANDED) return LatentForm::kExpanded;
  if (form == RINGATTN_ABSORBED) return LatentForm::kAbsorbed;
  fail(ErrorCode::kUsage, fmt::format("form {} is not known", form),
       "RINGATTN_ANY_FORM is 0, RINGATTN_EXPANDED 1, RINGATTN_ABSORBED 2", "Choose one of these.");
}

Run read_run(ringattn_latent& latent, const ringattn_latent_tensors* given) {
  const auto tensors = read_struct("ringattn_latent_tensors", given, kFirstTensors);
  need(tensors.q, "q");
  need(tensors.latent, "latent");
  need(tensors.k_rope, "k_rope");
  need(tensors.out, "out");
  const TensorReader reader(*latent.transport);
  const std::array<std::int64_t, 1> heads{latent.door.job().spec.heads};
  Run run;
  run.inputs.q = reader.rows("q", tensors.q);
  run.inputs.latent = reader.rows("latent", tensors.latent);
  run.inputs.k_rope = reader.rows("k_rope", tensors.k_rope);
  run.inputs.w_uk = reader.matrices("w_uk", tensors.w_uk);
  run.inputs.w_uv = reader.matrices("w_uv", tensors.w_uv);
  run.inputs.sinks = reader.numbers("sinks", tensors.sinks, heads);
  run.outputs.out = reader.rows("out", tensors.out);
  run.outputs.lse = reader.row_values("lse", tensors.lse, run.inputs.q.tokens, heads[0]);
  run.workspace = latent.workspace.choose(reader.bytes("workspace", tensors.workspace), tensors.workspace != nullptr,
                                          latent.door.workspace_bytes(false), latent.door.backend());
  run.stream.handle = tensors.stream;
  return run;
}

}  // namespace

}  // namespace ringattn::c

using namespace ringattn;
using namespace ringattn::c;

extern "C" {

ringattn_status ringattn_latent_create(ringattn_world* world, const ringattn_latent_spec* spec,
                                       const ringattn_batch* batch, int32_t form, const ringattn_options* options,
                                       ringattn_latent** latent) {
  return guarded([&] {
    need(world, "world");
    need(latent, "latent");
    LatentJob job;
    job.spec = read_latent_spec(spec);
    job.batch = read_batch(batch);
    job.form = read_form(form);
    LatentOptions read;
    read.ring = read_options(options, job.batch, *world->transport);
    *latent = new ringattn_latent{world->transport, Latent(std::move(job), *world->transport, std::move(read)), {}};
  });
}

ringattn_status ringattn_latent_get_facts(const ringattn_latent* latent, ringattn_latent_facts* facts) {
  return guarded([&] {
    need(latent, "latent");
    const Latent& door = latent->door;
    const std::int64_t form = door.form().form == LatentForm::kExpanded ? RINGATTN_EXPANDED : RINGATTN_ABSORBED;
    write_struct("ringattn_latent_facts",
                 {0, door.q_rows(), door.k_rows(), door.workspace_bytes(false), door.kernel().row->name.data(), form},
                 facts, kFirstFacts);
  });
}

ringattn_status ringattn_latent_rows(const ringattn_latent* latent, int32_t side, int64_t count, int64_t* packed_tokens,
                                     int64_t* sequence_tokens) {
  return guarded([&] {
    need(latent, "latent");
    write_rows(side_of(latent->door.layout(), side), latent->transport->rank(), count, packed_tokens, sequence_tokens);
  });
}

ringattn_status ringattn_latent_run(ringattn_latent* latent, const ringattn_latent_tensors* tensors) {
  return guarded([&] {
    need(latent, "latent");
    const Run run = read_run(*latent, tensors);
    latent->door.run(run.inputs, run.outputs, run.workspace, run.stream);
  });
}

ringattn_status ringattn_latent_enqueue(ringattn_latent* latent, const ringattn_latent_tensors* tensors) {
  return guarded([&] {
    need(latent, "latent");
    const Run run = read_run(*latent, tensors);
    latent->door.enqueue(run.inputs, run.outputs, run.workspace, run.stream);
  });
}

ringattn_status ringattn_latent_wait(ringattn_latent* latent) {
  return guarded([&] {
    need(latent, "latent");
    latent->door.wait();
  });
}

void ringattn_latent_destroy(ringattn_latent* latent) { delete latent; }

}  // extern "C"
