// SPDX-License-Identifier: Apache-2.0
// The table of other libraries' names contradicts neither itself nor the roles.
#include "io/known_names.hpp"

#include <gtest/gtest.h>

#include <map>
#include <string_view>

#include "io/tensor_roles.hpp"

namespace ringattn {
namespace {

TEST(KnownNames, HaveOneMeaningInAJob) {
  std::map<std::string_view, unsigned> jobs;
  for (const KnownName& known : known_names()) {
    EXPECT_NE(known.jobs, 0U) << known.name;
    EXPECT_EQ(jobs[known.name] & known.jobs, 0U) << known.name << " stands twice for one job";
    jobs[known.name] |= known.jobs;
    EXPECT_NE(known.role.empty(), known.why.empty()) << known.name;
    EXPECT_EQ(known.why.empty(), known.suggestion.empty()) << known.name;
    if (known.role.empty()) {
      EXPECT_FALSE(known.suggestion.ends_with('.')) << known.name;
    } else {
      EXPECT_TRUE(is_tensor_role(known.role)) << known.role;
      EXPECT_NE(known.name, known.role);
    }
  }
}

}  // namespace
}  // namespace ringattn
