// The runtime of the fake accelerator: memory that the host cannot read, streams that are threads,
// events, and seeded delays. It knows nothing of operators.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace fake {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 16;

using Task = std::function<void()>;

// ---- devices ----
c10::DeviceIndex device_count();
c10::DeviceIndex current_device();
void set_device(c10::DeviceIndex device);

// ---- memory ----
/// The address at which threads of streams see memory of a device. The host would fault on `device`.
void* seen_by_streams(const void* device);
/// Whether an address is memory of a device.
bool is_device_memory(const void* p);
c10::DeviceAllocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* p);

// ---- streams ----
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(c10::Stream stream);
c10::Stream new_stream(c10::DeviceIndex device);
/// Add work to the end of a stream, and return.
void enqueue(c10::Stream stream, Task task);
void synchronize(c10::Stream stream);
void synchronize_device(c10::DeviceIndex device);
bool idle(c10::Stream stream);
/// Raise the first error of a kernel, as a device does: where the host waits.
void check_errors();
/// From here on each stream pauses before `share` of its tasks, for up to `most` microseconds.
void set_delays(int64_t seed, double share, int64_t most);
/// How often the host waited for a stream, an event or a device.
int64_t host_waits();
/// How many tasks the streams of a device have run.
int64_t tasks_run(c10::DeviceIndex device);

// ---- events ----
struct Event {
  bool timed = false;
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0;  // how often it was put into a stream
  uint64_t reached = 0;   // the last of these that the stream has reached
  int64_t when = 0;       // nanoseconds of the steady clock
};
using SharedEvent = std::shared_ptr<Event>;

void record(const SharedEvent& event, c10::Stream stream);
/// The stream waits for the latest record of the event.
void block(const SharedEvent& event, c10::Stream stream);
bool query(const SharedEvent& event);
void synchronize(const SharedEvent& event);
double milliseconds(const SharedEvent& first, const SharedEvent& second);

// ---- graphs ----
/// What a thread puts into streams while it records: none of it runs until a replay.
using Graph = std::vector<std::pair<c10::Stream, Task>>;
void begin_recording(const std::shared_ptr<Graph>& graph);
void end_recording();
bool recording();
void replay(const Graph& graph);

}  // namespace fake
