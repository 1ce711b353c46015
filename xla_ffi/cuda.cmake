# The CUDA part of the extension: finds a compiler, lists the kernels, and links the runtime statically, so
# that the library loads on machines without a driver. Included by CMakeLists.txt, adds to the target _ffi.
#
# nvcc is called through custom commands rather than CMake's CUDA language, whose compiler test does not
# pass with the layout of the nvidia-cuda-nvcc wheel; one object file holds one kernel for all architectures.

set(MAGI_JAX_CUDA_KERNELS "all" CACHE STRING
    "Which kernels to compile: all, or ci (some, for two architectures; of sm90 each pair of head dims once)")
set_property(CACHE MAGI_JAX_CUDA_KERNELS PROPERTY STRINGS all ci)
if(NOT MAGI_JAX_CUDA_KERNELS MATCHES "^(all|ci)$")
  message(FATAL_ERROR "MAGI_JAX_CUDA_KERNELS is '${MAGI_JAX_CUDA_KERNELS}'; it must be all or ci")
endif()
if(MAGI_JAX_CUDA_KERNELS STREQUAL "ci")
  set(default_architectures 80 90a)
else()
  set(default_architectures 80 90a 100a 120a)
endif()
set(MAGI_JAX_CUDA_ARCHITECTURES "${default_architectures}" CACHE STRING
    "Architectures to compile for; those that nvcc does not know are left out. PTX of 80 serves the others")

# --- The compiler and the runtime: from the toolkit, or from the wheels in Python's site-packages.

execute_process(
  COMMAND "${Python_EXECUTABLE}" -c
          "import sysconfig; print(sysconfig.get_path('purelib') + '/nvidia')"
  OUTPUT_STRIP_TRAILING_WHITESPACE OUTPUT_VARIABLE nvidia_wheels)
file(GLOB wheel_roots "${nvidia_wheels}/cu[0-9]*" "${nvidia_wheels}/cuda_nvcc")
list(TRANSFORM wheel_roots APPEND "/bin" OUTPUT_VARIABLE wheel_bins)
find_program(MAGI_JAX_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin
             PATHS /usr/local/cuda/bin ${wheel_bins})
if(NOT MAGI_JAX_NVCC)
  if(MAGI_JAX_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MAGI_JAX_CUDA is ON, but there is no nvcc on the PATH, in CUDA_HOME, in "
                        "/usr/local/cuda or in ${nvidia_wheels} (pip install nvidia-cuda-nvcc)")
  endif()
  message(STATUS "CUDA kernels: not built, no nvcc was found")
  return()
endif()

file(REAL_PATH "${MAGI_JAX_NVCC}" nvcc_path)
cmake_path(GET nvcc_path PARENT_PATH nvcc_bin)
cmake_path(GET nvcc_bin PARENT_PATH cuda_root)
set(cuda_places "${cuda_root}" /usr/local/cuda ${wheel_roots} "${nvidia_wheels}/cuda_runtime")
find_path(MAGI_JAX_CUDA_INCLUDE cuda_runtime_api.h HINTS ${cuda_places} PATH_SUFFIXES include)
find_library(MAGI_JAX_CUDART cudart_static HINTS ${cuda_places}
             PATH_SUFFIXES lib64 lib lib/x64 targets/x86_64-linux/lib targets/sbsa-linux/lib)
if(NOT MAGI_JAX_CUDA_INCLUDE OR NOT MAGI_JAX_CUDART)
  if(MAGI_JAX_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MAGI_JAX_CUDA is ON and nvcc is ${nvcc_path}, but cuda_runtime_api.h "
                        "(${MAGI_JAX_CUDA_INCLUDE}) or libcudart_static (${MAGI_JAX_CUDART}) is missing "
                        "(pip install nvidia-cuda-runtime)")
  endif()
  message(STATUS "CUDA kernels: not built, nvcc is ${nvcc_path} but its runtime was not found")
  return()
endif()

execute_process(COMMAND "${nvcc_path}" --list-gpu-code OUTPUT_VARIABLE known_codes
                OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
string(REPLACE "\n" ";" known_codes "${known_codes}")
set(architectures "")
foreach(architecture IN LISTS MAGI_JAX_CUDA_ARCHITECTURES)
  string(REGEX REPLACE "a$" "" number "${architecture}")
  if("sm_${number}" IN_LIST known_codes)
    list(APPEND architectures "${architecture}")
  else()
    message(STATUS "CUDA kernels: this nvcc does not know sm_${architecture}, it is left out")
  endif()
endforeach()

# --- How one object is compiled.

set(MAGI_JAX_CUDA_FLAGS "" CACHE STRING
    "More flags of nvcc. -DMAGI_JAX_EVERY_LANE_ARRIVES makes Hopper kernels that racecheck can follow")

# Where all kernels are built, one that is missing is an error of the linker.
set(some_kernels "")
if(MAGI_JAX_CUDA_KERNELS STREQUAL "ci")
  set(some_kernels "-DMAGI_JAX_SOME_KERNELS")
endif()

set(cuda_dir "${CMAKE_CURRENT_BINARY_DIR}/cuda")
file(MAKE_DIRECTORY "${cuda_dir}")

# Compiles `source` to an object file of _ffi, for the architectures that follow. Registers, shared memory
# and spills of each kernel are kept in cuda/<name>.ptxas.
function(add_cuda_object name source)
  set(targets "")
  foreach(architecture IN LISTS ARGN)
    list(APPEND targets -gencode "arch=compute_${architecture},code=sm_${architecture}")
  endforeach()
  if("80" IN_LIST ARGN)
    list(APPEND targets -gencode "arch=compute_80,code=compute_80")
  endif()
  set(object "${cuda_dir}/${name}.o")
  add_custom_command(
    OUTPUT "${object}"
    COMMAND sh -c "\"$@\" 2>'${cuda_dir}/${name}.ptxas' || { cat '${cuda_dir}/${name}.ptxas' >&2; exit 1; }"
            nvcc "${nvcc_path}" -std=c++20 -O3 -lineinfo -DNDEBUG -ccbin "${CMAKE_CXX_COMPILER}"
            -Xcompiler=-fPIC,-fvisibility=hidden -Xptxas -v ${targets} ${some_kernels} ${MAGI_JAX_CUDA_FLAGS}
            "-I${CMAKE_CURRENT_SOURCE_DIR}" "-I${cuda_dir}"
            -MD -MF "${object}.d" -MT "${object}" -c "${source}" -o "${object}"
    DEPENDS "${source}"
    DEPFILE "${object}.d"
    COMMENT "nvcc ${name}"
    VERBATIM)
  target_sources(_ffi PRIVATE "${object}")
endfunction()

# --- sm80: every kernel for every dtype and pair of head dims.

set(instantiations "")
function(add_sm80 dtype type head_dim v_head_dim)
  set(TYPE "${type}")
  set(HEAD_DIM ${head_dim})
  set(V_HEAD_DIM ${v_head_dim})
  foreach(kernel forward:LaunchForward:ForwardParams query_grad:LaunchQueryGrad:BackwardParams
                 key_grad:LaunchKeyGrad:BackwardParams)
    string(REPLACE ":" ";" kernel "${kernel}")
    list(GET kernel 0 stem)
    list(GET kernel 1 LAUNCHER)
    list(GET kernel 2 PARAMS)
    set(KERNEL_FILE "${stem}_kernel.cuh")
    string(TOLOWER "sm80_${stem}_${head_dim}_${v_head_dim}_${dtype}" name)
    configure_file("${CMAKE_CURRENT_SOURCE_DIR}/xla_ffi/kernels/sm80/instantiate.cu.in"
                   "${cuda_dir}/${name}.cu" @ONLY)
    add_cuda_object(${name} "${cuda_dir}/${name}.cu" ${architectures})
  endforeach()
  string(APPEND instantiations "MAGI_JAX_SM80(DType::k${dtype}, ${type}, ${head_dim}, ${v_head_dim})\n")
  set(instantiations "${instantiations}" PARENT_SCOPE)
endfunction()

if(MAGI_JAX_CUDA_KERNELS STREQUAL "ci")
  add_sm80(BF16 __nv_bfloat16 128 128)
  add_sm80(F16 __half 64 64)
else()
  foreach(dims 64:64 96:96 128:128 192:128 256:256)
    string(REPLACE ":" ";" dims "${dims}")
    add_sm80(BF16 __nv_bfloat16 ${dims})
    add_sm80(F16 __half ${dims})
  endforeach()
endif()
file(CONFIGURE OUTPUT "${cuda_dir}/sm80_instantiations.inc" CONTENT "${instantiations}" @ONLY)
add_cuda_object(sm80_kernels "${CMAKE_CURRENT_SOURCE_DIR}/xla_ffi/kernels/sm80/kernels.cu" 80)

# --- sm90: what lies in its folder.

file(GLOB sm90_sources CONFIGURE_DEPENDS "${CMAKE_CURRENT_SOURCE_DIR}/xla_ffi/kernels/sm90/*.cu")
if(MAGI_JAX_CUDA_KERNELS STREQUAL "ci")
  list(FILTER sm90_sources EXCLUDE REGEX "hdim(64_f16|96_bf16|128_f16|192x128_bf16|256_f16)[.]cu$")
endif()
if(sm90_sources AND "90a" IN_LIST architectures)
  foreach(source IN LISTS sm90_sources)
    cmake_path(GET source STEM stem)
    add_cuda_object(sm90_${stem} "${source}" 90a)
  endforeach()
  target_compile_definitions(_ffi PRIVATE MAGI_JAX_WITH_SM90)
endif()

# --- Group collectives: small kernels, for every architecture.

foreach(stem cast own_rows push reduce_lse reduce_sum)
  add_cuda_object(comm_${stem} "${CMAKE_CURRENT_SOURCE_DIR}/xla_ffi/comm/${stem}.cu" ${architectures})
endforeach()

# --- Handlers and the runtime.

find_package(Threads REQUIRED)
target_sources(_ffi PRIVATE xla_ffi/handlers/ffa_cuda.cc xla_ffi/handlers/kernels_cuda.cc
               xla_ffi/handlers/group_cuda.cc xla_ffi/handlers/group_decode_cuda.cc
               xla_ffi/handlers/group_binding_cuda.cc
               xla_ffi/comm/pool.cc xla_ffi/comm/pool_calls.cc xla_ffi/comm/pool_failure.cc)
list(JOIN architectures " " shown)
target_compile_definitions(_ffi PRIVATE MAGI_JAX_WITH_CUDA "MAGI_JAX_CUDA_BUILT_FOR=\"${shown}\"")
target_include_directories(_ffi SYSTEM PRIVATE "${MAGI_JAX_CUDA_INCLUDE}")
target_link_libraries(_ffi PRIVATE "${MAGI_JAX_CUDART}" Threads::Threads ${CMAKE_DL_LIBS} rt)
message(STATUS "CUDA kernels: ${MAGI_JAX_CUDA_KERNELS}, for ${shown}, with ${nvcc_path}")
