// SPDX-License-Identifier: Apache-2.0
// MLA over the ring under mpirun: each rank's rows equal those of a single rank, byte for byte, in both forms.
#include <gtest/gtest.h>

#include <string>

#include "comm/self.hpp"
#include "tests/distributed/mpi_tally.hpp"
#include "tests/distributed/over_mpi.hpp"
#include "tests/support/mla_rank.hpp"

namespace ringattn::testing {
namespace {

class MpiMla : public OverMpi {};

TEST_P(MpiMla, HasTheBitsOfOneRank) {
  MlaJob job;
  job.spec.heads = 4;
  job.spec.softmax_scale = default_softmax_scale(job.spec);
  job.batch = {{700, 700, 0}, {1, 1, 0}, {129, 300, 171}};
  const MlaTensors tensors = random_mla_tensors(job, 11);
  for (const MlaForm form : {MlaForm::kExpanded, MlaForm::kAbsorbed}) {
    job.form = form;
    MlaOptions options;
    options.ring.kernel.backend = backend();
    options.ring.threads = 1;
    JobResult reference = poisoned_mla_result(job, 1);
    run_mla_rank(job, options, tensors, *make_self_transport(transport().memory(), transport().device()), reference);
    for (const std::int64_t block : {0, 256}) {
      options.ring.block_tokens = block;
      options.heads_at_a_time = block == 0 ? 0 : 2;
      JobResult result = poisoned_mla_result(job, transport().size());
      run_mla_rank(job, options, tensors, transport(), result, {.fused = block != 0});
      expect_rows_of_all_ranks(job.batch.q_tokens(), result, reference, poisoned_mla_result(job, 1),
                               std::string(form_name(form)) + ", block " + std::to_string(block));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, MpiMla, ::testing::Values("mpi", "p2p", "nccl"), transport_name);

}  // namespace
}  // namespace ringattn::testing
