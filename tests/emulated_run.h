// Runs the kernel named KERNEL on the emulated GPU; follows its source.

namespace emulated {

static const Task* argument;

static void enter() {
  KERNEL(*argument);
  current->done = true;
  progress++;
  yield();
}

static void go_on(Fiber& fiber) {
  current = &fiber;
  if (_setjmp(scheduler)) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  setcontext(&fiber.context);
}

}  // namespace emulated

// 0, or 1 if the threads wait for each other
extern "C" int run(const Task* task, int programs, int threads, int shared_bytes) {
  using namespace emulated;
  constexpr size_t STACK = 64 << 10;
  argument = task, num_programs = programs, num_threads = threads;
  std::vector<Program> all(programs);
  std::vector<char> stacks(STACK * programs * threads);
  fibers = std::vector<Fiber>(static_cast<size_t>(programs) * threads);
  copies.clear();
  for (int number = 0; number < programs; number++) {
    all[number].number = number;
    all[number].memory = static_cast<char*>(aligned_alloc(128, (shared_bytes + 127) / 128 * 128));
    memset(all[number].memory, 0xff, shared_bytes);
  }
  for (size_t number = 0; number < fibers.size(); number++) {
    Fiber& fiber = fibers[number];
    fiber.program = &all[number / threads];
    fiber.thread.x = number % threads;
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = stacks.data() + STACK * number;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
  }
  size_t num_done = 0;
  int idle = 0;
  while (num_done < fibers.size() && idle < 8) {
    const unsigned long long before = progress;
    num_done = 0;
    for (Fiber& fiber : fibers) {
      if (!fiber.done) go_on(fiber);
      num_done += fiber.done;
    }
    // what was asked for arrives late, and not in order
    std::vector<Copy> arriving;
    arriving.swap(copies);
    for (size_t number = arriving.size(); number-- > 0;) {
      const Copy& copy = arriving[number];
      memcpy(copy.to, copy.from, copy.num_bytes);
      copy.gate->bytes -= static_cast<int>(copy.num_bytes);
      pass_gate(copy.gate);
      progress++;
    }
    idle = progress == before ? idle + 1 : 0;
  }
  for (Program& program : all) free(program.memory);
  return num_done < fibers.size();
}
