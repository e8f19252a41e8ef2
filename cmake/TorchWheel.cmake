# Imported targets over an installed torch wheel, without TorchConfig.cmake (which insists on a CUDA toolkit).
#   torch_wheel::cpu      headers + libtorch_cpu + libc10
#   torch_wheel::python   + libtorch_python and CPython headers (extensions only; only if those headers are there)
#   torch_wheel::cuda     + libtorch_cuda + libc10_cuda (only if the CUDA headers are there)
# Input: TORCH_WHEEL (folder of the installed `torch` package; also as an environment variable), or a Python3_EXECUTABLE
# that has it, or the activated environment, or else the one that `make setup` made. Output: TORCH_WHEEL,
# TORCH_WHEEL_VERSION.
if(NOT TORCH_WHEEL AND DEFINED ENV{TORCH_WHEEL})
  set(TORCH_WHEEL $ENV{TORCH_WHEEL})
endif()
if(NOT TORCH_WHEEL AND NOT Python3_EXECUTABLE AND NOT DEFINED ENV{VIRTUAL_ENV} AND NOT DEFINED ENV{CONDA_PREFIX})
  execute_process(
    COMMAND ${CMAKE_CURRENT_LIST_DIR}/../tools/venv_path.sh
    OUTPUT_VARIABLE _venv OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(EXISTS "${_venv}/.complete" OR NOT "$ENV{VENV}" STREQUAL "")
    set(Python3_EXECUTABLE ${_venv}/bin/python)
  endif()
endif()
# CPython's headers serve extensions alone; a machine without them builds the library and the command.
find_package(Python3 REQUIRED COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module)
if(NOT TORCH_WHEEL)
  # pip's isolated builds hide the environment's packages from import; sysconfig still says where they lie.
  # find_spec doesn't import torch: 0.05 s instead of 3 s.
  execute_process(
    COMMAND ${Python3_EXECUTABLE} -c "\
import importlib.util, os, sysconfig
spec = importlib.util.find_spec('torch')
found = list(spec.submodule_search_locations or ()) if spec else []
found += [os.path.join(sysconfig.get_path(scheme), 'torch') for scheme in ('purelib', 'platlib')]
print(next(folder for folder in found if os.path.exists(os.path.join(folder, 'version.py'))))"
    OUTPUT_VARIABLE TORCH_WHEEL OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
set(_remedy "Run `make setup` and build with `make`, or pass -DPython3_EXECUTABLE=... of an environment that has torch, "
  "or -DTORCH_WHEEL=... (the folder of the installed torch package).")
if(SKBUILD)
  # pip, uv and build read the message from a log, and the way out is another than for the C++ library.
  set(_remedy "Install torch first; where the build runs in an environment of its own, either let it see yours "
    "(pip install scikit-build-core torch, then pip install --no-build-isolation .), or say where torch is: "
    "TORCH_WHEEL=.../site-packages/torch pip install .")
endif()
string(CONCAT _remedy ${_remedy})
if(NOT TORCH_WHEEL)
  message(FATAL_ERROR "Expected an installed torch wheel, but ${Python3_EXECUTABLE} has no torch. ${_remedy}")
elseif(NOT EXISTS ${TORCH_WHEEL}/version.py OR NOT EXISTS ${TORCH_WHEEL}/lib/libtorch_cpu.so)
  message(FATAL_ERROR
    "Expected TORCH_WHEEL to be the folder of an installed torch package for Linux, but ${TORCH_WHEEL} lacks version.py "
    "or lib/libtorch_cpu.so. ${_remedy}")
endif()
file(STRINGS ${TORCH_WHEEL}/version.py _v REGEX "^__version__")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" TORCH_WHEEL_VERSION "${_v}")
if(TORCH_WHEEL_VERSION VERSION_LESS 2.11 OR TORCH_WHEEL_VERSION VERSION_GREATER_EQUAL 2.16)
  message(FATAL_ERROR
    "Expected torch 2.11 to 2.15, but ${TORCH_WHEEL} is ${TORCH_WHEEL_VERSION}. Names inside c10d and autograd move "
    "between versions and the others are untested. ${_remedy}")
endif()
if(NOT "${TORCH_WHEEL}" STREQUAL "${_TORCH_WHEEL_OF_CACHE}")
  # headers of the former wheel's CUDA would be the wrong ones, see below
  unset(TORCH_WHEEL_CUDA_INCLUDE CACHE)
  unset(TORCH_WHEEL_NCCL_INCLUDE CACHE)
  set(_TORCH_WHEEL_OF_CACHE ${TORCH_WHEEL} CACHE INTERNAL "the wheel that the cached paths belong to")
endif()

function(_torch_lib name)
  add_library(torch_wheel::${name} SHARED IMPORTED)
  set_target_properties(torch_wheel::${name} PROPERTIES
    IMPORTED_LOCATION ${TORCH_WHEEL}/lib/lib${name}.so IMPORTED_NO_SONAME FALSE)
endfunction()
_torch_lib(c10)
_torch_lib(torch_cpu)
add_library(torch_wheel::cpu INTERFACE IMPORTED)
# SYSTEM: torch headers are full of warnings under -Wall -Wextra
target_include_directories(torch_wheel::cpu SYSTEM INTERFACE
  ${TORCH_WHEEL}/include ${TORCH_WHEEL}/include/torch/csrc/api/include)
# The wheel is a release build, and some of its classes have members only in debug builds (RecordFunction): NDEBUG
# is part of its ABI.
target_compile_definitions(torch_wheel::cpu INTERFACE USE_DISTRIBUTED NDEBUG)
target_compile_features(torch_wheel::cpu INTERFACE cxx_std_20)
# libtorch_cpu of a CUDA wheel needs libcupti and libcudart; its own RPATH finds them at run time, so the
# link editor mustn't try to resolve them.
target_link_options(torch_wheel::cpu INTERFACE LINKER:--allow-shlib-undefined)
target_link_libraries(torch_wheel::cpu INTERFACE torch_wheel::torch_cpu torch_wheel::c10 pthread dl)

if(TARGET Python3::Module AND EXISTS ${TORCH_WHEEL}/lib/libtorch_python.so)
  _torch_lib(torch_python)
  add_library(torch_wheel::python INTERFACE IMPORTED)
  target_link_libraries(torch_wheel::python INTERFACE torch_wheel::cpu torch_wheel::torch_python Python3::Module)
endif()

if(EXISTS ${TORCH_WHEEL}/lib/libtorch_cuda.so)
  # The CUDA headers in the nvidia wheels come first: they are the version torch was built with. With toolkit 13.0's
  # headers against torch 2.15 (CUDA 13.2) a ProcessGroupNCCL made here corrupts the heap.
  find_path(TORCH_WHEEL_CUDA_INCLUDE cuda_runtime_api.h
    PATHS ${TORCH_WHEEL}/../nvidia/cu13/include ${TORCH_WHEEL}/../nvidia/cuda_runtime/include NO_DEFAULT_PATH)
  find_path(TORCH_WHEEL_CUDA_INCLUDE cuda_runtime_api.h HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES include)
  find_path(TORCH_WHEEL_NCCL_INCLUDE nccl.h PATHS ${TORCH_WHEEL}/../nvidia/nccl/include NO_DEFAULT_PATH)
  if(TORCH_WHEEL_CUDA_INCLUDE)
    _torch_lib(torch_cuda)
    _torch_lib(c10_cuda)
    add_library(torch_wheel::cuda INTERFACE IMPORTED)
    target_include_directories(torch_wheel::cuda SYSTEM INTERFACE ${TORCH_WHEEL_CUDA_INCLUDE})
    if(TORCH_WHEEL_NCCL_INCLUDE)
      target_include_directories(torch_wheel::cuda SYSTEM INTERFACE ${TORCH_WHEEL_NCCL_INCLUDE})
      target_compile_definitions(torch_wheel::cuda INTERFACE USE_C10D_NCCL)
    endif()
    # inline code in the headers calls the CUDA runtime; the wheel's own copy, so that one libcudart is loaded
    file(GLOB _cudart ${TORCH_WHEEL}/../nvidia/cu1*/lib/libcudart.so.*)
    if(NOT _cudart)
      find_library(_cudart cudart HINTS ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES lib64)
    endif()
    # libtorch_cuda registers its kernels from static constructors: nothing refers to it by symbol, so keep it
    target_link_options(torch_wheel::cuda INTERFACE LINKER:--no-as-needed)
    target_link_libraries(torch_wheel::cuda INTERFACE torch_wheel::cpu torch_wheel::torch_cuda torch_wheel::c10_cuda ${_cudart})
  endif()
endif()
