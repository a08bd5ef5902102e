// SPDX-License-Identifier: Apache-2.0
// Versions of CUDA, and the links and limits of GPUs, as text for reports. Nothing here throws or creates a context: an
// item that can't be found says why.
#pragma once

#include <string>

namespace ringattn {

// "13.0 (runtime), driver 580.159.04 for CUDA up to 13.0", or why there is none.
std::string cuda_versions();

// "peer access yes, performance rank 0", between two of visible_gpus(). CUDA ranks links: 0 is the fastest.
std::string peer_access_text(int first, int second);

// "PCI 0000:19:00.0, 18 NVLinks active, power limit 700 W, SM clock up to 1980 MHz" for one of visible_gpus().
std::string gpu_details(int device);

}  // namespace ringattn
