// Fuzzes the check of slice tables, and the CPU kernels behind it: a table that the check takes
// must not lead a kernel out of its buffers. Every buffer is of the exact size, so that the address
// sanitizer sees a read past any of them.
//
// With clang this is a libFuzzer target (-fsanitize=fuzzer). Without, define
// MAGI_JAX_RANDOM_DRIVER: its own main() then feeds it the given files and random changes of them.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "xla_ffi/common/params.h"
#include "xla_ffi/common/table_check.h"
#include "xla_ffi/kernels/cpu/kernels.h"

namespace magi_jax {
namespace {

constexpr int32_t kHeadDim = 3, kValueHeadDim = 2, kHeads = 2, kKvHeads = 1;
constexpr int32_t kMaxLength = 300, kMaxEntries = 64;

// Hands out integers of the input; zeros when it is used up.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  int32_t Next() {
    int32_t value = 0;
    if (size_ >= sizeof(value)) {
      std::memcpy(&value, data_, sizeof(value));
      data_ += sizeof(value);
      size_ -= sizeof(value);
    }
    return value;
  }
  // A number in [low, high], whatever the input is.
  int32_t Between(int32_t low, int32_t high) {
    const int64_t width = int64_t{high} - low + 1;
    return static_cast<int32_t>(low + (int64_t{Next()} % width + width) % width);
  }
  // Heap memory of the exact size.
  template <typename T>
  std::unique_ptr<T[]> Array(int32_t count) {
    static_assert(sizeof(T) % sizeof(int32_t) == 0);
    std::unique_ptr<T[]> array(new T[count]);
    auto* out = reinterpret_cast<char*>(array.get());
    for (size_t i = 0; i < sizeof(T) * count; i += sizeof(int32_t)) {
      const int32_t value = Next();
      std::memcpy(out + i, &value, sizeof(value));
    }
    return array;
  }

 private:
  const uint8_t* data_;
  size_t size_;
};

struct Walk {
  Walk(Reader& reader, int32_t length, int32_t tile_size)
      : num_tiles(length == 0 ? 1 : (length + tile_size - 1) / tile_size),
        num_runs(reader.Between(0, kMaxEntries)),
        num_ids(reader.Between(0, kMaxEntries)),
        ptr(reader.Array<int32_t>(num_tiles + 1)),
        runs(reader.Array<Run>(num_runs)),
        ids(reader.Array<int32_t>(num_ids)),
        order(reader.Array<int32_t>(num_tiles)) {}

  TileRuns View() const {
    TileRuns view = {};
    view.ptr = ptr.get();
    view.runs = runs.get();
    view.ids = ids.get();
    view.order = order.get();
    view.num_tiles = num_tiles;
    view.num_runs = num_runs;
    view.num_ids = num_ids;
    return view;
  }

  int32_t num_tiles, num_runs, num_ids;
  std::unique_ptr<int32_t[]> ptr;
  std::unique_ptr<Run[]> runs;
  std::unique_ptr<int32_t[]> ids, order;
};

std::unique_ptr<float[]> Rows(int64_t length, int64_t width) {
  std::unique_ptr<float[]> rows(new float[length * width]);
  for (int64_t i = 0; i < length * width; ++i) rows[i] = 0.25f * static_cast<float>(i % 7 - 3);
  return rows;
}

float* Scratch(int64_t floats) {
  const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + 63) / 64 * 64;
  return static_cast<float*>(std::aligned_alloc(64, bytes == 0 ? 64 : bytes));
}

void RunKernels(const Problem& problem, const Slice* slices, const TileRuns& by_query,
                const TileRuns& by_key) {
  const cpu::Kernels& kernels = cpu::SelectKernels();
  const auto q = Rows(problem.q_len, kHeads * kHeadDim);
  const auto k = Rows(problem.k_len, kKvHeads * kHeadDim);
  const auto v = Rows(problem.k_len, kKvHeads * kValueHeadDim);
  const auto out = Rows(problem.q_len, kHeads * kValueHeadDim);
  const auto lse = Rows(problem.q_len, kHeads), delta = Rows(problem.q_len, kHeads);
  const auto dq = Rows(problem.q_len, kHeads * kHeadDim);
  const auto dk = Rows(problem.k_len, kKvHeads * kHeadDim);
  const auto dv = Rows(problem.k_len, kKvHeads * kValueHeadDim);

  ForwardParams forward = {};
  forward.problem = problem;
  forward.q = q.get(), forward.k = k.get(), forward.v = v.get();
  forward.slices = slices, forward.by_query = by_query;
  forward.out = out.get(), forward.lse = lse.get();
  float* scratch = Scratch(kernels.forward_scratch(problem));
  for (int32_t i = 0; i < by_query.num_tiles; ++i) {
    for (int32_t head = 0; head < kHeads; ++head) {
      kernels.forward(forward, by_query.order[i], head, scratch);
    }
  }
  std::free(scratch);

  BackwardParams backward = {};
  backward.problem = problem;
  backward.dout = out.get(), backward.q = q.get(), backward.k = k.get(), backward.v = v.get();
  backward.lse = lse.get(), backward.delta = delta.get();
  backward.slices = slices, backward.by_query = by_query, backward.by_key = by_key;
  backward.dq = dq.get(), backward.dk = dk.get(), backward.dv = dv.get();
  scratch = Scratch(kernels.key_walk_scratch(problem));
  for (int32_t i = 0; i < by_key.num_tiles; ++i) {
    kernels.key_walk(backward, by_key.order[i], 0, /*add_dq=*/i % 2 == 0, scratch);
  }
  std::free(scratch);
  scratch = Scratch(kernels.query_walk_scratch(problem));
  for (int32_t i = 0; i < by_query.num_tiles; ++i) {
    kernels.query_walk(backward, by_query.order[i], 0, scratch);
  }
  std::free(scratch);
}

// Returns whether the table was taken.
bool RunInput(const uint8_t* data, size_t size) {
  Reader reader(data, size);
  Problem problem = {};
  problem.q_len = reader.Between(0, kMaxLength);
  problem.k_len = reader.Between(0, kMaxLength);
  problem.num_heads = kHeads, problem.num_kv_heads = kKvHeads;
  problem.head_dim = kHeadDim, problem.v_head_dim = kValueHeadDim;
  const int32_t tile_sizes[] = {1, 16, 50, 128, 1024};
  problem.tile_size = tile_sizes[reader.Between(0, 4)];
  problem.scale = 0.5f;
  problem.dtype = DType::kF32;
  problem.num_slices = reader.Between(0, kMaxEntries);
  const auto slices = reader.Array<Slice>(problem.num_slices);
  const Walk by_query(reader, problem.q_len, problem.tile_size);
  const Walk by_key(reader, problem.k_len, problem.tile_size);
  const bool refused =
      CheckSliceValues(slices.get(), problem).failure() ||
      CheckTileRunValues("by_query", by_query.View(), problem.num_slices, problem.k_len)
          .failure() ||
      CheckTileRunValues("by_key", by_key.View(), problem.num_slices, problem.q_len).failure();
  if (!refused) RunKernels(problem, slices.get(), by_query.View(), by_key.View());
  return !refused;
}

}  // namespace
}  // namespace magi_jax

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  magi_jax::RunInput(data, size);
  return 0;
}

#ifdef MAGI_JAX_RANDOM_DRIVER
// table_fuzzer ROUNDS SEED FILE...: each file as it is, and ROUNDS random changes of one of them.
int main(int argc, char** argv) {
  if (argc < 4) return 2;
  std::vector<std::vector<uint8_t>> files;
  long taken = 0, seeds_taken = 0;
  for (int i = 3; i < argc; ++i) {
    std::FILE* file = std::fopen(argv[i], "rb");
    if (file == nullptr) return 2;
    std::vector<uint8_t> bytes(1 << 16);
    bytes.resize(std::fread(bytes.data(), 1, bytes.size(), file));
    std::fclose(file);
    seeds_taken += magi_jax::RunInput(bytes.data(), bytes.size());
    files.push_back(std::move(bytes));
  }
  const int32_t hostile[] = {INT32_MIN, -129, -1, 0, 1, 2, 64, 127, 128, 300, 1 << 30, INT32_MAX};
  std::srand(static_cast<unsigned>(std::atol(argv[2])));
  const long rounds = std::atol(argv[1]);
  for (long round = 0; round < rounds; ++round) {
    std::vector<uint8_t> bytes = files[std::rand() % files.size()];
    for (int change = std::rand() % 3; change >= 0; --change) {
      const size_t at = std::rand() % (bytes.size() / 4) * 4;
      int32_t value;
      std::memcpy(&value, &bytes[at], sizeof(value));
      value = std::rand() % 2 ? hostile[std::rand() % 12]
                              : static_cast<int32_t>(int64_t{value} + std::rand() % 5 - 2);
      std::memcpy(&bytes[at], &value, sizeof(value));
    }
    taken += magi_jax::RunInput(bytes.data(), bytes.size());
  }
  std::printf("%zu tables, %ld taken; %ld changed tables, %ld taken\n", files.size(), seeds_taken,
              rounds, taken);
  return seeds_taken == static_cast<long>(files.size()) ? 0 : 1;
}
#endif
