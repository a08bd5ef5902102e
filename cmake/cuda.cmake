# Finds the CUDA Toolkit, and NCCL beside it. Sets RINGATTN_CUDA_FOUND; the compiler is nvcc on the PATH, of CUDACXX, or
# in CUDA's usual folder.
include(CheckLanguage)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  find_program(RINGATTN_NVCC nvcc HINTS /usr/local/cuda/bin)
  if(RINGATTN_NVCC)
    set(CMAKE_CUDA_COMPILER ${RINGATTN_NVCC})
  endif()
endif()
check_language(CUDA)
set(RINGATTN_CUDA_FOUND FALSE)
if(CMAKE_CUDA_COMPILER)
  enable_language(CUDA)
  if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.26 does not know it
    set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)
    set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
  endif()
  find_package(CUDAToolkit)
  if(CUDAToolkit_FOUND)
    set(RINGATTN_CUDA_FOUND TRUE)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    set(CMAKE_CUDA_EXTENSIONS OFF)
    list(APPEND CMAKE_MODULE_PATH ${CMAKE_CURRENT_LIST_DIR})
    find_package(NCCL 2.19)  # non-blocking communicators that can be aborted
    if(NCCL_LIBRARY)  # comm/nccl_calls.cpp opens it by its file name; no target links it
      cmake_path(GET NCCL_LIBRARY PARENT_PATH folder)
      if(NOT folder IN_LIST CMAKE_CXX_IMPLICIT_LINK_DIRECTORIES)
        list(APPEND CMAKE_BUILD_RPATH ${folder})
      endif()
    endif()
  endif()
endif()
message(STATUS "CUDA: ${RINGATTN_CUDA_FOUND}")

# What every CUDA source is compiled with. Contraction is off, as in C++: a fused multiply-add happens where the code
# says so.
add_library(ringattn_cuda_options INTERFACE)
target_compile_options(ringattn_cuda_options INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;-Werror=all-warnings;--expt-relaxed-constexpr;-Xcompiler=-Wall,-Wextra>)
