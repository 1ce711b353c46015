// Runs one attention problem through the C++ entry points of a device path, without XLA, so that
// compute-sanitizer sees nothing but our kernels and buffers of the exact size.
//
//   device_driver sm80|sm90|sm90_ordered PROBLEM RESULTS
//
// `device_sanitizers.py` writes problems, builds this program and compares the results with the
// oracle.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

#include "xla_ffi/common/params.h"
#include "xla_ffi/kernels/sm80/kernels.h"
#ifdef MAGI_JAX_WITH_SM90
#include "xla_ffi/kernels/sm90/backward.h"
#include "xla_ffi/kernels/sm90/forward.h"
#endif

namespace magi_jax {
namespace {

// What a problem file starts with; `device_sanitizers.py` writes the same.
struct Header {
  Problem problem;
  DType partial_dtype;           // of out, dk and dv
  int32_t accumulate;            // whether results are added to those of other calls
  int32_t row_max;               // forward: whether the largest logits are asked for
  int32_t backward;              // whether the backward pass runs too
  int32_t short_dq;              // dq in the dtype of q, by the kernel of short documents
  int32_t query_runs, key_runs;  // R of the two walks
  int32_t query_ids, key_ids;    // I, likewise
  int32_t query_tiles, key_tiles;
};

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "device_driver: %s\n", what.c_str());
  std::exit(1);
}

void Check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) Fail(std::string(what) + ": " + cudaGetErrorString(error));
}

// Device memory of exactly so many bytes, filled from a file or not at all.
class Memory {
 public:
  explicit Memory(size_t bytes) : bytes_(bytes) {
    if (bytes > 0) Check(cudaMalloc(&data_, bytes), "cudaMalloc");
  }
  Memory(std::istream* from, size_t bytes) : Memory(bytes) {
    std::vector<char> host(bytes);
    if (!from->read(host.data(), static_cast<std::streamsize>(bytes))) Fail("the file is short");
    if (bytes > 0)
      Check(cudaMemcpy(data_, host.data(), bytes, cudaMemcpyHostToDevice), "copy to the device");
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  ~Memory() { cudaFree(data_); }

  void WriteTo(std::ostream* to) const {
    std::vector<char> host(bytes_);
    if (bytes_ > 0)
      Check(cudaMemcpy(host.data(), data_, bytes_, cudaMemcpyDeviceToHost), "copy to the host");
    to->write(host.data(), static_cast<std::streamsize>(bytes_));
  }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  size_t bytes_;
  void* data_ = nullptr;
};

// The arrays of one walk.
struct Walk {
  Walk(std::istream* from, int32_t tiles, int32_t runs, int32_t ids)
      : ptr(from, 4 * (size_t{1} + tiles)),
        runs(from, sizeof(Run) * runs),
        ids(from, size_t{4} * ids),
        order(from, size_t{4} * tiles),
        table{this->ptr.as<int32_t>(),
              this->runs.as<Run>(),
              this->ids.as<int32_t>(),
              this->order.as<int32_t>(),
              tiles,
              runs,
              ids} {}
  Memory ptr, runs, ids, order;
  TileRuns table;
};

size_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

void RunForward(const std::string& path, const ForwardParams& params) {
  if (path == "sm80") {
    const std::string reason = sm80::Refuse(params.problem);
    if (!reason.empty()) Fail("refused: " + reason);
    return Check(sm80::Forward(params, nullptr), "sm80 forward");
  }
#ifdef MAGI_JAX_WITH_SM90
  const char* reason = sm90::RefuseForward(params);
  if (reason != nullptr) Fail(std::string("refused: ") + reason);
  const Memory scratch(sm90::ForwardScratchBytes(params.problem));
  Check(sm90::Forward(params, scratch.as<void>(), nullptr), "sm90 forward");
  Check(cudaDeviceSynchronize(), "sm90 forward");
#else
  Fail("this build has no path " + path);
#endif
}

void RunBackward(const std::string& path, BackwardParams params) {
  if (path == "sm80") return Check(sm80::Backward(params, nullptr), "sm80 backward");
#ifdef MAGI_JAX_WITH_SM90
  const char* reason = sm90::RefuseBackward(params);
  if (reason != nullptr) Fail(std::string("refused: ") + reason);
  params.fixed_order = path == "sm90_ordered";
  const Memory scratch(sm90::BackwardScratchBytes(
      params.problem, params.dkv_dtype, params.fixed_order, params.dq_rounded != nullptr));
  params.scratch = scratch.as<void>();
  Check(sm90::Backward(params, nullptr), "sm90 backward");
  Check(cudaDeviceSynchronize(), "sm90 backward");
  if (params.dq_rounded == nullptr || params.fixed_order) return;
  int32_t counters[sm90::kCounters];
  Check(cudaMemcpy(counters, params.scratch, sizeof(counters), cudaMemcpyDeviceToHost), "memcpy");
  if (counters[sm90::kDocumentItems] == 0) Fail("the kernel of short documents did not run");
#endif
}

void RunProblem(const std::string& path, std::istream* file, std::ostream* results) {
  Header header;
  if (!file->read(reinterpret_cast<char*>(&header), sizeof(header))) Fail("the file is short");
  const Problem& problem = header.problem;
  const size_t rows = static_cast<size_t>(problem.q_len) * problem.num_heads;
  const size_t key_rows = static_cast<size_t>(problem.k_len) * problem.num_kv_heads;
  const size_t element = SizeOf(problem.dtype), partial = SizeOf(header.partial_dtype);
  const size_t dim = problem.head_dim, v_dim = problem.v_head_dim;

  const Memory q(file, rows * dim * element), k(file, key_rows * dim * element);
  const Memory v(file, key_rows * v_dim * element), dout(file, rows * v_dim * element);
  const Memory row_lse(file, rows * 4), delta(file, rows * 4);
  const Memory slices(file, sizeof(Slice) * problem.num_slices);
  const Walk by_query(file, header.query_tiles, header.query_runs, header.query_ids);
  const Walk by_key(file, header.key_tiles, header.key_runs, header.key_ids);

  // Of the forward pass; not written before, but where it adds to them.
  const size_t out_bytes = rows * v_dim * partial;
  const bool adds = header.accumulate != 0;
  const Memory out(out_bytes), lse(rows * 4), row_max(header.row_max != 0 ? rows * 4 : 0);
  if (adds) {
    // An lse of -inf: nothing was seen before.
    Check(cudaMemset(out.as<void>(), 0, out_bytes), "memset");
    const std::vector<uint32_t> none(rows, 0xff800000u);
    Check(cudaMemcpy(lse.as<void>(), none.data(), rows * 4, cudaMemcpyHostToDevice), "memcpy");
  }
  ForwardParams forward = {};
  forward.problem = problem;
  forward.q = q.as<void>();
  forward.k = k.as<void>();
  forward.v = v.as<void>();
  forward.slices = slices.as<Slice>();
  forward.by_query = by_query.table;
  forward.out = out.as<void>();
  forward.lse = lse.as<float>();
  forward.row_max = row_max.as<float>();
  forward.out_dtype = header.partial_dtype;
  forward.accumulates = adds;
  RunForward(path, forward);
  Check(cudaDeviceSynchronize(), "forward");
  for (const Memory* result : {&out, &lse, &row_max}) result->WriteTo(results);
  if (header.backward == 0) return;

  const bool short_dq = header.short_dq != 0;
  const Memory dq(rows * dim * (short_dq ? element : 4)), dk(key_rows * dim * partial),
      dv(key_rows * v_dim * partial);
  BackwardParams backward = {};
  backward.problem = problem;
  backward.dout = dout.as<void>();
  backward.q = q.as<void>();
  backward.k = k.as<void>();
  backward.v = v.as<void>();
  backward.lse = row_lse.as<float>();
  backward.delta = delta.as<float>();
  backward.slices = slices.as<Slice>();
  backward.by_query = by_query.table;
  backward.by_key = by_key.table;
  backward.dq = short_dq ? nullptr : dq.as<float>();
  backward.dq_rounded = short_dq ? dq.as<void>() : nullptr;
  backward.accumulate = adds;
  if (adds) Check(cudaMemset(dq.as<void>(), 0, rows * dim * 4), "memset");
  backward.dk = dk.as<void>();
  backward.dv = dv.as<void>();
  backward.dkv_dtype = header.partial_dtype;
  RunBackward(path, backward);
  Check(cudaDeviceSynchronize(), "backward");
  for (const Memory* result : {&dq, &dk, &dv}) result->WriteTo(results);
}

}  // namespace
}  // namespace magi_jax

int main(int argc, char** argv) {
  if (argc != 4) magi_jax::Fail("usage: device_driver sm80|sm90|sm90_ordered PROBLEM RESULTS");
  std::ifstream file(argv[2], std::ios::binary);
  std::ofstream results(argv[3], std::ios::binary);
  if (!file || !results) magi_jax::Fail(std::string("cannot open ") + argv[2] + " or " + argv[3]);
  magi_jax::RunProblem(argv[1], &file, &results);
  return results ? 0 : 1;
}
