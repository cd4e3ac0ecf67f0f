// Blocks for a few tokens in one launch, with weights prefetched all the time.
//
// One warp of each program copies its share of every matrix into a ring, and the others multiply:
// see ring.cuh. While the programs wait for each other between two products, the weights of the
// next ones are already being loaded, so the memory bus stays busy.
//
// The kernel also decides which tokens each routed block keeps. Both kinds of warps follow the same
// path through the blocks: see `Path`.

constexpr float ROUTER_EPS = 1e-6f;
constexpr float LOWEST = -1e30f;  // below any score, but finite

constexpr int PROJECTED = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_WIDTH;
constexpr int MIXED = NUM_HEADS * HEAD_WIDTH;
// query heads that share keys and values, at most four at a time
constexpr int SHARING = NUM_HEADS / NUM_KV_HEADS;
constexpr int QUERIES = SHARING % 4 == 0 ? 4 : SHARING % 3 == 0 ? 3 : SHARING % 2 == 0 ? 2 : 1;
constexpr int SETS = SHARING / QUERIES;
constexpr int UNITS_EACH = NUM_KV_HEADS * SETS;  // units of attention per token
constexpr int LANES = HEAD_WIDTH / 8;            // lanes per head, with eight elements each
constexpr int ABREAST = 32 / LANES;              // keys that a warp reads at a time
constexpr int TURNS = SPAN / ABREAST > 0 ? SPAN / ABREAST : 1;

// index of each block among routed blocks, or -1
__device__ constexpr short ROUTES[] = {ROUTE_OF_LAYER};

struct Task {
  // the model
  const number_t* norm_attention;
  const number_t* w_qkv;
  const number_t* qkv_bias;
  const number_t* norm_query;
  const number_t* norm_key;
  const number_t* w_attn_out;
  const number_t* norm_mlp;
  const number_t* w_in;
  const number_t* w_mlp_out;
  const number_t* norm;
  const number_t* head;
  const float* phase_table;
  const number_t* router;
  const number_t* predictor_in;
  const number_t* predictor_out;
  const number_t* predictor_bias;
  // the cache
  number_t* key_pages;
  number_t* value_pages;
  const int* tables;
  int* lengths;
  // the step's tokens
  number_t* x;
  const int* row;
  const int* position;
  const int* sampled;
  const int* num_sampled;
  float* logits;
  unsigned char* taken;
  // passed between programs
  float* qkv;
  number_t* mixed;
  number_t* stream;
  number_t* hidden;
  float* foreseen;
  float* part_top;  // of an item: see `attend`
  float* part_sum;
  float* part_out;
  unsigned* arrivals;
  unsigned* counters;
  int num_tokens;
  int num_rows;   // of the cache
  int max_pages;  // of a row
  int logits_stride;
  int first_tokens;
  int ahead;  // number of tokens up to which a routed block is expected to keep none
  float norm_eps;
};

// A part of a token's context, for heads that share keys and values.
struct Item {
  int total;  // of all tokens, heads and parts
  int token, unit, part, num_parts;
  int first;  // index of the first part of these heads
  int length, from, to;
};

// shared by the threads of a program
struct Shared {
  Gates gates;
  float squares[WARPS][TOKENS];
  float scores[WARPS][TOKENS];
  float gate[TOKENS];
  // of the rows that this program writes: x, and the attention's update
  float x[TOKENS][OWN_ROWS];
  float mixed[TOKENS][OWN_ROWS];
  int row[TOKENS];              // of the cache
  int position[TOKENS];
  unsigned all;                 // bit mask of the tokens
  int lengths[NUM_LAYERS][TOKENS];
  Item items[NUM_LAYERS];  // this program's first item if all tokens are kept
  float phases[TOKENS][HEAD_WIDTH];
  int kept[NUM_ROUTES];  // bit mask of the tokens that a routed block keeps; -1 until decided
  int is_last;
};
constexpr int MIX_SUMS = WARPS * QUERIES * (HEAD_WIDTH + 2);
constexpr int SUMS_BYTES = 4 * (2 * TILE_SUMS > MIX_SUMS ? 2 * TILE_SUMS : MIX_SUMS);

// --- the path through the blocks -----------------------------------------------------------------

// What to compute next. Both kinds of warps follow it, so it depends only on what all programs
// know.
struct Path {
  int layer;
  int route;     // index among routed blocks, or -1
  int target;    // block whose queries, keys and values are projected next, or -1
  bool asks;     // whether the block has to decide
  int ready;     // block whose queries, keys and values are projected already
  unsigned mask;  // tokens that the block keeps
  unsigned alive;  // tokens that may enter routed blocks

  __device__ void begin(const Task& task, unsigned valid, int number) {
    layer = number;
    route = ROUTES[layer];
    asks = DECIDES && route >= 0;
    mask = valid;
    target = layer;
    if (asks && task.num_tokens <= task.ahead) {
      // the block will probably be skipped: project the next one without waiting for the decision
      const bool is_dense = layer + 1 < NUM_LAYERS && ROUTES[layer + 1] < 0;
      target = is_dense ? layer + 1 : -1;
    }
  }

  // after a decision: whether the block runs but its queries, keys and values are missing
  __device__ bool goes_back(int number) {
    if (IS_FINAL && asks) alive = mask;
    target = number;
    return mask && ready != number;
  }
};

// --- copying ------------------------------------------------------------------------------------

struct Copier : Feeder {
  Shared* shared;

  __device__ Copier(Shared* shared, char* ring, int lane)
      : Feeder(&shared->gates, ring, lane), shared(shared) {}

  __device__ void copy_units(const Task& task, int route) {
    const number_t* matrix = task.predictor_in + 1LL * route * NUM_UNITS * WIDTH;
    if (ASKS_PREDICTOR) copy<WIDTH, false>(matrix, NUM_UNITS);
  }
  __device__ void copy_qkv(const Task& task, int layer) {
    copy<WIDTH, false>(task.w_qkv + 1LL * layer * PROJECTED * WIDTH, PROJECTED);
  }
  __device__ void copy_rest(const Task& task, int layer) {
    copy<MIXED, false>(task.w_attn_out + 1LL * layer * WIDTH * MIXED, WIDTH);
    constexpr int NUM_IN = IS_SWIGLU ? 2 * MLP_WIDTH : MLP_WIDTH;
    copy<WIDTH, IS_SWIGLU>(task.w_in + 1LL * layer * NUM_IN * WIDTH, MLP_WIDTH);
    copy<MLP_WIDTH, false>(task.w_mlp_out + 1LL * layer * WIDTH * MLP_WIDTH, WIDTH);
  }

  // all blocks and the head, in the same order as `Worker::run`
  __device__ void run(const Task& task, Path& path, unsigned valid) {
    unsigned num_asked = 0;
    for (int layer = 0; layer < NUM_LAYERS; layer++) {
      path.begin(task, valid, layer);
      for (bool asks = path.asks;; asks = false) {
        if (asks) copy_units(task, path.route);
        if (path.target >= 0 && path.target != path.ready) {
          copy_qkv(task, path.target);
          path.ready = path.target;
        }
        if (asks) path.mask = decide(task, path, ++num_asked);
        if (!path.goes_back(layer)) break;
      }
      if (path.mask) {
        copy_rest(task, layer);
        path.ready = -1;
      }
    }
    copy<WIDTH, false>(task.head, NUM_CLASSES);
  }

  // Which tokens a block keeps, from the units of the predictor computed by all programs. This warp
  // decides first, because it loads the next block's weights.
  __device__ int decide(const Task& task, const Path& path, unsigned num_asked) {
    if (!ASKS_PREDICTOR) return ask_lane(lane ? 0 : await_shared(&shared->kept[path.route]), 0);
    const int num_units = min(NUM_UNITS, static_cast<int>(gridDim.x));
    if (lane == 0) await_count(&task.counters[1], num_asked * num_units);
    meet_warp();
    const int token = lane % TOKENS;
    float logit = 0.0f;
    const float* foreseen = task.foreseen + path.route * NUM_UNITS * TOKENS;
#pragma unroll 8
    for (int unit = lane / TOKENS; unit < NUM_UNITS; unit += 32 / TOKENS)
      logit += load_fresh(foreseen + unit * TOKENS + token);
    for (int other = TOKENS; other < 32; other *= 2) logit += shuffle(logit, other);
    logit += widen(task.predictor_bias[path.route]);
    const bool forced = shared->position[token] < task.first_tokens;
    const unsigned wishes = vote(lane < TOKENS && (logit > 0.0f || forced));
    const unsigned kept = wishes & path.mask & path.alive;
    if (lane == 0) publish(&shared->kept[path.route], static_cast<int>(kept));
    return kept;
  }
};

// --- multiplying ---------------------------------------------------------------------------------

constexpr int LONGER = WIDTH > MIXED ? WIDTH : MIXED;
constexpr int PIECES = (LONGER + PIECE - 1) / PIECE;  // of a vector, except the MLP's hidden one
constexpr int MLP_PIECES = (MLP_WIDTH + PIECE - 1) / PIECE;
// whether each warp has either all its columns of a piece or none
constexpr bool IS_EVEN = WIDTH % EACH == 0 && MIXED % EACH == 0 && MLP_WIDTH % EACH == 0;
constexpr int HELD = MLP_PIECES < 3 ? MLP_PIECES : 3;  // of these, prefetched

// The stages of a block with vectors that fit into registers, and the head.
enum Stage { QKV, OUT, IN, HEAD };

struct Worker : Multiplier {
  const Task& task;
  Shared* shared;
  int first_own;  // first row of x that this program writes
  unsigned num_stages = 0, num_awaited = 0;

  __device__ Worker(const Task& task, Shared* shared, char* ring, float* sums)
      : Multiplier(&shared->gates, ring, sums), task(task), shared(shared) {
    first_own = find_share(blockIdx.x, WIDTH);
  }

  // signal that this program's part of a stage is written
  __device__ void arrive() {
    meet();
    if (thread == 0) arrive_at(&task.counters[0]);
    num_stages++;
  }
  // wait for all programs' parts of the last stage
  __device__ void await() {
    if (num_awaited == num_stages) return;
    num_awaited = num_stages;
    if (thread == 0) await_count(&task.counters[0], num_stages * gridDim.x);
    meet();
  }

  // the rows of x that this program writes
  __device__ void load_own(unsigned mask) {
    const int number = find_share(blockIdx.x + 1, WIDTH) - first_own;
    for (int at = thread; at < TOKENS * number; at += THREADS) {
      const int token = at / number, row = at % number;
      if (!((mask >> token) & 1)) continue;
      shared->x[token][row] = widen(load_fresh(task.x + token * WIDTH + first_own + row));
    }
  }

  // what attention needs for each token, in all blocks
  __device__ void load_contexts(unsigned valid) {
    for (int at = thread; at < NUM_LAYERS * TOKENS; at += THREADS)
      shared->lengths[at / TOKENS][at % TOKENS] = load_fresh(find_length(at / TOKENS, at % TOKENS));
    for (int at = thread; at < TOKENS * HEAD_WIDTH; at += THREADS) {
      const long long place = 1LL * shared->position[at / HEAD_WIDTH] * HEAD_WIDTH;
      shared->phases[at / HEAD_WIDTH][at % HEAD_WIDTH] = task.phase_table[place + at % HEAD_WIDTH];
    }
    meet();
    for (int layer = warp; layer < NUM_LAYERS; layer += WARPS) {
      const Item item = find_item(layer, valid, blockIdx.x);
      if (lane == 0) shared->items[layer] = item;
    }
    if (thread == 0) shared->all = valid;
  }

  // this thread's columns of a vector; zeros if there is none
  __device__ __forceinline__ void load_scale(Scale (&scale)[PIECES], const number_t* source) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
      for (int half = 0; half < HALVES; half++) {
        const int column = find_column(piece, half);
        scale[piece][half] = {0, 0, 0, 0};
        if (source && column < WIDTH) scale[piece][half] = load_constant(source + column);
      }
  }

  // sums of squares, and of products with the router, over this warp's columns
  __device__ __forceinline__ void measure(const Piece (&given)[PIECES],
                                          const Scale (&router)[PIECES]) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      // as a matrix product: eight rows of tokens, then the router repeated eight times
      float sum[4] = {};
#pragma unroll
      for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
          const Words& own = given[piece][half][group];
          const Words& judge = router[piece][half];
          multiply_small(sum, own.x, judge.x, own.y, judge.y, own.x, own.y);
          multiply_small(sum, own.z, judge.z, own.w, judge.w, own.z, own.w);
        }
      // a thread has two tokens' products with its own token, and with the router
      if (corner / 2 == across)
        shared->squares[warp][group * 8 + corner] = corner % 2 ? sum[1] : sum[0];
      if (corner == 0) {
        shared->scores[warp][group * 8 + across * 2] = sum[2];
        shared->scores[warp][group * 8 + across * 2 + 1] = sum[3];
      }
    }
  }

  // 1 / rms of a token, after `measure` and a synchronization
  __device__ float invert(int token, float eps) {
    float whole = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) whole += shared->squares[other][token];
    return rsqrtf(whole / WIDTH + eps);
  }

  // the token's router score
  __device__ float judge(int token) {
    float total = 0.0f;
#pragma unroll
    for (int other = 0; other < WARPS; other++) total += shared->scores[other][token];
    return NORMALIZES ? total * invert(token, ROUTER_EPS) : total;
  }

  // multiply by a norm's weights; the division by the rms follows the product
  __device__ __forceinline__ void apply(const Scale (&scale)[PIECES], Piece (&given)[PIECES]) {
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
#pragma unroll
      for (int half = 0; half < HALVES; half++)
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
          Words& words = given[piece][half][group];
          const Words& by = scale[piece][half];
          words = {multiply_pair(words.x, by.x), multiply_pair(words.y, by.y),
                   multiply_pair(words.z, by.z), multiply_pair(words.w, by.w)};
        }
  }

  // --- the stages of a block ---------------------------------------------------------------------

  // The first stage of a block (the scores of a routed block, then the queries, keys and values of
  // block `target`), or another stage. All stages share this code, because instructions that have
  // not run recently take long to fetch.
  __device__ __forceinline__ void run_stage(Stage stage, const Path& path, unsigned mask, bool asks,
                                            int target) {
    const number_t* scale_at = nullptr;
    const number_t* source = task.x;
    const int* places = nullptr;
    int columns = WIDTH, num_rows = PROJECTED;
    if (stage == QKV) {
      if (target >= 0) scale_at = task.norm_attention + target * WIDTH;
    } else if (stage == OUT) {
      source = task.mixed, columns = MIXED, num_rows = WIDTH;
    } else if (stage == IN) {
      scale_at = task.norm_mlp + path.layer * WIDTH;
      source = task.stream, num_rows = MLP_WIDTH;
    } else {
      scale_at = task.norm, places = shared->row, num_rows = NUM_CLASSES;
    }
    const bool is_paired = IS_SWIGLU && stage == IN, judges = stage == QKV && path.route >= 0;
    // what has no dependencies is loaded while other programs arrive
    Scale scale[PIECES], router[PIECES];
    load_scale(scale, scale_at);
    load_scale(router, judges ? task.router + path.route * WIDTH : nullptr);
    await();
    Piece given[PIECES];
#pragma unroll
    for (int piece = 0; piece < PIECES; piece++)
      load_piece(given[piece], source, places, mask, columns, piece);
    if (stage != OUT) measure(given, router);
    if (asks && !ASKS_PREDICTOR) decide(path);
    for (bool is_ask = asks && ASKS_PREDICTOR;; is_ask = false) {
      if (!is_ask) {
        if (stage == QKV && target < 0) break;
        if (scale_at) apply(scale, given);
      }
      const int number = is_ask ? NUM_UNITS : num_rows;
      const int first = find_share(blockIdx.x, number), end = find_share(blockIdx.x + 1, number);
      float inverse = 0.0f;
      for (int at = first; at < end; at += is_paired ? ROWS / 2 : ROWS) {
        float sum[2][GROUPS][4] = {};
#pragma unroll
        for (int piece = 0; piece < PIECES; piece++)
          if (piece * PIECE < columns)
            multiply_piece<IS_EVEN>(given[piece], columns - piece * PIECE, sum);
        const Sum found = add_up(sum, is_paired);
        // a thread always has the same token
        if (at == first && stage != OUT)
          inverse = invert(found.token, is_ask ? ROUTER_EPS : task.norm_eps);
        const int row = at + (is_paired ? found.place / 2 : found.place);
        if (thread % SHARES == 0 && row < end && !(is_paired && found.place % 2))
          finish(is_ask ? -1 : stage, path, row, found, inverse, target);
      }
      if (!is_ask) break;
      if (first < end) {
        meet();
        if (thread == 0) arrive_at(&task.counters[1]);
      }
    }
    if (stage == QKV && target < 0) return;
    if (judges && thread < TOKENS) shared->gate[thread] = apply_gate(judge(thread));
    arrive();
  }

  // store an element of a product
  __device__ __forceinline__ void finish(int stage, const Path& path, int row, const Sum& found,
                                         float inverse, int target) {
    const int token = found.token;
    const float total = found.total * inverse;
    if (stage == QKV) {
      const float bias = task.qkv_bias ? widen(task.qkv_bias[target * PROJECTED + row]) : 0.0f;
      task.qkv[token * PROJECTED + row] = total + bias;
    } else if (stage == OUT) {
      shared->mixed[token][row - first_own] = found.total;
      task.stream[token * WIDTH + row] = narrow(shared->x[token][row - first_own] + found.total);
    } else if (stage == IN) {
      const float active = IS_SWIGLU ? swiglu(total, found.partner * inverse) : gelu(total);
      task.hidden[token * MLP_WIDTH + row] = narrow(active);
    } else if (stage == HEAD) {
      task.logits[1LL * token * task.logits_stride + row] = total;
    } else {
      // a hidden unit of the predictor
      const int unit = path.route * NUM_UNITS + row;
      task.foreseen[unit * TOKENS + token] = gelu(total) * widen(task.predictor_out[unit]);
    }
  }

  // which tokens a block keeps, by the router alone
  __device__ __forceinline__ void decide(const Path& path) {
    meet();
    if (warp > 0) return;
    const bool inside = lane < TOKENS;
    const bool forced = inside && shared->position[lane] < task.first_tokens;
    const unsigned wishes = vote(inside && (forced || judge(lane) > 0.0f));
    const unsigned kept = wishes & path.mask & path.alive;
    if (lane == 0) publish(&shared->kept[path.route], static_cast<int>(kept));
  }

  // the MLP's second product and the update of x; its vectors are too long for registers
  __device__ __forceinline__ void finish_block(unsigned mask, bool has_gate) {
    await();
    const int end = find_share(blockIdx.x + 1, WIDTH);
    for (int at = first_own; at < end; at += ROWS) {
      float sum[2][GROUPS][4] = {};
      Piece given[HELD];
#pragma unroll
      for (int piece = 0; piece < HELD; piece++)
        load_piece(given[piece], task.hidden, nullptr, mask, MLP_WIDTH, piece);
#pragma unroll 1
      for (int first = 0; first < MLP_PIECES; first += HELD)
#pragma unroll
        for (int number = 0; number < HELD; number++) {
          const int piece = first + number;
          if (piece >= MLP_PIECES) break;
          multiply_piece<IS_EVEN>(given[number], MLP_WIDTH - piece * PIECE, sum);
          // load a later piece while others are multiplied
          load_piece(given[number], task.hidden, nullptr, mask, MLP_WIDTH, piece + HELD);
        }
      const Sum found = add_up(sum, false);
      const int token = found.token, row = at + found.place;
      if (thread % SHARES || row >= end || !((mask >> token) & 1)) continue;
      const float gate = has_gate ? shared->gate[token] : 1.0f;
      float& x = shared->x[token][row - first_own];
      x += gate * (found.total + shared->mixed[token][row - first_own]);
      task.x[token * WIDTH + row] = narrow(x);
    }
    arrive();
  }

  // --- attention ---------------------------------------------------------------------------------

  // load a head of the token, normalize and rotate it: eight elements per lane
  __device__ __forceinline__ void turn_head(float (&head)[8], const float* from,
                                            const number_t* norm, const float* phase) {
    const int first = lane % LANES * 8;
    load_slice(head, from + first);
    if (norm) {
      float scale[8], square = 0.0f;
      unpack(scale, load_constant(norm + first));
#pragma unroll
      for (int i = 0; i < 8; i++) square += head[i] * head[i];
#pragma unroll
      for (int other = 1; other < LANES; other *= 2) square += shuffle(square, other);
      const float invert = rsqrtf(square / HEAD_WIDTH + task.norm_eps);
#pragma unroll
      for (int i = 0; i < 8; i++) head[i] *= invert * scale[i];
    }
    constexpr int HALF = HEAD_WIDTH / 2;
    const float sign = first < HALF ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const float other = shuffle(head[i], LANES / 2);
      const int at = (first + i) % HALF;
      head[i] = head[i] * phase[at] + sign * other * phase[HALF + at];
    }
  }

  static __device__ __forceinline__ void load_slice(float (&values)[8], const float* from) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      const Words words = load_words(from + i);
      values[i] = __uint_as_float(words.x), values[i + 1] = __uint_as_float(words.y);
      values[i + 2] = __uint_as_float(words.z), values[i + 3] = __uint_as_float(words.w);
    }
  }

  static __device__ __forceinline__ void unpack(float (&values)[8], const Words& words) {
    values[0] = widen_low(words.x), values[1] = widen_high(words.x);
    values[2] = widen_low(words.y), values[3] = widen_high(words.y);
    values[4] = widen_low(words.z), values[5] = widen_high(words.z);
    values[6] = widen_low(words.w), values[7] = widen_high(words.w);
  }

  static __device__ __forceinline__ Words pack(const float (&values)[8]) {
    return {narrow(values[0], values[1]), narrow(values[2], values[3]),
            narrow(values[4], values[5]), narrow(values[6], values[7])};
  }

  // A unit of attention is a token and heads that share keys and values. Its context is divided
  // into spans of SPAN tokens, each processed by one warp, and the spans are grouped into parts;
  // longer contexts have more parts. A program has one part, or several if there are more units
  // than programs.
  __device__ __forceinline__ void attend(int layer, unsigned mask) {
    Item item = shared->items[layer];
    if (mask != shared->all) item = find_item(layer, mask, blockIdx.x);
    for (int number = blockIdx.x; number < item.total;) {
      attend_part(layer, item);
      join(item);
      number += gridDim.x;
      if (number >= item.total) break;
      item = find_item(layer, mask, number);
      // wait until all threads have read the sums
      meet();
    }
    // for programs without a part
    await();
  }

  __device__ Item find_item(int layer, unsigned mask, int number) {
    // each lane computes one token's parts, and the number of parts up to it
    const bool is_own = lane < TOKENS && ((mask >> lane) & 1);
    const int own_length = is_own ? shared->lengths[layer][lane] : 0;
    const int own_spans = is_own ? own_length / SPAN + 1 : 0;
    int all_spans = own_spans;
    for (int other = 1; other < TOKENS; other *= 2) all_spans += ask_lane(all_spans, lane ^ other);
    const int most_parts = gridDim.x / UNITS_EACH;
    int own_parts = most_parts * own_spans / max(all_spans, 1);
    // at least one span per warp
    own_parts = max(min(own_parts, (own_spans + WARPS - 1) / WARPS), is_own ? 1 : 0);
    int up_to = own_parts * UNITS_EACH;
    for (int before = 1; before < TOKENS; before *= 2) {
      const int other = ask_lane(up_to, lane - before);
      if (lane >= before) up_to += other;
    }
    Item item;
    item.total = ask_lane(up_to, TOKENS - 1);
    item.token = min(__popc(vote(lane < TOKENS && up_to <= number)), TOKENS - 1);
    item.num_parts = max(ask_lane(own_parts, item.token), 1);
    item.length = ask_lane(own_length, item.token);
    const int at = number - ask_lane(up_to, item.token) + item.num_parts * UNITS_EACH;
    item.unit = at / item.num_parts;
    item.part = at % item.num_parts;
    item.first = number - item.part;
    const int num_spans = item.length / SPAN + 1;
    item.from = item.part * num_spans / item.num_parts;
    item.to = (item.part + 1) * num_spans / item.num_parts;
    return item;
  }

  __device__ __forceinline__ int* find_length(int layer, int number) {
    return task.lengths + 1LL * layer * task.num_rows + shared->row[number];
  }

  // process spans `from` to `to` of a context; each warp's sums are left in shared memory
  __device__ __forceinline__ void attend_part(int layer, const Item& item) {
    const int length = item.length, from = item.from, to = item.to;
    const int kv_head = item.unit / SETS, slice = lane % LANES * 8, which = lane / LANES;
    const int row = layer * task.num_rows + shared->row[item.token];
    const int* table = task.tables + row * task.max_pages;
    float query[QUERIES][8], top[QUERIES], sum[QUERIES], mix[QUERIES][8];
#pragma unroll 1
    for (int span = from + warp;; span += WARPS) {
      // what is already stored is loaded while other programs arrive
      Words keys[TURNS], values[TURNS];
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        const int token = span * SPAN + turn * ABREAST + which;
        keys[turn] = values[turn] = {0, 0, 0, 0};
        if (span < to && token < length && turn * ABREAST + which < SPAN) {
          const long long place = find_place(table, kv_head, token) + slice;
          keys[turn] = load_words(task.key_pages + place);
          values[turn] = load_words(task.value_pages + place);
        }
      }
      if (span < from + WARPS) {
        await();
        begin_part(query, top, sum, mix, table, layer, item,
                   to > length / SPAN && (to - from) % WARPS == warp);
      }
      if (span >= to) break;
      float score[TURNS][QUERIES];
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        float key[8];
        unpack(key, keys[turn]);
        const int token = span * SPAN + turn * ABREAST + which;
        const bool there = token < length && turn * ABREAST + which < SPAN;
#pragma unroll
        for (int q = 0; q < QUERIES; q++) {
          score[turn][q] = sum_head(query[q], key);
          if (!there) score[turn][q] = 2.0f * LOWEST;
        }
      }
#pragma unroll
      for (int q = 0; q < QUERIES; q++) {
        float new_top = top[q];
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) new_top = fmaxf(new_top, score[turn][q]);
        const float fade = __expf(top[q] - new_top);
        top[q] = new_top;
        sum[q] *= fade;
#pragma unroll
        for (int i = 0; i < 8; i++) mix[q][i] *= fade;
#pragma unroll
        for (int turn = 0; turn < TURNS; turn++) {
          const float weight = __expf(score[turn][q] - new_top);
          float value[8];
          unpack(value, values[turn]);
          sum[q] += weight;
#pragma unroll
          for (int i = 0; i < 8; i++) mix[q][i] += weight * value[i];
        }
      }
    }
    // combine the lanes that read different keys
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
      for (int other = LANES; other < 32; other *= 2) {
        const float other_top = shuffle(top[q], other), new_top = fmaxf(top[q], other_top);
        const float fade = __expf(top[q] - new_top);
        const float other_fade = __expf(other_top - new_top);
        sum[q] = sum[q] * fade + shuffle(sum[q], other) * other_fade;
#pragma unroll
        for (int i = 0; i < 8; i++)
          mix[q][i] = mix[q][i] * fade + shuffle(mix[q][i], other) * other_fade;
        top[q] = new_top;
      }
      float* to_mix = sums + (warp * QUERIES + q) * HEAD_WIDTH + slice;
      if (which == 0)
        for (int i = 0; i < 8; i++) to_mix[i] = mix[q][i];
      if (lane == 0) {
        float* tops = sums + WARPS * QUERIES * HEAD_WIDTH;
        tops[warp * QUERIES + q] = top[q];
        tops[WARPS * QUERIES + warp * QUERIES + q] = sum[q];
      }
    }
  }

  // load the queries; one warp starts with the newest key and value, which are not in the pages yet
  __device__ __forceinline__ void begin_part(float (&query)[QUERIES][8], float (&top)[QUERIES],
                                             float (&sum)[QUERIES], float (&mix)[QUERIES][8],
                                             const int* table, int layer, const Item& item,
                                             bool has_newest) {
    const int number = item.token, unit = item.unit, length = item.length;
    const int kv_head = unit / SETS, query_head = kv_head * SHARING + unit % SETS * QUERIES;
    const int slice = lane % LANES * 8, which = lane / LANES;
    const float* qkv = task.qkv + number * PROJECTED;
    const float* phase = shared->phases[number];
    const number_t* norm = task.norm_query ? task.norm_query + layer * HEAD_WIDTH : nullptr;
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
      turn_head(query[q], qkv + (query_head + q) * HEAD_WIDTH, norm, phase);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        query[q][i] *= rsqrtf(static_cast<float>(HEAD_WIDTH));
        mix[q][i] = 0.0f;
      }
      top[q] = LOWEST;
      sum[q] = 0.0f;
    }
    if (!has_newest) return;
    float key[8], value[8];
    const float* at = qkv + (NUM_HEADS + kv_head) * HEAD_WIDTH;
    turn_head(key, at, task.norm_key ? task.norm_key + layer * HEAD_WIDTH : nullptr, phase);
    load_slice(value, at + NUM_KV_HEADS * HEAD_WIDTH + slice);
#pragma unroll
    for (int q = 0; q < QUERIES; q++) {
      const float score = sum_head(query[q], key);
      if (which == 0) {
        top[q] = score;
        sum[q] = 1.0f;
#pragma unroll
        for (int i = 0; i < 8; i++) mix[q][i] = value[i];
      }
    }
    if (which == 0 && unit % SETS == 0) {
      const long long place = find_place(table, kv_head, length) + slice;
      store_words(task.key_pages + place, pack(key));
      store_words(task.value_pages + place, pack(value));
    }
  }

  __device__ __forceinline__ float sum_head(const float (&a)[8], const float (&b)[8]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += a[i] * b[i];
#pragma unroll
    for (int other = 1; other < LANES; other *= 2) sum += shuffle(sum, other);
    return sum;
  }

  __device__ __forceinline__ long long find_place(const int* table, int kv_head, int token) {
    const long long page = table[token / PAGE_SIZE];
    return ((page * NUM_KV_HEADS + kv_head) * PAGE_SIZE + token % PAGE_SIZE) * HEAD_WIDTH;
  }

  // combine this program's warps and, in the last program to finish, a unit's parts
  __device__ __forceinline__ void join(const Item& own) {
    const int number = own.token, unit = own.unit, first = own.first, num_parts = own.num_parts;
    const int query_head = unit / SETS * SHARING + unit % SETS * QUERIES;
    const int item = first + own.part, num_warps = min(WARPS, own.to - own.from + 1);
    meet();
    for (int at = thread; at < QUERIES * HEAD_WIDTH; at += THREADS) {
      const int q = at / HEAD_WIDTH, element = at % HEAD_WIDTH;
      const float* tops = sums + WARPS * QUERIES * HEAD_WIDTH;
      float top = LOWEST;
      for (int other = 0; other < num_warps; other++) top = fmaxf(top, tops[other * QUERIES + q]);
      float whole = 0.0f, mix = 0.0f;
#pragma unroll 4
      for (int other = 0; other < num_warps; other++) {
        const float weight = __expf(tops[other * QUERIES + q] - top);
        whole += weight * tops[(WARPS + other) * QUERIES + q];
        mix += weight * sums[(other * QUERIES + q) * HEAD_WIDTH + element];
      }
      if (num_parts == 1) {
        task.mixed[number * MIXED + (query_head + q) * HEAD_WIDTH + element] = narrow(mix / whole);
      } else {
        task.part_out[(item * QUERIES + q) * HEAD_WIDTH + element] = mix;
        if (element == 0) {
          task.part_top[item * QUERIES + q] = top;
          task.part_sum[item * QUERIES + q] = whole;
        }
      }
    }
    if (num_parts == 1) return;
    meet();
    unsigned* arrivals = task.arrivals + number * UNITS_EACH + unit;
    if (thread == 0) {
      shared->is_last = count_up(arrivals) == static_cast<unsigned>(num_parts - 1);
      if (shared->is_last) *arrivals = 0;
    }
    meet();
    if (!shared->is_last) return;
    for (int at = thread; at < QUERIES * HEAD_WIDTH; at += THREADS) {
      const int q = at / HEAD_WIDTH, element = at % HEAD_WIDTH;
      float top = LOWEST, whole = 0.0f, mix = 0.0f;
#pragma unroll 8
      for (int other = first; other < first + num_parts; other++) {
        const float other_top = load_fresh(task.part_top + other * QUERIES + q);
        const float other_whole = load_fresh(task.part_sum + other * QUERIES + q);
        const float* out = task.part_out + (other * QUERIES + q) * HEAD_WIDTH;
        const float other_mix = load_fresh(out + element);
        const float new_top = fmaxf(top, other_top);
        const float fade = __expf(top - new_top), weight = __expf(other_top - new_top);
        whole = whole * fade + other_whole * weight;
        mix = mix * fade + other_mix * weight;
        top = new_top;
      }
      task.mixed[number * MIXED + (query_head + q) * HEAD_WIDTH + element] = narrow(mix / whole);
    }
  }

  // all blocks and the head
  __device__ __forceinline__ void run(Path& path, unsigned valid) {
    for (int layer = 0; layer <= NUM_LAYERS; layer++) {
      Stage stage = layer == NUM_LAYERS ? HEAD : QKV;
      unsigned mask = valid;
      if (stage == QKV) {
        path.begin(task, valid, layer);
      } else {
        // tokens whose logits are requested
        const int number = min(*task.num_sampled, TOKENS);
        mask = (1u << number) - 1;
        meet();
        if (thread < TOKENS) shared->row[thread] = thread < number ? task.sampled[thread] : 0;
        meet();
      }
      bool asks = stage == QKV && path.asks;
      while (true) {
        const int target = stage == QKV && path.target != path.ready ? path.target : -1;
        if (stage != QKV || asks || target >= 0) run_stage(stage, path, mask, asks, target);
        if (stage == HEAD) break;
        if (stage == QKV) {
          if (target >= 0) path.ready = target;
          if (asks) path.mask = static_cast<unsigned>(await_shared(&shared->kept[path.route]));
          asks = false;
          if (path.goes_back(layer)) continue;
          const bool is_kept = blockIdx.x == 0 && thread < TOKENS && ((path.mask >> thread) & 1);
          if (path.route >= 0 && blockIdx.x == 0 && thread < task.num_tokens)
            task.taken[path.route * task.num_tokens + thread] = is_kept;
          if (!path.mask) break;
          mask = path.mask;
          attend(layer, mask);
          arrive();
          // all programs have copied the lengths
          if (is_kept) *find_length(layer, thread) += 1;
          path.ready = -1;
          stage = OUT;
        } else if (stage == OUT) {
          stage = IN;
        } else {
          finish_block(mask, path.route >= 0);
          break;
        }
      }
    }
  }
};

// --- the kernel ----------------------------------------------------------------------------------

// bit mask of the tokens that have a row
__device__ unsigned find_tokens(const Task& task, Shared* shared) {
  const int token = threadIdx.x % 32;
  const int row = token < task.num_tokens ? task.row[token] : -1;
  // all warps write the same values
  if (token < TOKENS) {
    shared->row[token] = max(row, 0);
    shared->position[token] = row >= 0 ? task.position[token] : 0;
  }
  return vote(row >= 0);
}

extern "C" __global__ void __launch_bounds__(THREADS + 32, 1)
    stream(const __grid_constant__ Task task) {
  SHARED_MEMORY(memory);
  char* ring = memory;
  float* sums = reinterpret_cast<float*>(memory + RING_BYTES);
  Shared* shared = reinterpret_cast<Shared*>(memory + RING_BYTES + SUMS_BYTES);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    shared->gates.open();
  }
  for (int route = threadIdx.x; route < NUM_ROUTES; route += blockDim.x) shared->kept[route] = -1;
  meet_all();
  const unsigned valid = find_tokens(task, shared);
  Path path;
  path.ready = -1;
  path.alive = ~0u;
  if (warp == WARPS) {
    Copier copier(shared, ring, lane);
    meet_warp();
    copier.run(task, path, valid);
  } else {
    Worker worker(task, shared, ring, sums);
    worker.meet();
    worker.load_own(valid);
    worker.load_contexts(valid);
    worker.meet();
    worker.run(path, valid);
  }
  // by the time the last program gets here, all have passed every barrier: reset the counters
  meet_all();
  if (threadIdx.x == 0 && count_up(&task.counters[2]) == gridDim.x - 1) {
    task.counters[0] = 0;
    task.counters[1] = 0;
    task.counters[2] = 0;
  }
}
