// A product of a routed block for the few tokens that it keeps: one launch for each of four.
//
// The kernel may start while the one before it still runs, and fills its ring with weights: when
// its vectors are ready, much of the matrix is already in shared memory. The first product may also
// give places to the tokens that the block keeps, after decide.cu: that is faster than another
// kernel, although every program does it.
//
// Tokens are processed sixteen at a time. If a block keeps more, the matrix is read again.

// queries, keys and values; attention's output; the MLP's two products
enum { PROJECT, OUT, IN, BACK };

constexpr bool IS_PAIRED = KIND == IN && IS_SWIGLU;
constexpr bool NORMALIZES = KIND == PROJECT || KIND == IN;
constexpr int STEP = IS_PAIRED ? ROWS / 2 : ROWS;  // rows of the result in a tile
constexpr int PIECES = (NUM_COLUMNS + PIECE - 1) / PIECE;
// pieces of the vectors in registers: those of the MLP's second product are loaded again and again
constexpr int HELD = KIND == BACK && PIECES > 2 ? 2 : PIECES;
constexpr bool IS_EVEN = NUM_COLUMNS % EACH == 0;

struct Task {
  const number_t* weight;
  const number_t* source;  // a vector for each place; for PROJECT, each token
  const number_t* norm;    // of the vectors, or null
  int* index;              // token of each place
  int* count;              // number of places
  float* gate;             // by token
  number_t* x;             // by token
  float* update;           // attention's, by place
  number_t* result;        // by place
  // if places are given, by token
  const int* row;       // of the cache; -1 where there is no token
  const int* position;  // in its sequence
  const int* previous;  // place in the routed block before, without which none is given; or null
  const float* score;
  const float* wish;
  int* slot;             // place, or -1
  int* first;            // number of places before, and of all
  unsigned char* taken;  // 1 if it has a place
  int* alone;            // row of each place
  int num_tokens;
  int first_tokens;
  float norm_eps;
};

struct Shared {
  Gates gates;
  float squares[WARPS][TOKENS];
  int token[TOKENS];  // of each place
  int count;          // number of places; -1 until it is known
  int kept[WARPS];    // number of tokens in each warp that have a place
  int tokens[DECIDES ? MOST_TOKENS : 1];  // of all places
};
constexpr int SUMS_BYTES = 4 * 2 * TILE_SUMS;

struct Worker : Multiplier {
  const Task& task;
  Shared* shared;

  __device__ Worker(const Task& task, Shared* shared, char* ring, float* sums)
      : Multiplier(&shared->gates, ring, sums), task(task), shared(shared) {}

  __device__ __forceinline__ void run(int count) {
    for (int first = 0; first < count; first += TOKENS) {
      // until then, threads may still read the last group's tokens
      meet();
      const int number = min(count - first, TOKENS);
      if (thread < number) {
        const int place = first + thread;
        shared->token[thread] = DECIDES ? shared->tokens[place] : load_fresh(task.index + place);
      }
      meet();
      // the vectors; in PROJECT, all threads have waited before
      if (KIND != PROJECT && first == 0) await_previous();
      multiply_group(first, number);
    }
    if (KIND != PROJECT && count == 0) await_previous();
  }

  // Find the tokens that the block keeps, in order; return their number. One program also stores
  // this for the kernels that follow.
  __device__ __forceinline__ int give_places() {
    const bool stores = blockIdx.x == 0;
    int count = 0;
    for (int begin = 0; begin < task.num_tokens; begin += THREADS) {
      const int token = begin + thread;
      const bool is_there = token < task.num_tokens;
      int home = -1, position = 0, previous = 0;
      float score = 0.0f, wish = 0.0f;
      if (is_there) {
        home = load_fresh(task.row + token);
        position = load_fresh(task.position + token);
        score = load_fresh(task.score + token);
        wish = load_fresh(task.wish + token);
        if (task.previous) previous = load_fresh(task.previous + token);
      }
      const bool wishes = KEEPS_ALL || wish > 0.0f || position < task.first_tokens;
      const bool is_kept = home >= 0 && previous >= 0 && wishes;
      const unsigned votes = vote(is_kept);
      if (lane == 0) shared->kept[warp] = __popc(votes);
      meet();
      int place = count + __popc(votes & ((1u << lane) - 1));
      for (int other = 0; other < WARPS; other++) {
        if (other < warp) place += shared->kept[other];
        count += shared->kept[other];
      }
      if (is_kept) shared->tokens[place] = token;
      if (stores && is_there) {
        task.slot[token] = is_kept ? place : -1;
        task.taken[token] = is_kept;
        task.first[token] = place;
        task.gate[token] = apply_gate(score);
        if (is_kept) task.index[place] = token, task.alone[place] = home;
      }
      // the counts are read, and the tokens written
      meet();
    }
    if (stores) {
      for (int place = count + thread; place < task.num_tokens; place += THREADS)
        task.alone[place] = -1;
      if (thread == 0) *task.count = task.first[task.num_tokens] = count;
    }
    if (thread == 0) publish(&shared->count, count);
    return count;
  }

  __device__ __forceinline__ void multiply_group(int first, int number) {
    const number_t* source = task.source;
    if (KIND != PROJECT) source += 1LL * first * NUM_COLUMNS;
    const int* places = KIND == PROJECT ? shared->token : nullptr;
    const unsigned mask = (1u << number) - 1;
    Piece given[HELD];
#pragma unroll
    for (int piece = 0; piece < HELD; piece++)
      load_piece(given[piece], source, places, mask, NUM_COLUMNS, piece);
    if (NORMALIZES) normalize(given);
    const Sum own = find_element();
    const int place = first + own.token;
    const bool is_there = thread % SHARES == 0 && own.token < number;
    const int end = find_share(blockIdx.x + 1, NUM_ROWS);
    for (int at = find_share(blockIdx.x, NUM_ROWS); at < end; at += STEP) {
      const int row = at + (IS_PAIRED ? own.place / 2 : own.place);
      const bool is_mine = is_there && row < end && !(IS_PAIRED && own.place % 2);
      // loaded before the product, and there when it ends
      float old = 0.0f, update = 0.0f, gate = 0.0f;
      if ((KIND == OUT || KIND == BACK) && is_mine) {
        const int token = shared->token[own.token];
        old = widen(load_fresh(task.x + 1LL * token * NUM_ROWS + row));
        if (KIND == BACK) {
          update = load_fresh(task.update + 1LL * place * NUM_ROWS + row);
          gate = load_fresh(task.gate + token);
        }
      }
      float sum[2][GROUPS][4] = {};
#pragma unroll 1
      for (int begin = 0; begin < PIECES; begin += HELD)
#pragma unroll
        for (int slot = 0; slot < HELD; slot++) {
          const int piece = begin + slot;
          if (piece >= PIECES) break;
          multiply_piece<IS_EVEN>(given[slot], NUM_COLUMNS - piece * PIECE, sum);
          if (PIECES == HELD) continue;
          // load a later piece, of this tile or the next, while others are multiplied
          const int next = piece + HELD < PIECES ? piece + HELD : slot;
          if (next > piece || at + STEP < end)
            load_piece(given[slot], source, places, mask, NUM_COLUMNS, next);
        }
      const Sum found = add_up(sum, IS_PAIRED);
      if (!is_mine) continue;
      const long long to = 1LL * place * NUM_ROWS + row;
      const float inverse = NORMALIZES ? invert(own.token) : 1.0f, total = found.total * inverse;
      if (KIND == PROJECT) {
        task.result[to] = narrow(total);
      } else if (KIND == OUT) {
        task.update[to] = total;
        task.result[to] = narrow(old + total);
      } else if (KIND == IN) {
        const float active = IS_SWIGLU ? swiglu(total, found.partner * inverse) : gelu(total);
        task.result[to] = narrow(active);
      } else {
        const int token = shared->token[own.token];
        task.x[1LL * token * NUM_ROWS + row] = narrow(old + gate * (update + total));
      }
    }
  }

  // multiply by the norm's weights, and sum squares over this warp's columns; see `invert`
  __device__ __forceinline__ void normalize(Piece (&given)[HELD]) {
    float square[GROUPS] = {};
#pragma unroll
    for (int piece = 0; piece < HELD; piece++)
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const int column = find_column(piece, half);
        Words by = {0, 0, 0, 0};
        if (column < NUM_COLUMNS) by = load_constant(task.norm + column);
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
          Words& words = given[piece][half][group];
          square[group] += find_square(words.x) + find_square(words.y) + find_square(words.z) +
                           find_square(words.w);
          words = {multiply_pair(words.x, by.x), multiply_pair(words.y, by.y),
                   multiply_pair(words.z, by.z), multiply_pair(words.w, by.w)};
        }
      }
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      square[group] += shuffle(square[group], 1);
      square[group] += shuffle(square[group], 2);
      if (across == 0) shared->squares[warp][group * 8 + corner] = square[group];
    }
  }

  static __device__ __forceinline__ float find_square(unsigned word) {
    const float low = widen_low(word), high = widen_high(word);
    return low * low + high * high;
  }

  // 1 / rms of a vector, after `normalize` and a synchronization: products are multiplied by it
  __device__ __forceinline__ float invert(int token) {
    float whole = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) whole += shared->squares[other][token];
    return rsqrtf(whole / NUM_COLUMNS + task.norm_eps);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    prefetch(const __grid_constant__ Task task) {
  let_next_start();
  SHARED_MEMORY(memory);
  char* ring = memory;
  float* sums = reinterpret_cast<float*>(memory + RING_BYTES);
  Shared* shared = reinterpret_cast<Shared*>(memory + RING_BYTES + SUMS_BYTES);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    shared->gates.open();
    shared->count = -1;
  }
  meet_all();
  if (warp == WARPS) {
    Feeder feeder(&shared->gates, ring, lane);
    // whether or not any token needs them
    const int copied = feeder.copy<NUM_COLUMNS, IS_PAIRED>(task.weight, NUM_ROWS, 0, PARTS);
    int count;
    if (DECIDES) {
      count = ask_lane(lane ? 0 : await_shared(&shared->count), 0);
    } else {
      // the kernel before PROJECT wrote it; before the others, an earlier one did
      if (KIND == PROJECT) await_previous();
      count = load_fresh(task.count);
    }
    for (int first = 0; first < count; first += TOKENS)
      feeder.copy<NUM_COLUMNS, IS_PAIRED>(task.weight, NUM_ROWS, first ? 0 : copied);
    // a program must not end while copies are under way
    if (!count) feeder.await_copies(copied);
  } else {
    if (KIND == PROJECT) await_previous();
    Worker worker(task, shared, ring, sums);
    worker.run(DECIDES ? worker.give_places() : load_fresh(task.count));
  }
}
