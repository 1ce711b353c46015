# The extension module magi_jax._planner: the planner's search and tile walks, without XLA.

# Plans must not depend on whether a compiler fuses multiplications and additions.
pybind11_add_module(_planner NO_EXTRAS
  xla_ffi/solver/bind_documents.cc
  xla_ffi/solver/bind_stages.cc
  xla_ffi/solver/bind_tables.cc
  xla_ffi/solver/binding.cc
  xla_ffi/solver/bins.cc
  xla_ffi/solver/deal.cc
  xla_ffi/solver/documents.cc
  xla_ffi/solver/greedy.cc
  xla_ffi/solver/join.cc
  xla_ffi/solver/lay_out.cc
  xla_ffi/solver/node_stages.cc
  xla_ffi/solver/placement.cc
  xla_ffi/solver/refine.cc
  xla_ffi/solver/runs.cc
  xla_ffi/solver/stage_times.cc
  xla_ffi/solver/tile_runs.cc
  xla_ffi/solver/transfer.cc
  xla_ffi/solver/units.cc)
target_include_directories(_planner PRIVATE "${CMAKE_CURRENT_SOURCE_DIR}")
target_compile_options(_planner PRIVATE -O3 -ffp-contract=off -Wall -Wextra)

install(TARGETS _planner LIBRARY DESTINATION magi_jax)
