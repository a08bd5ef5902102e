// SPDX-License-Identifier: Apache-2.0
// A ring of latents under mpirun: each rank's rows equal those of one rank alone, byte for byte, in both forms.
#include <gtest/gtest.h>

#include <string>

#include "comm/self.hpp"
#include "tests/distributed/mpi_tally.hpp"
#include "tests/distributed/over_mpi.hpp"
#include "tests/support/latent_rank.hpp"

namespace ringattn::testing {
namespace {

class MpiLatent : public OverMpi {};

TEST_P(MpiLatent, HasTheBitsOfOneRank) {
  LatentJob job;
  job.spec.heads = 4;
  job.spec.softmax_scale = default_softmax_scale(job.spec);
  job.batch = {{700, 700, 0}, {1, 1, 0}, {129, 300, 171}};
  const LatentTensors tensors = random_latents(job, 11);
  for (const LatentForm form : {LatentForm::kExpanded, LatentForm::kAbsorbed}) {
    job.form = form;
    LatentOptions options;
    options.ring.kernel.backend = backend();
    options.ring.threads = 1;
    JobResult reference = poisoned_latent_result(job, 1);
    run_latent_rank(job, options, tensors, *make_self_transport(transport().memory(), transport().device()), reference);
    for (const std::int64_t block : {0, 256}) {
      options.ring.block_tokens = block;
      options.heads_at_a_time = block == 0 ? 0 : 2;
      JobResult result = poisoned_latent_result(job, transport().size());
      run_latent_rank(job, options, tensors, transport(), result, {.fused = block != 0});
      expect_rows_of_all_ranks(job.batch.q_tokens(), result, reference, poisoned_latent_result(job, 1),
                               std::string(form_name(form)) + ", block " + std::to_string(block));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, MpiLatent, ::testing::Values("mpi", "p2p", "nccl"), transport_name);

}  // namespace
}  // namespace ringattn::testing
