# cmake --install: the headers, the library (static in parts, and shared as a whole), the library in C, what find_package and pkg-config
# read, and the program with its launcher.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)
set(package_folder ${CMAKE_INSTALL_LIBDIR}/cmake/ringattn)

# One shared library of all parts.
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/shared.cpp CONTENT "// The shared library's parts are static libraries.\n")
add_library(ringattn_shared SHARED ${CMAKE_CURRENT_BINARY_DIR}/shared.cpp)
set(parts ringattn_ops ringattn_attention ringattn_io ringattn_kernels ringattn_comm ringattn_base)
list(JOIN parts "," whole)
set_target_properties(ringattn_shared PROPERTIES LINK_LIBRARY_OVERRIDE "WHOLE_ARCHIVE,${whole}")
target_link_libraries(ringattn_shared PRIVATE $<BUILD_INTERFACE:ringattn_ops>)
target_link_options(ringattn_shared PRIVATE -Wl,--build-id=sha1)
target_include_directories(ringattn_shared INTERFACE $<INSTALL_INTERFACE:include/ringattn>)
target_compile_features(ringattn_shared INTERFACE cxx_std_20)
set_target_properties(ringattn_shared PROPERTIES OUTPUT_NAME ringattn EXPORT_NAME shared VERSION ${PROJECT_VERSION}
                                                 SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})

# The directory of libringattn_mpi, which they open at run time.
set_target_properties(ringattn_c ringattn_shared PROPERTIES INSTALL_RPATH $ORIGIN)
file(RELATIVE_PATH from_bin ${CMAKE_INSTALL_FULL_BINDIR} ${CMAKE_INSTALL_FULL_LIBDIR})
set_target_properties(ringattn_program PROPERTIES INSTALL_RPATH $ORIGIN/${from_bin})

# One export set for each component of find_package(): a project needs only the dependencies of the components that it requests.
# install_component(<component> <targets> …)
function(install_component component)
  install(TARGETS ${ARGN} EXPORT ringattn-${component} ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR}
          LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT ringattn-${component} NAMESPACE ringattn:: DESTINATION ${package_folder})
endfunction()
install_component(c ringattn_c)
install_component(shared ringattn_shared)
set(static ringattn ${parts})
if(TARGET ringattn_cuda)
  set_target_properties(ringattn_cuda PROPERTIES EXPORT_NAME cuda)
  list(APPEND static ringattn_cuda)
endif()
install_component(static ${static})
if(TARGET ringattn_comm_mpi)
  set_target_properties(ringattn_comm_mpi PROPERTIES EXPORT_NAME comm_mpi)
  install_component(mpi ringattn_comm_mpi)
endif()
# Headers in the cpu/, cuda/, sm80/ and sm90/ directories of kernels are internal.
install(DIRECTORY ${PROJECT_SOURCE_DIR}/src/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ringattn FILES_MATCHING PATTERN "*.hpp"
        REGEX "/kernels/[a-z_]+/(cpu|cuda|sm80|sm90)$" EXCLUDE PATTERN "base/cuda.hpp" EXCLUDE REGEX "/src/c$" EXCLUDE)
install(FILES ${PROJECT_SOURCE_DIR}/src/c/ringattn.h ${PROJECT_SOURCE_DIR}/src/c/ringattn_ops.h
              ${PROJECT_SOURCE_DIR}/src/c/ringattn_mla.h ${PROJECT_SOURCE_DIR}/src/c/ringattn_layers.h
              ${PROJECT_SOURCE_DIR}/src/c/ringattn_linear.h
        DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(TARGETS ringattn_program DESTINATION ${CMAKE_INSTALL_BINDIR})
install(PROGRAMS ${PROJECT_SOURCE_DIR}/launch/ringattn-mpirun ${PROJECT_SOURCE_DIR}/launch/ringattn-goldens
        DESTINATION ${CMAKE_INSTALL_BINDIR})

# Dependencies with which the static libraries were built, and which projects therefore need, too.
set(RINGATTN_WITH_MPI ${MPI_CXX_FOUND})
set(RINGATTN_WITH_CUDA ${RINGATTN_CUDA_FOUND})
set(RINGATTN_WITH_OPENMP ${OpenMP_CXX_FOUND})
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/ringattnConfig.cmake.in
                              ${CMAKE_CURRENT_BINARY_DIR}/ringattnConfig.cmake INSTALL_DESTINATION ${package_folder})
# Before 1.0 each minor version may change the interface.
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/ringattnConfigVersion.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ringattnConfig.cmake
              ${CMAKE_CURRENT_BINARY_DIR}/ringattnConfigVersion.cmake DESTINATION ${package_folder})
# Libraries that pkg-config's ringattn_static needs and that have no pkg-config file themselves.
set(RINGATTN_STATIC_LIBS ${OpenMP_CXX_FLAGS} -pthread -ldl -lrt)
if(RINGATTN_CUDA_FOUND)
  list(APPEND RINGATTN_STATIC_LIBS ${CUDA_cudart_static_LIBRARY})
endif()
list(JOIN RINGATTN_STATIC_LIBS " " RINGATTN_STATIC_LIBS)
# Paths in the pkg-config files are relative to the files, because `cmake --install` may use another prefix.
file(RELATIVE_PATH RINGATTN_FROM_PC ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
string(REGEX REPLACE "/$" "" RINGATTN_FROM_PC ${RINGATTN_FROM_PC})
foreach(name ringattn ringattn_static ringattn_c)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/${name}.pc.in ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc @ONLY)
  install(FILES ${CMAKE_CURRENT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()
