#include "device.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <thread>
#include <tuple>
#include <vector>

namespace fake {
namespace {

// ---- the memory of all devices: the same pages twice, for the host without any right ----
constexpr size_t ARENA = size_t(4) << 30;  // of a device; pages exist where something was written
constexpr size_t GRAIN = 512;

struct Memory {
  char* host;     // the addresses of tensors
  char* streams;  // the same memory for the threads of streams
  pid_t process = getpid();

  Memory() {
    const size_t all = ARENA * MOST_DEVICES;
    int file = memfd_create("fake_device", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, all) == 0, "no memory for the fake device");
    auto map = [&](int rights) {
      void* p = mmap(nullptr, all, rights, MAP_SHARED | MAP_NORESERVE, file, 0);
      TORCH_CHECK(p != MAP_FAILED, "no addresses for the fake device");
      return static_cast<char*>(p);
    };
    host = map(PROT_NONE);
    streams = map(PROT_READ | PROT_WRITE);
    close(file);
  }
};

std::atomic<bool> started{false};

Memory& memory() {
  static auto* memory = new Memory();  // never destroyed: threads of streams outlive static objects
  started = true;
  TORCH_CHECK(memory->process == getpid(), "the fake device was used before this process was forked");
  return *memory;
}

int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

// ---- errors of kernels ----
std::mutex error_mutex;
std::string error;

void keep_error(const char* what) {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (error.empty()) error = what;
}

// ---- delays ----
struct Delays {
  std::atomic<int64_t> seed{-1}, most{0};
  std::atomic<double> share{0};
} delays;

// ---- what the host waited for, and what it records ----
std::atomic<int64_t> waits{0};
thread_local std::shared_ptr<Graph> recorded;
std::atomic<int64_t> graphs{0};
thread_local c10::DeviceIndex recorded_device = 0;
thread_local int64_t recorded_pool = 0;  // the memory of a graph is used again by none but it

void count_wait() {
  TORCH_CHECK(!recorded, "the host waits for the device while a graph is recorded");
  waits++;
}

// ---- a stream: a queue and its thread ----
struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Task> tasks;
  uint64_t added = 0, done = 0;
  std::thread thread;
  int number;
  int threads = at::get_num_threads();

  explicit Queue(int number) : number(number) {
    thread = std::thread([this] { run(); });
    thread.detach();
  }

  void run() {
    at::set_num_threads(threads);
    std::mt19937 random;
    int64_t seed = -1;
    for (;;) {
      Task task;
      {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return !tasks.empty(); });
        task = std::move(tasks.front());
        tasks.pop_front();
      }
      if (int64_t wanted = delays.seed; wanted >= 0) {
        if (wanted != seed) random.seed((seed = wanted) * 1000003 + number);
        double drawn = random() / 4294967296.0;
        int64_t pause = random() % (delays.most + 1);
        if (drawn < delays.share) std::this_thread::sleep_for(std::chrono::microseconds(pause));
      }
      try {
        task();
      } catch (const c10::Error& e) {
        keep_error(e.what_without_backtrace());
      } catch (const std::exception& e) {
        keep_error(e.what());
      }
      task = nullptr;
      std::lock_guard<std::mutex> lock(mutex);
      done++;
      changed.notify_all();
    }
  }

  void add(Task task) {
    std::lock_guard<std::mutex> lock(mutex);
    tasks.push_back(std::move(task));
    added++;
    changed.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    const auto until = added;
    changed.wait(lock, [&] { return done >= until; });
  }

  bool is_idle() {
    std::lock_guard<std::mutex> lock(mutex);
    return done == added;
  }
};

struct Device {
  std::mutex mutex;
  std::deque<std::unique_ptr<Queue>> streams;
};
std::array<Device, MOST_DEVICES>& devices() {
  static auto* devices = new std::array<Device, MOST_DEVICES>();
  return *devices;
}

thread_local c10::DeviceIndex chosen_device = 0;
thread_local std::array<c10::StreamId, MOST_DEVICES> chosen_stream{};

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(TYPE, device), id);
}

Queue& queue(c10::Stream stream) {
  memory();  // checks the process
  Device& device = devices().at(stream.device_index());
  std::lock_guard<std::mutex> lock(device.mutex);
  while (device.streams.size() <= size_t(stream.id())) {
    int number = stream.device_index() * 1000 + device.streams.size();
    device.streams.push_back(std::make_unique<Queue>(number));
  }
  return *device.streams[stream.id()];
}

// ---- allocator ----
struct Block {
  void* p;
  size_t size;
  c10::Stream stream;
  int64_t pool;
  std::set<c10::StreamId> others = {};  // by record_stream
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    const auto device = current_device();
    if (n == 0) return {nullptr, c10::Device(TYPE, device)};
    const size_t size = (n + GRAIN - 1) / GRAIN * GRAIN;
    const auto stream = current_stream(device);
    std::lock_guard<std::mutex> lock(mutex_);
    Pool& pool = pools_.at(device);
    pool.reclaim();
    auto& free = pool.free[{recorded_pool, stream.id(), size}];
    Block* block;
    if (free.empty()) {
      TORCH_CHECK(pool.used + size <= ARENA, "the fake device is out of memory");
      block = new Block{memory().host + device * ARENA + pool.used, size, stream, recorded_pool};
      pool.used += size;
      spoil(*block);
    } else {
      block = free.back();
      free.pop_back();
    }
    pool.stats.allocated_bytes[0].increase(size);
    pool.stats.reserved_bytes[0].peak = pool.stats.reserved_bytes[0].current = pool.used;
    return {block->p, block, &released, c10::Device(TYPE, device)};
  }

  void release(Block* block) {
    std::lock_guard<std::mutex> lock(mutex_);
    Pool& pool = pools_.at(block->stream.device_index());
    pool.stats.allocated_bytes[0].decrease(block->size);
    if (getpid() != memory().process) return;
    std::vector<SharedEvent> events;
    for (auto id : block->others) {
      events.push_back(std::make_shared<Event>());
      record(events.back(), stream_of(block->stream.device_index(), id));
    }
    block->others.clear();
    if (events.empty()) {
      pool.keep(block);
    } else {
      pool.pending.emplace_back(block, std::move(events));
    }
  }

  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    std::lock_guard<std::mutex> lock(mutex_);
    auto* block = static_cast<Block*>(ptr.get_context());
    if (block && stream != block->stream) block->others.insert(stream.id());
  }

  void copy_data(void* to, const void* from, size_t n) const override {
    enqueue(current_stream(current_device()),
            [=] { std::memcpy(seen_by_streams(to), seen_by_streams(from), n); });
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    return pools_.at(device).stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    pools_.at(device).stats.allocated_bytes[0].reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> lock(mutex_);
    pools_.at(device).stats.allocated_bytes[0].reset_peak();
  }

 private:
  struct Pool {
    size_t used = 0;
    std::map<std::tuple<int64_t, c10::StreamId, size_t>, std::vector<Block*>> free;
    std::deque<std::pair<Block*, std::vector<SharedEvent>>> pending;
    c10::CachingDeviceAllocator::DeviceStats stats;

    /// Freed memory goes back to its stream at once: whoever reads it later reads NaN.
    void keep(Block* block) {
      spoil(*block);
      free[{block->pool, block->stream.id(), block->size}].push_back(block);
    }
    void reclaim() {
      for (auto& [block, events] : pending) {
        if (!block || !std::all_of(events.begin(), events.end(), query)) continue;
        keep(block);
        block = nullptr;
      }
      while (!pending.empty() && !pending.front().first) pending.pop_front();
    }
  };

  static void spoil(const Block& block) {
    auto task = [p = seen_by_streams(block.p), size = block.size] { std::memset(p, 0xFF, size); };
    if (block.pool)
      enqueue(block.stream, task);  // as part of a graph, if one is recorded
    else
      queue(block.stream).add(task);
  }
  static void released(void* context);

  std::mutex mutex_;
  std::array<Pool, MOST_DEVICES> pools_;
};

Allocator& the_allocator() {
  static auto* allocator = new Allocator();
  return *allocator;
}

void Allocator::released(void* context) { the_allocator().release(static_cast<Block*>(context)); }

// ---- pinned memory of the host ----
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    void* p = std::aligned_alloc(64, (n + 63) / 64 * 64);
    std::memset(p, 0xFF, n);
    std::lock_guard<std::mutex> lock(mutex_);
    blocks_[p] = n;
    return {p, p, &released, c10::Device(c10::DeviceType::CPU)};
  }
  bool has(const void* p) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto after = blocks_.upper_bound(const_cast<void*>(p));
    if (after == blocks_.begin()) return false;
    --after;
    return p < static_cast<char*>(after->first) + after->second;
  }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  c10::DeleterFnPtr raw_deleter() const override { return &released; }

 private:
  static void released(void* p);
  std::mutex mutex_;
  std::map<void*, size_t> blocks_;
};

Pinned& the_pinned() {
  static auto* pinned = new Pinned();
  return *pinned;
}

void Pinned::released(void* p) {
  std::lock_guard<std::mutex> lock(the_pinned().mutex_);
  the_pinned().blocks_.erase(p);
  std::free(p);
}

}  // namespace

// ---- devices ----
c10::DeviceIndex device_count() {
  const char* count = std::getenv("FAKE_DEVICES");
  return count ? std::atoi(count) : 4;
}
c10::DeviceIndex current_device() { return chosen_device; }
void set_device(c10::DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "there is no fake device ", int(device));
  chosen_device = device;
}

// ---- memory ----
void* seen_by_streams(const void* device) {
  if (!device) return nullptr;
  return memory().streams + (static_cast<const char*>(device) - memory().host);
}
bool is_device_memory(const void* p) {
  return started && p >= memory().host && p < memory().host + ARENA * MOST_DEVICES;
}
c10::DeviceAllocator* allocator() { return &the_allocator(); }
c10::Allocator* pinned_allocator() { return &the_pinned(); }
bool is_pinned(const void* p) { return the_pinned().has(p); }

// ---- streams ----
c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = current_device();
  return stream_of(device, chosen_stream.at(device));
}
c10::Stream exchange_stream(c10::Stream stream) {
  auto before = current_stream(stream.device_index());
  chosen_stream.at(stream.device_index()) = stream.id();
  return before;
}
c10::Stream new_stream(c10::DeviceIndex device) {
  if (device < 0) device = current_device();
  queue(stream_of(device, 0));  // the default one exists
  Device& d = devices().at(device);
  std::unique_lock<std::mutex> lock(d.mutex);
  const auto id = d.streams.size();
  lock.unlock();
  queue(stream_of(device, id));
  return stream_of(device, id);
}
void enqueue(c10::Stream stream, Task task) {
  if (recorded && stream.device_index() == recorded_device)
    recorded->emplace_back(stream, std::move(task));
  else
    queue(stream).add(std::move(task));
}
void synchronize(c10::Stream stream) {
  count_wait();
  queue(stream).wait();
  check_errors();
}
void synchronize_device(c10::DeviceIndex device) {
  count_wait();
  if (device < 0) device = current_device();
  size_t count;
  {
    std::lock_guard<std::mutex> lock(devices().at(device).mutex);
    count = devices().at(device).streams.size();
  }
  for (size_t id = 0; id < count; id++) queue(stream_of(device, id)).wait();
  check_errors();
}
bool idle(c10::Stream stream) { return queue(stream).is_idle(); }
void check_errors() {
  std::lock_guard<std::mutex> lock(error_mutex);
  if (error.empty()) return;
  std::string what;
  std::swap(what, error);
  TORCH_CHECK(false, "a kernel of the fake device failed: ", what);
}
void set_delays(int64_t seed, double share, int64_t most) {
  delays.share = share;
  delays.most = most;
  delays.seed = seed;
}
int64_t host_waits() { return waits; }
int64_t tasks_run(c10::DeviceIndex device) {
  int64_t total = 0;
  std::lock_guard<std::mutex> lock(devices().at(device).mutex);
  for (auto& stream : devices().at(device).streams) {
    std::lock_guard<std::mutex> inner(stream->mutex);
    total += stream->done;
  }
  return total;
}

// ---- events ----
void record(const SharedEvent& event, c10::Stream stream) {
  uint64_t number;
  {
    std::lock_guard<std::mutex> lock(event->mutex);
    number = ++event->recorded;
  }
  enqueue(stream, [event, number] {
    std::lock_guard<std::mutex> lock(event->mutex);
    event->reached = std::max(event->reached, number);
    event->when = now();
    event->changed.notify_all();
  });
}
namespace {
void reach(const SharedEvent& event, uint64_t number) {
  std::unique_lock<std::mutex> lock(event->mutex);
  event->changed.wait(lock, [&] { return event->reached >= number; });
}
}  // namespace
void block(const SharedEvent& event, c10::Stream stream) {
  std::unique_lock<std::mutex> lock(event->mutex);
  const auto number = event->recorded;
  lock.unlock();
  if (number) enqueue(stream, [event, number] { reach(event, number); });
}
bool query(const SharedEvent& event) {
  std::lock_guard<std::mutex> lock(event->mutex);
  return event->reached == event->recorded;
}
void synchronize(const SharedEvent& event) {
  count_wait();
  std::unique_lock<std::mutex> lock(event->mutex);
  const auto number = event->recorded;
  lock.unlock();
  reach(event, number);
  check_errors();
}
double milliseconds(const SharedEvent& first, const SharedEvent& second) {
  for (const auto& event : {first, second}) {
    TORCH_CHECK(event->timed, "an event without enable_timing=True has no time");
    TORCH_CHECK(event->recorded && query(event), "an event was not reached yet");
  }
  return (second->when - first->when) / 1e6;
}

// ---- graphs ----
void begin_recording(const std::shared_ptr<Graph>& graph) {
  recorded = graph;
  recorded_device = current_device();
  recorded_pool = ++graphs;
}
void end_recording() {
  recorded = nullptr;
  recorded_pool = 0;
}
bool recording() { return recorded != nullptr; }
void replay(const Graph& graph) {
  for (const auto& [stream, task] : graph) queue(stream).add(task);
}

}  // namespace fake
