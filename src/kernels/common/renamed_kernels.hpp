// SPDX-License-Identifier: Apache-2.0
// Names of kernels before 0.4, each with today's: requests for an old one are refused with the new one named, and old
// result lines are read by it.
#pragma once

#include <string_view>
#include <utility>

namespace ringattn {

inline constexpr std::pair<std::string_view, std::string_view> kRenamed[] = {
    {"cpu_fold", "cpu_attention"},
    {"sm80_fold", "sm80_attention"},
    {"sm80_plain", "sm80_simt"},
    {"sm90_fold", "sm90_attention"},
    {"sm90_latent", "sm90_mla"},
    {"sm90_latent_1k", "sm90_mla_split1k"},
    {"cpu_product", "cpu_gemm"},
    {"sm80_product", "sm80_gemm"},
    {"sm80_chain", "sm80_gemm_ordered"},
    {"sm90_product", "sm90_gemm"},
    {"cpu_scan", "cpu_ssd"},
    {"sm80_scan", "sm80_ssd"},
    {"sm90_scan", "sm90_ssd"},
    {"cpu_selective", "cpu_selective_scan"},
    {"sm80_selective", "sm80_selective_scan"},
    {"cpu_convolution", "cpu_conv1d"},
    {"sm80_convolution", "sm80_conv1d"},
};

}  // namespace ringattn
