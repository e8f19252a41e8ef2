# ragged_add_layer(NAME [TORCH] SOURCES ... [DEPENDS ...] [LINK ...])
#   static library ragged_NAME, alias ragged::NAME; TORCH layers see the wheel and reuse the precompiled header.
# ragged_add_test(NAME LABEL unit|tensor|ranks|procs [TORCH] SOURCES ... [DEPENDS ...] [LINK ...] [TIMEOUT s])
#   one gtest binary, registered once with ctest: starting a process that loads torch costs 0.4 s.

add_library(ragged_flags INTERFACE)
target_compile_options(ragged_flags INTERFACE -Wall -Wextra -Wshadow -Wconversion -Wnon-virtual-dtor)
if(RAGGED_WERROR)
  target_compile_options(ragged_flags INTERFACE -Werror)
endif()
target_include_directories(ragged_flags INTERFACE ${CMAKE_SOURCE_DIR} ${CMAKE_BINARY_DIR}/generated)
if(RAGGED_SANITIZE)
  add_compile_options(-fsanitize=${RAGGED_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${RAGGED_SANITIZE})
endif()

add_library(ragged_pch OBJECT ${CMAKE_SOURCE_DIR}/cmake/pch.cpp)
target_link_libraries(ragged_pch PUBLIC torch_wheel::cpu PRIVATE ragged_flags)
if(RAGGED_PCH)
  target_precompile_headers(ragged_pch PRIVATE
    <ATen/ATen.h>
    <torch/csrc/autograd/custom_function.h>
    <torch/csrc/autograd/engine.h>
    <torch/csrc/distributed/c10d/ProcessGroup.hpp>
    <torch/nn/module.h>
    <functional> <memory> <optional> <span> <string> <variant> <vector>)
endif()

function(_ragged_use_torch target)
  target_link_libraries(${target} PUBLIC torch_wheel::cpu)
  set_target_properties(${target} PROPERTIES BUILD_RPATH "${TORCH_WHEEL}/lib;${CMAKE_BINARY_DIR}/bin")
  if(RAGGED_PCH)
    target_precompile_headers(${target} REUSE_FROM ragged_pch)
  endif()
endfunction()

function(ragged_add_layer name)
  cmake_parse_arguments(A "TORCH" "" "SOURCES;DEPENDS;LINK" ${ARGN})
  add_library(ragged_${name} STATIC ${A_SOURCES})
  add_library(ragged::${name} ALIAS ragged_${name})
  target_link_libraries(ragged_${name} PRIVATE ragged_flags PUBLIC fmt::fmt ${A_LINK})
  target_include_directories(ragged_${name} PUBLIC ${CMAKE_SOURCE_DIR})
  foreach(dep IN LISTS A_DEPENDS)
    target_link_libraries(ragged_${name} PUBLIC ragged::${dep})
  endforeach()
  if(A_TORCH)
    _ragged_use_torch(ragged_${name})
  endif()
endfunction()

function(ragged_add_test name)
  cmake_parse_arguments(A "TORCH" "LABEL;TIMEOUT" "SOURCES;DEPENDS;LINK" ${ARGN})
  set(target ${name}_test)
  add_executable(${target} ${A_SOURCES})
  target_link_libraries(${target} PRIVATE ragged_flags GTest::gtest ${A_LINK})
  foreach(dep IN LISTS A_DEPENDS)
    target_link_libraries(${target} PRIVATE ragged::${dep})
  endforeach()
  if(A_TORCH)
    _ragged_use_torch(${target})
    target_link_libraries(${target} PRIVATE ragged_test_support)
  else()
    target_link_libraries(${target} PRIVATE GTest::gtest_main)
  endif()
  if(NOT A_TIMEOUT)
    set(A_TIMEOUT 300)
  endif()
  add_test(NAME ${name} COMMAND ${target})
  set_tests_properties(${name} PROPERTIES LABELS "${A_LABEL}" TIMEOUT ${A_TIMEOUT}
    ENVIRONMENT "OMP_NUM_THREADS=1")
  if(A_LABEL STREQUAL "procs")
    set_tests_properties(${name} PROPERTIES RUN_SERIAL ON)
  endif()
endfunction()
