# SPDX-License-Identifier: Apache-2.0
# The instantiations of the templated kernels, one CUDA source for each. A source defines the launcher that its kernel's
# header declares.

function(instance_source file header arch launchers)
  file(CONFIGURE OUTPUT ${file} CONTENT "#include \"kernels/${header}\"\n\nnamespace ringattn::${arch} {\n${launchers}}\n" @ONLY)
endfunction()

# kernel_instances(<list> <op>/<arch> <header> <name> <launcher> <call> [DIMS <dim>[/<dim_v>] …] [DTYPES <dtype> …]):
# appends to <list> one source for each dtype (bf16 and fp16, unless DTYPES says otherwise) and each dim. In <name> and
# <call>, DTYPE stands for the dtype, ELEMENT for its C++ type, DIM for <dim>, and BOTH_DIMS for "<dim>, <dim_v>".
# With RINGATTN_CHECK_CUDA it is one source for all, in which only the first dtype's launcher for head dim 128, or for
# the first of the dims, launches a kernel.
function(kernel_instances list folder header name launcher call)
  cmake_parse_arguments(arg "" "" "DIMS;DTYPES" ${ARGN})
  if(NOT arg_DIMS)
    set(arg_DIMS none)
  endif()
  if(NOT arg_DTYPES)
    set(arg_DTYPES bf16 fp16)
  endif()
  get_filename_component(arch ${folder} NAME)
  set(sources ${${list}})
  set(compiled ${arg_DIMS})
  list(FILTER compiled INCLUDE REGEX "^128$")
  list(APPEND compiled ${arg_DIMS})
  list(GET compiled 0 compiled)
  list(GET arg_DTYPES 0 compiled_dtype)
  set(compiled_file)
  set(launchers)
  foreach(dtype IN LISTS arg_DTYPES)
    set(element __half)
    if(dtype STREQUAL bf16)
      set(element __nv_bfloat16)
    endif()
    foreach(dims IN LISTS arg_DIMS)
      string(REPLACE "/" ", " both ${dims})
      if(NOT dims MATCHES "/")
        set(both "${dims}, ${dims}")
      endif()
      string(REGEX REPLACE "/.*$" "" dim ${dims})
      set(launcher_name ${name})
      set(expression "${call}")
      foreach(text launcher_name expression)
        string(REPLACE "DTYPE" ${dtype} ${text} "${${text}}")
        string(REPLACE "ELEMENT" ${element} ${text} "${${text}}")
        string(REPLACE "BOTH_DIMS" "${both}" ${text} "${${text}}")
        string(REPLACE "DIM" ${dim} ${text} "${${text}}")
      endforeach()
      set(file ${CMAKE_CURRENT_BINARY_DIR}/instances/${folder}/${launcher_name}.cu)
      if(RINGATTN_CHECK_CUDA)
        if(dims STREQUAL compiled AND dtype STREQUAL compiled_dtype)
          set(compiled_file ${file})
        else()
          set(expression "{}")
        endif()
        string(APPEND launchers "constinit const ${launcher} ${launcher_name} = ${expression};\n")
        continue()
      endif()
      instance_source(${file} ${folder}/${header} ${arch} "constinit const ${launcher} ${launcher_name} = ${expression};\n")
      list(APPEND sources ${file})
    endforeach()
  endforeach()
  if(RINGATTN_CHECK_CUDA)
    instance_source(${compiled_file} ${folder}/${header} ${arch} "${launchers}")
    list(APPEND sources ${compiled_file})
  endif()
  set(${list} ${sources} PARENT_SCOPE)
endfunction()

# For every GPU from sm_80 on.
set(dims 64 96 128 192/128 256)
kernel_instances(sm80_instances attention/sm80 attention.cuh attention_DTYPE_DIM
  cuda::Launcher "launcher_of<ELEMENT, config_for(BOTH_DIMS)>()" DIMS ${dims})
kernel_instances(sm80_instances attention/sm80 attention.cuh positioned_DTYPE_DIM
  cuda::Launcher "launcher_of<ELEMENT, config_for(BOTH_DIMS), true>()" DIMS ${dims})
kernel_instances(sm80_instances attention/sm80 sliced/attention.cuh attention_DTYPE_DIM
  cuda::Launcher "sliced_launcher_of<ELEMENT, config_for(BOTH_DIMS)>()" DIMS 512 576/512)
kernel_instances(sm80_instances attention_backward/sm80 launch.cuh attention_backward_DTYPE_DIM
  BackwardLauncher "backward_launcher_of<ELEMENT, backward_config_for(BOTH_DIMS)>()" DIMS ${dims})
kernel_instances(sm80_instances decode/sm80 decode.cuh decode_DTYPE_DIM
  DecodeLauncher "decode_launcher<ELEMENT, config_for(BOTH_DIMS)>()" DIMS ${dims} 512 576/512)
kernel_instances(sm80_instances decode/sm80 compressed.cuh compressed_DTYPE_DIM
  CompressedLauncher "compressed_launcher<ELEMENT, config_for(BOTH_DIMS)>()" DIMS ${dims})
kernel_instances(sm80_instances decode/sm80 compressed.cuh compressed_DTYPE_DIM
  CompressedLauncher "compressed_launcher<ELEMENT, config_for(BOTH_DIMS)>()" DIMS 576/512 DTYPES bf16)
kernel_instances(sm80_instances gemm/sm80 gemm.cuh gemm_DTYPE cuda::GemmLauncher "gemm_launcher<ELEMENT>()")
kernel_instances(sm80_instances ssd_backward/sm80 launch.cuh ssd_backward_DTYPE_64_DIM
  SsdBackwardLauncher "ssd_backward_launcher<ELEMENT, 64, DIM>()" DIMS 64 128)
kernel_instances(sm80_instances ssd_backward/sm80 launch.cuh ssd_backward_DTYPE_128_DIM
  SsdBackwardLauncher "ssd_backward_launcher<ELEMENT, 128, DIM>()" DIMS 64 128)
kernel_instances(sm80_instances ssm/sm80 ssd.cuh ssd_DTYPE_DIM
  SsdLauncher "ssd_launcher<ELEMENT, DIM>()" DIMS 16 64 128 256)
kernel_instances(sm80_instances ssm/sm80 gla.cuh gla_DTYPE_64_DIM
  GlaLauncher "gla_launcher<ELEMENT, 64, DIM>()" DIMS 64 128 DTYPES bf16)
kernel_instances(sm80_instances ssm/sm80 gla.cuh gla_DTYPE_128_DIM
  GlaLauncher "gla_launcher<ELEMENT, 128, DIM>()" DIMS 64 128 DTYPES bf16)

# For Hopper: wgmma and setmaxnreg exist for sm_90a alone.
kernel_instances(sm90_instances attention/sm90 launch.cuh attention_DTYPE_DIM
  cuda::Launcher "launcher_of<ELEMENT, config_for(BOTH_DIMS)>()" DIMS ${dims})
kernel_instances(sm90_instances attention_backward/sm90 launch.cuh attention_backward_DTYPE_DIM
  BackwardLauncher "backward_launcher_of<ELEMENT, backward_config_for(BOTH_DIMS)>()" DIMS ${dims})
kernel_instances(sm90_instances decode/sm90 launch.cuh decode_DTYPE_DIM
  DecodeLauncher "decode_launcher<ELEMENT, config_for(BOTH_DIMS)>()" DIMS ${dims})
kernel_instances(sm90_instances decode/sm90 compressed.cuh compressed_DTYPE_DIM
  CompressedLauncher "compressed_launcher<ELEMENT, config_for(BOTH_DIMS)>()" DIMS ${dims})
kernel_instances(sm90_instances gemm/sm90 launch.cuh gemm_DTYPE cuda::GemmLauncher "gemm_launcher<ELEMENT>()")
kernel_instances(sm90_instances linear/sm90 launch.cuh linear_DTYPE HopperLinearLauncher "linear_launcher<ELEMENT>()")
kernel_instances(sm90_instances linear/sm90 int4.cuh int4_DTYPE Int4Launcher "int4_launcher<ELEMENT>()")
kernel_instances(sm90_instances mla/sm90 launch.cuh mla_DTYPE
  "MlaLauncher<MlaParams>" "mla_launcher<ELEMENT, false>()")
kernel_instances(sm90_instances mla/sm90 launch.cuh mla_fp8
  "MlaLauncher<MlaFp8Params>" "mla_launcher<ELEMENT, true>()" DTYPES bf16)
kernel_instances(sm90_instances ssm/sm90 launch.cuh ssd_DIM
  HopperSsdLauncher "ssd_launcher<DIM>()" DIMS 64 128 DTYPES bf16)
kernel_instances(sm90_instances ssd_backward/sm90 launch.cuh ssd_backward_DIM
  HopperSsdBackwardLauncher "ssd_backward_launcher<DIM>()" DIMS 64 128 DTYPES bf16)
kernel_instances(sm90_instances gated_delta/sm90 launch.cuh gated_delta_DTYPE_DIM
  GatedDeltaLauncher "gated_delta_launcher<ELEMENT>()" DIMS 128 DTYPES bf16)
