// Device features that C++ cannot express: asynchronous copies, barriers, and products of small
// matrices. Tests replace this file by one for a CPU.

typedef unsigned short number_t;  // a weight: the bits of a bf16 or of an fp16
typedef unsigned long long policy_t;

// polls of a barrier after which to trap: an error is better than a hang
constexpr unsigned PATIENCE = 1u << 24;

struct Words {
  unsigned x, y, z, w;
};

#define SHARED_MEMORY(name) extern __shared__ __align__(128) char name[]

__device__ __forceinline__ unsigned find_shared(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// --- 16-bit numbers, two per word ----------------------------------------------------------------

__device__ __forceinline__ float widen(float value) { return value; }

#if IS_BF16
__device__ __forceinline__ float widen(number_t value) {
  return __uint_as_float(static_cast<unsigned>(value) << 16);
}
__device__ __forceinline__ float widen_low(unsigned word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float widen_high(unsigned word) {
  return __uint_as_float(word & 0xffff0000u);
}
__device__ __forceinline__ unsigned narrow(float low, float high) {
  unsigned word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
#define MULTIPLY_PAIR "mul.rn.bf16x2 "
#else
__device__ __forceinline__ float widen(number_t value) {
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value));
  return wide;
}
__device__ __forceinline__ float widen_low(unsigned word) {
  return widen(static_cast<number_t>(word & 0xffffu));
}
__device__ __forceinline__ float widen_high(unsigned word) {
  return widen(static_cast<number_t>(word >> 16));
}
__device__ __forceinline__ unsigned narrow(float low, float high) {
  unsigned word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
#define MMA "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
#define MULTIPLY_PAIR "mul.rn.f16x2 "
#endif

__device__ __forceinline__ number_t narrow(float value) {
  return static_cast<number_t>(narrow(value, 0.0f) & 0xffffu);
}

__device__ __forceinline__ unsigned multiply_pair(unsigned a, unsigned b) {
  unsigned word;
  asm(MULTIPLY_PAIR "%0, %1, %2;" : "=r"(word) : "r"(a), "r"(b));
  return word;
}

// sum += a · b for a warp: a has 16 rows and 16 columns, b 16 rows and 8 columns
__device__ __forceinline__ void multiply_small(
    float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(MMA "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// --- memory written by other programs: bypass the L1 cache, which may be stale -------------------

__device__ __forceinline__ Words load_words(const void* pointer) {
  const uint4 words = __ldcg(static_cast<const uint4*>(pointer));
  return {words.x, words.y, words.z, words.w};
}
__device__ __forceinline__ float load_fresh(const float* pointer) { return __ldcg(pointer); }
__device__ __forceinline__ int load_fresh(const int* pointer) { return __ldcg(pointer); }
__device__ __forceinline__ number_t load_fresh(const number_t* pointer) { return __ldcg(pointer); }
// for memory that is not written in the meantime
__device__ __forceinline__ Words load_constant(const void* pointer) {
  const uint4 words = __ldg(static_cast<const uint4*>(pointer));
  return {words.x, words.y, words.z, words.w};
}
__device__ __forceinline__ Words load_shared(const void* pointer) {
  const uint4 words = *static_cast<const uint4*>(pointer);
  return {words.x, words.y, words.z, words.w};
}
__device__ __forceinline__ void store_words(void* pointer, const Words& words) {
  *static_cast<uint4*>(pointer) = make_uint4(words.x, words.y, words.z, words.w);
}

// --- threads of a warp and of a program ----------------------------------------------------------

__device__ __forceinline__ float shuffle(float value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}
__device__ __forceinline__ unsigned vote(bool wish) { return __ballot_sync(0xffffffffu, wish); }
// another lane's value
__device__ __forceinline__ int ask_lane(int value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}
__device__ __forceinline__ void meet_warp() { __syncwarp(); }
// only the program's first THREADS threads
template <int THREADS>
__device__ __forceinline__ void meet_threads() {
  asm volatile("bar.sync 1, %0;" ::"n"(THREADS) : "memory");
}
__device__ __forceinline__ void meet_all() { __syncthreads(); }

// --- programs of a cluster -----------------------------------------------------------------------

__device__ __forceinline__ void meet_cluster() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// a number in the shared memory of another program
__device__ __forceinline__ float load_other(const float* pointer, int rank) {
  unsigned place;
  float value;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(place)
               : "r"(find_shared(pointer)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(place) : "memory");
  return value;
}

// --- kernels that start before the previous one ends ---------------------------------------------

// from here on, the next kernel may start as soon as its programs find room
__device__ __forceinline__ void let_next_start() {
  asm volatile("griddepcontrol.launch_dependents;");
}
// wait until the previous kernel has ended and what it wrote can be read
__device__ __forceinline__ void await_previous() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// --- counters shared by all programs -------------------------------------------------------------

__device__ __forceinline__ void arrive_at(unsigned* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}
__device__ __forceinline__ void await_count(const unsigned* counter, unsigned target) {
  unsigned count, polls = 0;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
    if (++polls > PATIENCE) __trap();
  } while (count < target);
}
__device__ __forceinline__ unsigned count_up(unsigned* counter) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
               : "=r"(before)
               : "l"(counter)
               : "memory");
  return before;
}
// wait until another thread of the program makes a number in shared memory 0 or more
__device__ __forceinline__ int await_shared(const int* pointer) {
  int value;
  unsigned polls = 0;
  do {
    asm volatile("ld.volatile.shared.s32 %0, [%1];"
                 : "=r"(value)
                 : "r"(find_shared(pointer))
                 : "memory");
    if (++polls > PATIENCE) __trap();
  } while (value < 0);
  return value;
}
__device__ __forceinline__ void publish(int* pointer, int value) {
  asm volatile("st.volatile.shared.s32 [%0], %1;" ::"r"(find_shared(pointer)), "r"(value)
               : "memory");
}

// --- asynchronous copies -------------------------------------------------------------------------

struct Gate {
  unsigned long long state;  // an mbarrier
};

__device__ __forceinline__ void open_gate(Gate* gate, unsigned arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(find_shared(gate)), "r"(arrivals)
               : "memory");
}
__device__ __forceinline__ void finish_gates() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void arrive_at(Gate* gate) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(find_shared(gate)) : "memory");
}
__device__ __forceinline__ void expect_bytes(Gate* gate, unsigned num_bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(find_shared(gate)),
               "r"(num_bytes)
               : "memory");
}
__device__ __forceinline__ void await_gate(Gate* gate, unsigned parity) {
  unsigned passed, polls = 0;
  do {
    asm volatile(
        "{\n.reg .pred passed;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 passed, [%1], %2;\n"
        "selp.u32 %0, 1, 0, passed;\n}"
        : "=r"(passed)
        : "r"(find_shared(gate)), "r"(parity)
        : "memory");
    if (++polls > PATIENCE) __trap();
  } while (!passed);
}
// weights are read once, so the L2 cache need not keep them
__device__ __forceinline__ policy_t make_policy() {
  policy_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void copy_row(
    void* to, const void* from, unsigned num_bytes, Gate* gate, policy_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(find_shared(to)),
      "l"(from), "r"(num_bytes), "r"(find_shared(gate)), "l"(policy)
      : "memory");
}
