// A GPU in slow motion: stands in for hopper.cuh, so that kernels run on a CPU.
//
// Every thread of every program is a fiber. A fiber runs until it has to wait for others, so races
// do not show, but everything else does: who waits for whom, what is read before it arrived, and
// what is computed. Shared memory and copies under way hold NaN.

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#ifndef CLUSTER
#define CLUSTER 1
#endif

using std::max;
using std::min;

typedef unsigned short number_t;
typedef unsigned long long policy_t;

struct Gate;

struct Words {
  unsigned x, y, z, w;
};

namespace emulated {

struct Index {
  unsigned x;
};

struct Warp {
  int arrived = 0;
  unsigned round = 0;
  unsigned words[32][8];
};

struct Program {
  unsigned number;
  char* memory;
  Warp warps[32];
  int arrived[2] = {0, 0};
  unsigned round[2] = {0, 0};
  // of a cluster, in its first program
  int met = 0;
  unsigned meeting = 0;
};

struct Fiber {
  ucontext_t context;  // to begin with; later switches leave the signals alone
  jmp_buf place;
  bool begun = false;
  Program* program;
  Index thread;
  bool done = false;
};

struct Copy {
  char* to;
  const char* from;
  unsigned num_bytes;
  Gate* gate;
};

static std::vector<Fiber> fibers;
static std::vector<Copy> copies;
static Fiber* current;
static jmp_buf scheduler;
static unsigned num_threads, num_programs;
static unsigned long long progress;

inline void yield() {
  if (!_setjmp(current->place)) _longjmp(scheduler, 1);
}

// waits for as many threads
inline void meet(int& arrived, unsigned& round, int number) {
  const unsigned mine = round;
  if (++arrived == number) {
    arrived = 0;
    round++;
    progress++;
    return;
  }
  while (round == mine) yield();
}

inline Warp& find_warp() { return current->program->warps[current->thread.x / 32]; }

inline void meet_warp() {
  Warp& warp = find_warp();
  meet(warp.arrived, warp.round, 32);
}

}  // namespace emulated

#define threadIdx (emulated::current->thread)
#define blockIdx (emulated::Index{emulated::current->program->number})
#define gridDim (emulated::Index{emulated::num_programs})
#define blockDim (emulated::Index{emulated::num_threads})
#define SHARED_MEMORY(name) char* name = emulated::current->program->memory

inline float __uint_as_float(unsigned word) {
  float value;
  memcpy(&value, &word, 4);
  return value;
}
inline unsigned bits_of(float value) {
  unsigned word;
  memcpy(&word, &value, 4);
  return word;
}
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __expf(float value) { return std::exp(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
struct float2 {
  float x, y;
};

inline float widen(float value) { return value; }
#if IS_BF16
inline float widen(number_t value) { return __uint_as_float(static_cast<unsigned>(value) << 16); }
inline number_t narrow(float value) {
  const unsigned word = bits_of(value);
  if (value != value) return 0x7fff;
  return static_cast<number_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16);
}
#else
inline float widen(number_t value) {
  _Float16 half;
  memcpy(&half, &value, 2);
  return static_cast<float>(half);
}
inline number_t narrow(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  number_t bits;
  memcpy(&bits, &half, 2);
  return bits;
}
#endif
inline float widen_low(unsigned word) { return widen(static_cast<number_t>(word & 0xffffu)); }
inline float widen_high(unsigned word) { return widen(static_cast<number_t>(word >> 16)); }
inline unsigned narrow(float low, float high) {
  return narrow(low) | static_cast<unsigned>(narrow(high)) << 16;
}

inline unsigned multiply_pair(unsigned a, unsigned b) {
  return narrow(widen_low(a) * widen_low(b), widen_high(a) * widen_high(b));
}

// as the manual of mma.m16n8k16 has it
inline void multiply_small(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                           unsigned b0, unsigned b1) {
  emulated::Warp& warp = emulated::find_warp();
  const int lane = threadIdx.x % 32, corner = lane / 4, across = lane % 4;
  const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(warp.words[lane], own, sizeof own);
  emulated::meet_warp();
  for (int number = 0; number < 4; number++) {
    const int row = corner + number / 2 * 8, column = across * 2 + number % 2;
    for (int k = 0; k < 16; k++) {
      const unsigned* left = warp.words[row % 8 * 4 + k % 8 / 2];
      const unsigned* right = warp.words[column * 4 + k % 8 / 2];
      const unsigned a = left[row / 8 + k / 8 * 2], b = right[4 + k / 8];
      sum[number] += k % 2 ? widen_high(a) * widen_high(b) : widen_low(a) * widen_low(b);
    }
  }
  emulated::meet_warp();
}

template <class T>
inline T load_fresh(const T* pointer) {
  return *pointer;
}
inline Words load_words(const void* pointer) {
  if (reinterpret_cast<size_t>(pointer) % 16) abort();
  Words words;
  memcpy(&words, pointer, 16);
  return words;
}
inline Words load_constant(const void* pointer) { return load_words(pointer); }
inline Words load_shared(const void* pointer) { return load_words(pointer); }
inline void store_words(void* pointer, const Words& words) { memcpy(pointer, &words, 16); }

inline unsigned exchange(unsigned word, int from) {
  emulated::Warp& warp = emulated::find_warp();
  warp.words[threadIdx.x % 32][0] = word;
  emulated::meet_warp();
  const unsigned found = warp.words[from][0];
  emulated::meet_warp();
  return found;
}
inline float shuffle(float value, int mask) {
  return __uint_as_float(exchange(bits_of(value), threadIdx.x % 32 ^ mask));
}
inline int ask_lane(int value, int lane) { return exchange(value, lane % 32); }
inline unsigned vote(bool wish) {
  emulated::Warp& warp = emulated::find_warp();
  warp.words[threadIdx.x % 32][0] = wish;
  emulated::meet_warp();
  unsigned votes = 0;
  for (int lane = 0; lane < 32; lane++) votes |= warp.words[lane][0] << lane;
  emulated::meet_warp();
  return votes;
}
inline void meet_warp() { emulated::meet_warp(); }
template <int THREADS>
inline void meet_threads() {
  emulated::Program& program = *emulated::current->program;
  emulated::meet(program.arrived[0], program.round[0], THREADS);
}
inline void meet_all() {
  emulated::Program& program = *emulated::current->program;
  emulated::meet(program.arrived[1], program.round[1], static_cast<int>(emulated::num_threads));
}

inline void meet_cluster() {
  emulated::Program* first = emulated::current->program - blockIdx.x % CLUSTER;
  emulated::meet(first->met, first->meeting, CLUSTER * static_cast<int>(emulated::num_threads));
}
inline float load_other(const float* pointer, int rank) {
  const emulated::Program* own = emulated::current->program;
  const size_t place = reinterpret_cast<const char*>(pointer) - own->memory;
  const emulated::Program* other = own - blockIdx.x % CLUSTER + rank;
  return *reinterpret_cast<const float*>(other->memory + place);
}

// kernels run one after the other
inline void let_next_start() {}
inline void await_previous() {}

inline void arrive_at(unsigned* counter) {
  ++*counter;
  emulated::progress++;
}
inline void await_count(const unsigned* counter, unsigned target) {
  while (*counter < target) emulated::yield();
}
inline unsigned count_up(unsigned* counter) { return (*counter)++; }
inline int await_shared(const int* pointer) {
  while (*pointer < 0) emulated::yield();
  return *pointer;
}
inline void publish(int* pointer, int value) {
  *pointer = value;
  emulated::progress++;
}

struct Gate {
  int missing, number, bytes;
  unsigned phase;
};

inline void pass_gate(Gate* gate) {
  if (gate->missing || gate->bytes) return;
  gate->missing = gate->number;
  gate->phase++;
  emulated::progress++;
}
inline void open_gate(Gate* gate, unsigned arrivals) {
  *gate = {static_cast<int>(arrivals), static_cast<int>(arrivals), 0, 0};
}
inline void finish_gates() {}
inline void arrive_at(Gate* gate) {
  gate->missing--;
  pass_gate(gate);
}
inline void expect_bytes(Gate* gate, unsigned num_bytes) {
  gate->bytes += static_cast<int>(num_bytes);
  arrive_at(gate);
}
inline void await_gate(Gate* gate, unsigned parity) {
  while ((gate->phase & 1) == parity) emulated::yield();
}
inline policy_t make_policy() { return 0; }
inline void copy_row(void* to, const void* from, unsigned num_bytes, Gate* gate, policy_t) {
  if (reinterpret_cast<size_t>(to) % 16 || reinterpret_cast<size_t>(from) % 16 || num_bytes % 16)
    abort();
  memset(to, 0xff, num_bytes);
  emulated::copies.push_back(
      {static_cast<char*>(to), static_cast<const char*>(from), num_bytes, gate});
}
