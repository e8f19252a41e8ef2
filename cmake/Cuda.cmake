# Finds nvcc, for plug-ins of CUDA kernels. They are built where it is, whether or not the machine has a GPU: kernels must compile and link.
# Without it everything else is built, and a CUDA device takes ATen's operations.
# Not CMake's CUDA language: Debian 12's CMake knows no flags for nvcc 13.
option(RAGGED_BUILD_CUDA "build CUDA kernels where nvcc is found" ON)
set(RAGGED_CUDA_ARCHITECTURES "80;90" CACHE STRING "CUDA architectures to build kernels for; newer devices compile the last one's")
if(RAGGED_BUILD_CUDA)
  find_program(RAGGED_NVCC nvcc HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
endif()
if(NOT RAGGED_NVCC OR NOT RAGGED_BUILD_CUDA)
  message(STATUS "no CUDA kernels: no nvcc")
endif()

# ragged_add_cuda_plugin(NAME SOURCES ...): lib<NAME>.so beside the programs, with a CUDA runtime of its own inside, where there is nvcc. No
# contraction and no fast-math, so that kernels and the CPU agree in bits. Headers are tracked as a whole folder's.
function(ragged_add_cuda_plugin name)
  cmake_parse_arguments(A "" "" "SOURCES" ${ARGN})
  if(NOT RAGGED_NVCC OR NOT RAGGED_BUILD_CUDA)
    return()
  endif()
  set(flags -std=c++20 -O3 --fmad=false -shared -cudart static -Xcompiler -fPIC,-fvisibility=hidden -I${CMAKE_SOURCE_DIR})
  foreach(architecture IN LISTS RAGGED_CUDA_ARCHITECTURES)
    list(APPEND flags -gencode arch=compute_${architecture},code=sm_${architecture})
  endforeach()
  list(GET RAGGED_CUDA_ARCHITECTURES -1 last)
  list(APPEND flags -gencode arch=compute_${last},code=compute_${last})
  set(library ${CMAKE_BINARY_DIR}/bin/lib${name}.so)
  list(TRANSFORM A_SOURCES PREPEND ${CMAKE_CURRENT_SOURCE_DIR}/ OUTPUT_VARIABLE sources)
  file(GLOB headers CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.h)
  add_custom_command(OUTPUT ${library}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/bin
    COMMAND ${RAGGED_NVCC} ${flags} ${sources} -o ${library}
    DEPENDS ${sources} ${headers} COMMENT "Building CUDA plug-in ${name}" VERBATIM)
  add_custom_target(${name} ALL DEPENDS ${library})
endfunction()
