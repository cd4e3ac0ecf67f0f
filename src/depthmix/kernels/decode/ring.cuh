// Products of a matrix with the vectors of a few tokens: see stream.cu and prefetch.cu.
//
// Each multiprocessor runs one program, which owns a share of the matrix's rows. One warp copies
// these into a ring of shared memory, as far ahead as there is room (`Feeder`); the others multiply
// what has arrived, each some of the columns, and add up what they found (`Multiplier`).

constexpr int WARPS = NUM_WARPS;        // warps that multiply
constexpr int THREADS = 32 * WARPS;     // their threads
constexpr int ROWS = 16;                // rows of weights in a tile
constexpr int PIECE = 1024;             // columns of a tile in one part of the ring
constexpr int STRIDE = 2 * PIECE + 64;  // bytes between rows: neighbours use other banks
constexpr int PART = ROWS * STRIDE;     // bytes of a part of the ring
constexpr int RING_BYTES = PARTS * PART;
constexpr int EACH = PIECE / WARPS;  // columns of a part that a warp multiplies
constexpr int HALVES = EACH / 32;    // 32-column steps of them
constexpr int GROUPS = TOKENS / 8;   // groups of eight tokens, the unit of a matrix product
constexpr int SHARES = THREADS / (ROWS * TOKENS);  // threads that sum one element of a tile
constexpr int TOKEN_SUMS = ROWS + 4;               // padded to avoid bank conflicts
constexpr int WARP_SUMS = TOKENS * TOKEN_SUMS + 32 / SHARES;
constexpr int TILE_SUMS = WARPS * WARP_SUMS;  // partial sums of a tile, from all warps

// A thread's columns of a piece of a norm, and of a piece of its tokens' vectors.
using Scale = Words[HALVES];
using Piece = Words[HALVES][GROUPS];

__device__ __forceinline__ int find_share(int program, int number) {
  return static_cast<unsigned>(program) * static_cast<unsigned>(number) / gridDim.x;
}

__device__ __forceinline__ float gelu(float x) {
  return 0.5f * x * (1.0f + erff(x * 0.70710678f));
}

__device__ __forceinline__ float swiglu(float gate, float up) {
  return gate / (1.0f + __expf(-gate)) * up;
}

#ifdef GATE
// the factor of a token's update, by its router's score
__device__ __forceinline__ float apply_gate(float score) {
#if GATE == 0  // raw
  return score;
#elif GATE == 1  // sigmoid
  return 1.0f / (1.0f + expf(-score));
#elif GATE == 2  // 1 + tanh
  return 2.0f / (1.0f + expf(-2.0f * score));
#elif GATE == 3  // unit
  return 1.0f;
#endif
}
#endif

// of the ring's parts
struct Gates {
  Gate full[PARTS];
  Gate empty[PARTS];

  // by one thread, before the others use them
  __device__ __forceinline__ void open() {
    for (int part = 0; part < PARTS; part++) {
      open_gate(&full[part], 1);
      open_gate(&empty[part], WARPS);
    }
    finish_gates();
  }
};

struct Cursor {
  int part = 0;
  unsigned parity = 0;
  __device__ __forceinline__ void advance() {
    if (++part == PARTS) {
      part = 0;
      parity ^= 1;
    }
  }
};

// The warp that copies.
struct Feeder {
  Gates* gates;
  char* ring;
  Cursor cursor;
  policy_t policy;
  int lane;

  __device__ Feeder(Gates* gates, char* ring, int lane)
      : gates(gates), ring(ring), policy(make_policy()), lane(lane) {}

  // This program's rows of a matrix; with partners, gate and up rows in two halves of each tile.
  // Of its parts, those from `begin` to `stop` - 1; returns the number of parts so far.
  template <int COLUMNS, bool PAIRED>
  __device__ int copy(const number_t* matrix, int num_rows, int begin = 0, int stop = 1 << 30) {
    int part = 0;
    const int first = find_share(blockIdx.x, num_rows);
    const int end = find_share(blockIdx.x + 1, num_rows);
    constexpr int STEP = PAIRED ? ROWS / 2 : ROWS;
    for (int at = first; at < end; at += STEP) {
      const int number = min(STEP, end - at);
      const int place = PAIRED ? lane % STEP : lane;
      const bool mine = lane < ROWS && place < number;
      long long row = at + place;
      if (PAIRED && lane >= STEP) row += num_rows;
      for (int column = 0; column < COLUMNS; column += PIECE) {
        if (part == stop) return part;
        if (part++ < begin) continue;
        const unsigned num_bytes = 2 * min(PIECE, COLUMNS - column);
        Gate* full = &gates->full[cursor.part];
        await_gate(&gates->empty[cursor.part], cursor.parity ^ 1);
        if (lane == 0) expect_bytes(full, (PAIRED ? 2 : 1) * number * num_bytes);
        meet_warp();
        if (mine) {
          char* to = ring + cursor.part * PART + lane * STRIDE;
          copy_row(to, matrix + row * COLUMNS + column, num_bytes, full, policy);
        }
        cursor.advance();
      }
    }
    return part;
  }

  // wait for the first copies, at most one for each part of the ring
  __device__ void await_copies(int number) {
    for (int part = 0; part < number; part++) await_gate(&gates->full[part], 0);
  }
};

// A thread of the warps that multiply.
struct Multiplier {
  Gates* gates;
  char* ring;
  float* sums;  // two buffers for a tile's
  Cursor cursor;
  int thread, warp, lane, corner, across;  // corner: row of a product's tile; across: its columns
  unsigned turn = 0;                       // index of the buffer for a tile's sums

  __device__ Multiplier(Gates* gates, char* ring, float* sums)
      : gates(gates), ring(ring), sums(sums) {
    thread = threadIdx.x;
    warp = thread / 32;
    lane = thread % 32;
    corner = lane / 4;
    across = lane % 4;
  }

  __device__ __forceinline__ void meet() { meet_threads<THREADS>(); }

  __device__ __forceinline__ int find_column(int piece, int half) {
    return piece * PIECE + warp * EACH + half * 32 + across * 8;
  }

  // a piece of the tokens' vectors, at `places` if given; zeros for tokens that are not in `mask`
  __device__ __forceinline__ void load_piece(Piece& words, const number_t* source,
                                             const int* places, unsigned mask, int columns,
                                             int piece) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const int number = group * 8 + corner;
      const int place = places ? places[number] : number;
      const bool there = (mask >> number) & 1;
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const int column = find_column(piece, half);
        words[half][group] = {0, 0, 0, 0};
        if (there && column < columns)
          words[half][group] = load_words(source + place * columns + column);
      }
    }
  }

  // Multiply this warp's columns of the next tile's piece and of the vectors. IS_EVEN: each warp
  // has either all its columns of a piece or none.
  template <bool IS_EVEN>
  __device__ __forceinline__ void multiply_piece(const Piece& words, int num_columns,
                                                 float (&sum)[2][GROUPS][4]) {
    await_gate(&gates->full[cursor.part], cursor.parity);
    const char* part = ring + cursor.part * PART + corner * STRIDE + 2 * warp * EACH + across * 16;
    // past the last column, the ring holds data of an earlier tile
    if (warp * EACH < num_columns) {
      Words upper[HALVES], lower[HALVES];
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        upper[half] = load_shared(part + half * 64);
        lower[half] = load_shared(part + half * 64 + 8 * STRIDE);
      }
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        if (!IS_EVEN && warp * EACH + half * 32 >= num_columns) break;
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
          // any order of columns is correct if both factors use it
          const Words &a = upper[half], &b = lower[half], &own = words[half][group];
          float (&to)[4] = sum[half % 2][group];
          multiply_small(to, a.x, b.x, a.y, b.y, own.x, own.y);
          multiply_small(to, a.z, b.z, a.w, b.w, own.z, own.w);
        }
      }
    }
    meet_warp();
    if (lane == 0) arrive_at(&gates->empty[cursor.part]);
    cursor.advance();
  }

  // An element of a tile, summed over all warps by SHARES threads.
  struct Sum {
    int token, place;
    float total, partner;  // same token, but the matrix's other half
  };

  // a thread always has the same token and place
  __device__ __forceinline__ Sum find_element() {
    const int number = thread / SHARES;
    return {number / ROWS, number % ROWS, 0.0f, 0.0f};
  }

  __device__ __forceinline__ Sum add_up(const float (&sum)[2][GROUPS][4], bool is_paired) {
    float* tile = sums + turn * TILE_SUMS;
    turn ^= 1;
    // partners are adjacent
    const int upper = is_paired ? 2 * corner : corner, lower = is_paired ? upper + 1 : corner + 8;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const auto& a = sum[0][group];
      const auto& b = sum[1][group];
      float* to = tile + warp * WARP_SUMS + (group * 8 + across * 2) * TOKEN_SUMS;
      to[upper] = a[0] + b[0];
      to[TOKEN_SUMS + upper] = a[1] + b[1];
      to[lower] = a[2] + b[2];
      to[TOKEN_SUMS + lower] = a[3] + b[3];
    }
    // after this, all threads have read the previous tile's sums, whose buffer is next
    meet();
    Sum found = find_element();
    const float* from = tile + found.token * TOKEN_SUMS + found.place;
#pragma unroll
    for (int other = 0; other < WARPS; other += SHARES)
      found.total += from[(other + thread % SHARES) * WARP_SUMS];
#pragma unroll
    for (int other = 1; other < SHARES; other *= 2) found.total += shuffle(found.total, other);
    found.partner = shuffle(found.total, SHARES);
    return found;
  }
};
