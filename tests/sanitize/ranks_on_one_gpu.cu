// Ranks that share one GPU make group casts and reduces: rows read and written, own rows within and
// apart, random tables with gaps, and a rank that comes when the other has given up, or nearly.
// Built and run by ranks_on_one_gpu.py; the exit status is the number of cases that went wrong.

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "xla_ffi/comm/kernels.h"
#include "xla_ffi/comm/pool.h"

namespace magi_jax::comm {
namespace {

using Words = std::vector<uint32_t>;

constexpr uint32_t kPoison = 0xffffffffu, kOthers = 0x11111111u;

void Require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::printf("CUDA: %s\n", cudaGetErrorString(error));
  std::exit(255);
}

void Require(const std::string& error) {
  if (error.empty()) return;
  std::printf("%s\n", error.c_str());
  std::exit(255);
}

struct Random {
  std::mt19937 bits;
  int operator()(int first, int last) {
    return first + static_cast<int>(bits() % static_cast<unsigned>(last - first + 1));
  }
};

// A transfer, and the words of a row of each of its arrays.
struct Transfer {
  int cp_size, src_rows, dst_rows;
  std::vector<int> row_words;
  std::vector<std::vector<Piece>> send, recv;
  int num_pieces = 0, own_rows = 0;

  // `is_sum`: no row goes to a rank twice, so that it comes back from each once.
  Transfer(Random& random, int cp_size, std::vector<int> row_words, bool keeps_rows, bool is_sum)
      : cp_size(cp_size), row_words(std::move(row_words)), send(cp_size), recv(cp_size) {
    const int most = this->row_words[0] > 1000 ? 200 : 3000;
    src_rows = random(1, most);
    dst_rows = random(1, most);
    std::vector<int> slots(cp_size * cp_size, 0);
    for (int rank = 0; rank < cp_size; ++rank) Fill(random, rank, keeps_rows, is_sum, slots);
    for (auto* side : {&send, &recv}) {
      for (auto& pieces : *side) {
        num_pieces = std::max(num_pieces, static_cast<int>(pieces.size()));
      }
    }
    num_pieces += random(0, 5);
    const Piece padding = {cp_size, src_rows, dst_rows, 0, 0};
    for (auto* side : {&send, &recv}) {
      for (auto& pieces : *side) pieces.resize(num_pieces, padding);
    }
  }

 private:
  // What one rank receives, with a gap here and there.
  void Fill(Random& random, int rank, bool keeps_rows, bool is_sum, std::vector<int>& slots) {
    const int longest = random(1, 200), gaps = random(0, 6);
    int kept = 0;
    for (int row = 0; row < dst_rows;) {
      if (random(0, 9) < gaps) row += random(1, longest);
      int peer = random(0, cp_size - 1);
      if (peer == rank && !keeps_rows) peer = (peer + 1) % cp_size;
      int& slot = slots[peer * cp_size + rank];
      const int first = is_sum ? slot : 0;
      const int rows = std::min({random(1, longest), dst_rows - row, src_rows - first});
      if (rows <= 0) break;
      const int src_row = is_sum ? first : random(0, src_rows - rows);
      const Piece piece = {peer, src_row, row, rows, slot};
      slot += rows;
      row += rows;
      kept += peer == rank ? rows : 0;
      recv[rank].push_back(piece);
      send[peer].push_back(piece);
      send[peer].back().peer = rank;
    }
    own_rows = std::max(own_rows, kept);
  }
};

template <class T>
T* Upload(const std::vector<T>& values) {
  T* memory = nullptr;
  Require(cudaMalloc(&memory, std::max<size_t>(values.size() * sizeof(T), 256)));
  Require(cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

// Small integers as floats, whose sums are exact.
uint32_t Bits(int number) {
  const auto value = static_cast<float>(number);
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// How rows move.
struct Way {
  bool pushes, apart, sums = false, adds = false;  // to what the results hold
};

struct Rank {
  std::unique_ptr<Member> member;
  cudaStream_t main = nullptr;
  int32_t* caller = nullptr;
  Piece *send = nullptr, *recv = nullptr;
  int32_t* map = nullptr;
  std::vector<Words> rows;    // of the operands
  std::vector<Words> before;  // of the results
  std::vector<uint32_t*> operands, results;

  void Load(Random& random, const Transfer& transfer, int rank, bool sums = false) {
    Free();
    send = Upload(transfer.send[rank]);
    recv = Upload(transfer.recv[rank]);
    const size_t operand_rows = sums ? transfer.dst_rows : transfer.src_rows;
    const size_t result_rows = sums ? transfer.src_rows : transfer.dst_rows;
    map = Upload(std::vector<int32_t>((sums ? transfer.cp_size + 1 : 2) * result_rows));
    for (const int words : transfer.row_words) {
      rows.emplace_back(operand_rows * words);
      for (uint32_t& word : rows.back()) word = sums ? Bits(random(-99, 99)) : random.bits();
      operands.push_back(Upload(rows.back()));
      before.emplace_back(result_rows * words, 0xdeadbeefu);
      for (uint32_t& word : before.back()) word = sums ? Bits(random(-99, 99)) : word;
      results.push_back(Upload(before.back()));
    }
  }

  void Free() {
    for (void* memory :
         {static_cast<void*>(send), static_cast<void*>(recv), static_cast<void*>(map)}) {
      cudaFree(memory);
    }
    for (auto* arrays : {&operands, &results}) {
      for (uint32_t* array : *arrays) cudaFree(array);
      arrays->clear();
    }
    rows.clear();
    before.clear();
  }

  // As the handler does it, by a number of blocks of the call's own. What is enqueued on `main`
  // next waits for the call, or runs beside it behind `copied_bytes`.
  void Call(const Transfer& transfer, Way way, int32_t num_blocks, int64_t copied_bytes = -1) {
    const Kind kind = way.sums ? Kind::kReduceSum : Kind::kCast;
    const int32_t result_rows = way.sums ? transfer.src_rows : transfer.dst_rows;
    Meeting meeting = {};
    Move move = {};
    move.num_blocks = num_blocks;
    meeting.caller = caller;
    meeting.extents = {transfer.cp_size, transfer.src_rows, transfer.dst_rows};
    meeting.send = {send, transfer.num_pieces};
    meeting.recv = {recv, transfer.num_pieces};
    meeting.pushes = way.pushes;
    meeting.num_leaves = move.num_leaves = static_cast<int32_t>(operands.size());
    Require(member->Begin(main, kind, 77 + way.pushes, num_blocks, &meeting));
    std::vector<const void*> buffers = {map};
    for (size_t i = 0; i < operands.size(); ++i) {
      const auto words = static_cast<uint32_t>(transfer.row_words[i]);
      move.leaves[i] = {
          operands[i],  results[i], words, words * 4, int64_t{result_rows} * words * 4,
          Element::kF32};
      meeting.addresses[i] = reinterpret_cast<uint64_t>(way.pushes ? results[i] : operands[i]);
      buffers.push_back(results[i]);
    }
    auto* const seen = reinterpret_cast<uint32_t*>(map + int64_t{transfer.cp_size} * result_rows);
    move.map = {map, way.sums ? seen : nullptr, result_rows};
    move.own_rows = way.apart ? transfer.own_rows : 0;
    move.stream = member->streams_rows();
    move.adds = way.adds;
    Require(way.sums     ? comm::ReduceSum(meeting, move, member->side())
            : way.pushes ? comm::Push(meeting, move, member->side())
                         : comm::Cast(meeting, move, member->side()));
    if (move.own_rows > 0) {
      Require(member->BeginApart(OwnRowBlocks(move)));
      Require(CopyOwnRows(meeting, move, member->apart()));
      Require(member->EndApart());
    }
    Require(member->End(buffers));
    if (copied_bytes < 0) {
      Require(member->Finish(main, buffers));
    } else {
      Require(AwaitStart(meeting, num_blocks, member->apart_blocks(), copied_bytes, main));
    }
  }

  Words Result(size_t i, size_t words) const {
    Words found(words);
    Require(cudaMemcpy(found.data(), results[i], words * 4, cudaMemcpyDeviceToHost));
    return found;
  }
};

std::vector<Rank> Open(int cp_size, double timeout_s) {
  std::vector<Rank> ranks(cp_size);
  const int32_t pool = Pools::Get().NextNumber();
  for (int rank = 0; rank < cp_size; ++rank) {
    std::string error;
    ranks[rank].member = Member::Create(
        {pool, 0, rank, cp_size, 0, static_cast<int64_t>(timeout_s * 1e9), 8, nullptr}, &error);
    Require(error);
    Require(cudaStreamCreateWithFlags(&ranks[rank].main, cudaStreamNonBlocking));
    ranks[rank].caller = Upload(std::vector<int32_t>{rank});
  }
  for (int rank = 0; rank < cp_size; ++rank) {
    for (int peer = 0; peer < cp_size; ++peer) {
      if (peer == rank) continue;
      Require(ranks[rank].member->ConnectLocal(peer, 0, ranks[peer].member->memory()));
    }
    Require(ranks[rank].member->FinishConnecting());
  }
  return ranks;
}

// What a rank's rows of an array should be: those sent to it, or sums of those that come back.
Words Expected(const std::vector<Rank>& ranks, const Transfer& transfer, size_t rank, size_t i) {
  const size_t words = transfer.row_words[i];
  Words expected(transfer.dst_rows * words, 0);
  for (const Piece& piece : transfer.recv[rank]) {
    if (piece.n_rows == 0) continue;
    std::memcpy(&expected[piece.dst_row * words], &ranks[piece.peer].rows[i][piece.src_row * words],
                static_cast<size_t>(piece.n_rows) * words * 4);
  }
  return expected;
}

// Of sums that are added to what was there, after the same call was made `times`.
Words ExpectedSums(const std::vector<Rank>& ranks, const Transfer& transfer, size_t rank, size_t i,
                   bool adds, int times) {
  const size_t words = transfer.row_words[i];
  std::vector<float> sums(transfer.src_rows * words, 0.0f);
  if (adds) std::memcpy(sums.data(), ranks[rank].before[i].data(), sums.size() * sizeof(float));
  for (const Piece& piece : transfer.send[rank]) {
    const uint32_t* const parts =
        piece.n_rows == 0 ? nullptr : &ranks[piece.peer].rows[i][piece.dst_row * words];
    for (size_t k = 0; k < piece.n_rows * words; ++k) {
      float part;
      std::memcpy(&part, parts + k, sizeof(part));
      sums[piece.src_row * words + k] += adds ? static_cast<float>(times) * part : part;
    }
  }
  Words expected(sums.size());
  std::memcpy(expected.data(), sums.data(), sums.size() * sizeof(float));
  return expected;
}

int CountWrong(const std::vector<Rank>& ranks, const Transfer& transfer, Way way = {},
               int times = 1) {
  int wrong = 0;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (size_t i = 0; i < transfer.row_words.size(); ++i) {
      const Words expected = way.sums ? ExpectedSums(ranks, transfer, rank, i, way.adds, times)
                                      : Expected(ranks, transfer, rank, i);
      wrong += ranks[rank].Result(i, expected.size()) != expected;
    }
  }
  return wrong;
}

bool AllAre(const Words& words, uint32_t value) {
  return std::all_of(words.begin(), words.end(), [value](uint32_t word) { return word == value; });
}

// Of a call. All blocks of all ranks have to be on the one GPU together, one for each SM; many
// single ones could leave no two neighbouring SMs to those of even calls, which come in pairs.
int32_t NumBlocks(Random& random, int cp_size, Way way) {
  const int least = way.pushes ? 12 : 1;
  return cp_size > 3 ? (least + 1) / 2 * 2 + 2 * random(0, 2) : least + random(0, 4);
}

// Random transfers, each made twice.
int RandomTransfers(Random& random, int cp_size, Way way, int count) {
  const std::vector<std::vector<int>> kinds = {{4},  {8, 4},      {64},   {512},
                                               {36}, {1024, 512}, {5000}, {12, 4, 512, 8}};
  std::vector<Rank> ranks = Open(cp_size, 10.0);
  int wrong = 0;
  for (int n = 0; n < count; ++n) {
    const Transfer transfer(random, cp_size, kinds[n % kinds.size()], n % 3 != 0, way.sums);
    for (int rank = 0; rank < cp_size; ++rank) ranks[rank].Load(random, transfer, rank, way.sums);
    constexpr int kTimes = 2;
    for (int again = 0; again < kTimes; ++again) {
      for (Rank& rank : ranks) {
        rank.Call(transfer, way, NumBlocks(random, cp_size, way));
      }
    }
    Require(cudaDeviceSynchronize());
    for (const Rank& rank : ranks) Require(rank.member->Failure());
    wrong += CountWrong(ranks, transfer, way, kTimes);
  }
  const char* const how = way.adds     ? "added to others"
                          : way.sums   ? "added"
                          : way.pushes ? "written"
                                       : "read";
  std::printf("%d ranks, rows %s, own ones %s: %d transfers, %d arrays wrong\n", cp_size, how,
              way.apart ? "apart" : "within", count, wrong);
  for (Rank& rank : ranks) rank.Free();
  return wrong;
}

// Two calls, the second behind copies that take a second, and rank 1 does not come: what rank 0 has
// on its main stream ends before it gives up. Kernels must run side by side, which tools may not
// let.
int DoesNotWaitBehindALateOne(Random& random) {
  std::vector<Rank> ranks = Open(2, 0.3);
  const Transfer transfer(random, 2, {512}, true, false);
  for (int rank = 0; rank < 2; ++rank) ranks[rank].Load(random, transfer, rank);
  for (const int64_t bytes : {0ll, 1000000000ll}) ranks[0].Call(transfer, {false, false}, 8, bytes);
  Require(cudaStreamSynchronize(ranks[0].main));
  const bool waited = !ranks[0].member->Failure().empty();
  Require(cudaDeviceSynchronize());
  const bool failed = !ranks[0].member->Failure().empty();
  std::printf("behind a late call: waited %d, failed at last %d\n", waited, failed);
  for (Rank& rank : ranks) rank.Free();
  return waited || !failed;
}

// Rank 1 comes when rank 0 has given up and its memory is somebody else's.
int ComesTooLate(Random& random, bool pushes) {
  std::vector<Rank> ranks = Open(2, 0.3);
  const Transfer transfer(random, 2, {512}, true, false);
  for (int rank = 0; rank < 2; ++rank) ranks[rank].Load(random, transfer, rank);
  const size_t words = size_t{512} * transfer.dst_rows;
  ranks[0].Call(transfer, {pushes, false}, 16);
  Require(cudaDeviceSynchronize());
  const bool poisoned = AllAre(ranks[0].Result(0, words), kPoison);
  Require(cudaMemset(ranks[0].results[0], 0x11, words * 4));
  ranks[1].Call(transfer, {pushes, false}, 16);
  Require(cudaDeviceSynchronize());
  const bool untouched = AllAre(ranks[0].Result(0, words), kOthers);
  const bool both_poisoned = poisoned && AllAre(ranks[1].Result(0, words), kPoison);
  const bool named = ranks[0].member->Failure().find("rank 1 did not come") != std::string::npos &&
                     ranks[1].member->Failure().find("rank 0 had given up") != std::string::npos;
  std::printf("rows %s, one rank too late: results poisoned %d, memory untouched %d, named %d\n",
              pushes ? "written" : "read", both_poisoned, untouched, named);
  for (Rank& rank : ranks) rank.Free();
  return !(both_poisoned && untouched && named);
}

// Rank 1 comes about when rank 0 gives up: they meet, or both fail and nobody writes afterwards.
int ComesAtTheLimit(Random& random, int count) {
  int met = 0, wrong = 0;
  for (int n = 0; n < count; ++n) {
    std::vector<Rank> ranks = Open(2, 0.004);
    const Transfer transfer(random, 2, {512}, true, false);
    for (int rank = 0; rank < 2; ++rank) ranks[rank].Load(random, transfer, rank);
    ranks[0].Call(transfer, {true, false}, 16);
    const auto start = std::chrono::steady_clock::now();
    const auto wait = std::chrono::microseconds(3700 + 600 * n / count);
    while (std::chrono::steady_clock::now() - start < wait) {
    }
    ranks[1].Call(transfer, {true, false}, 16);
    Require(cudaStreamSynchronize(ranks[0].main));
    const size_t words = size_t{512} * transfer.dst_rows;
    const Words at_once = ranks[0].Result(0, words);
    Require(cudaDeviceSynchronize());
    if (ranks[0].member->Failure().empty() && ranks[1].member->Failure().empty()) {
      ++met;
      wrong += CountWrong(ranks, transfer);
    } else if (!ranks[0].member->Failure().empty()) {
      wrong += !AllAre(at_once, kPoison) || ranks[0].Result(0, words) != at_once;
    }
    for (Rank& rank : ranks) rank.Free();
  }
  std::printf("at the limit: %d calls, %d met, %d wrong\n", count, met, wrong);
  return wrong;
}

}  // namespace
}  // namespace magi_jax::comm

int main(int argc, char** argv) {
  using namespace magi_jax::comm;
  const int count = argc > 1 ? std::atoi(argv[1]) : 40;
  const bool side_by_side = argc <= 2 || std::atoi(argv[2]) != 0;
  const unsigned seed = argc > 3 ? std::atoi(argv[3]) : std::random_device{}();
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // a run that is cut shows how far it came
  std::printf("seed %u\n", seed);
  Random random{std::mt19937(seed)};
  int wrong = 0;
  for (const int cp_size : {2, 3, 8}) {
    for (const Way way : {Way{false, false}, Way{false, true}, Way{true, false}, Way{true, true},
                          Way{false, false, true}, Way{false, false, true, true}}) {
      wrong += RandomTransfers(random, cp_size, way, count);
    }
  }
  if (side_by_side) wrong += DoesNotWaitBehindALateOne(random);
  for (const bool pushes : {false, true}) wrong += ComesTooLate(random, pushes);
  wrong += ComesAtTheLimit(random, count);
  return std::min(wrong, 254);
}
