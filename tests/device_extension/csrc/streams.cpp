// Streams: queues of work that one thread takes from, late and in a random order that events allow.

#include "late.h"

#include <c10/util/Exception.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <algorithm>
#include <deque>
#include <list>
#include <map>
#include <mutex>
#include <random>
#include <thread>

namespace late {
namespace {

constexpr int kStreams = 32;  // of a device; then they are handed out again
constexpr size_t kPatience = 256;  // pieces that may wait before some run although nobody waits for them

struct Piece {
  Work work;      // or, if empty:
  Event awaited;  // a wait for an event,
  Event recorded; // or its record
};

struct Queue {
  std::deque<Piece> pieces;
  Sequence launched = 0, done = 0;
};

struct Target {  // the host waits until this much of a stream is done
  int device;
  int64_t stream;
  Sequence sequence;
};

int read(const char* name, int otherwise) {
  const char* text = std::getenv(name);
  return text == nullptr ? otherwise : std::atoi(text);
}

class Scheduler {
 public:
  Scheduler() : random_(read("LATE_SEED", 0) * 1000003u + read("RANK", 0)), late_ms_(read("LATE_MICROSECONDS", 2000) / 1e3) {}

  // Without end, if negative: only what the host waits for runs at all.
  bool is_lazy() const { return late_ms_ < 0; }

  void launch(Key key, Piece piece, Event* recorded = nullptr) {
    std::unique_lock lock(mutex_);
    start();
    Queue& queue = queues_[key];
    ++queue.launched;
    ++waiting_;
    if (recorded != nullptr) {
      *recorded = std::make_shared<EventState>(EventState{key.first, key.second, queue.launched, false});
      piece.recorded = *recorded;
    }
    queue.pieces.push_back(std::move(piece));
    if (waiting_ == 1 || waiting_ > kPatience) to_do_.notify_one();
  }

  bool is_done(const Target& target) {
    std::unique_lock lock(mutex_);
    return done(target);
  }

  void await(const std::vector<Target>& targets, bool raises = true) {
    std::unique_lock lock(mutex_);
    for (const Target& target : targets) {
      if (done(target)) continue;
      auto place = demands_.insert(demands_.end(), target);
      is_frugal_ = is_lazy() || random_() % 2;
      to_do_.notify_one();
      finished_.wait(lock, [&] { return done(target); });
      demands_.erase(place);
    }
    if (raises && !error_.empty()) {
      std::string error = std::move(error_);
      error_.clear();
      lock.unlock();
      TORCH_CHECK(false, "an operation failed on the late device: ", error);
    }
  }

  std::vector<Target> everything(int device) {
    std::unique_lock lock(mutex_);
    std::vector<Target> targets;
    for (auto& [key, queue] : queues_)
      if (key.first == device) targets.push_back({key.first, key.second, queue.launched});
    return targets;
  }

  bool happened(const Event& event) {
    std::unique_lock lock(mutex_);
    return event->done;
  }

  void set_lateness(double milliseconds) {
    std::unique_lock lock(mutex_);
    late_ms_ = milliseconds;
  }

  int64_t new_stream(int device) {
    std::unique_lock lock(mutex_);
    return 1 + (made_[device]++ % kStreams);
  }

 private:
  bool done(const Target& target) { return queues_[{target.device, target.stream}].done >= target.sequence; }

  void start() {
    if (started_) return;
    started_ = true;
    std::thread([this] { run(); }).detach();
  }

  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      to_do_.wait(lock, [&] { return waiting_ > 0 && (!is_lazy() || !demands_.empty()); });
      if (demands_.empty() && waiting_ <= kPatience) {  // nobody waits: be late
        std::chrono::duration<double, std::milli> pause(late_ms_ * (random_() % 1000) / 1000);
        to_do_.wait_for(lock, pause, [&] { return !demands_.empty() || waiting_ > kPatience; });
      }
      size_t burst = 1 + random_() % 64;
      draw_favours();
      while (burst-- > 0 && waiting_ > 0 && (!is_lazy() || !demands_.empty()))
        if (!run_one(lock)) {
          to_do_.wait_for(lock, std::chrono::microseconds(200));  // all streams wait for other processes
          break;
        }
    }
  }

  void draw_favours() {
    for (auto& [key, queue] : queues_) favours_[key] = random_();
  }

  // Run one piece of a stream that can go on. False if there is none.
  bool run_one(std::unique_lock<std::mutex>& lock) {
    std::vector<Key> keys;
    if (is_frugal_)
      for (const Target& target : demands_)
        if (!done(target)) keys.push_back(needed({target.device, target.stream}));
    std::vector<Key> others;
    for (auto& [key, queue] : queues_)
      if (!queue.pieces.empty() && !is_lazy()) others.push_back(key);
    std::sort(others.begin(), others.end(), [&](auto& a, auto& b) { return favours_[a] > favours_[b]; });
    keys.insert(keys.end(), others.begin(), others.end());
    for (const Key& key : keys)
      if (advance(lock, key)) return true;
    return false;
  }

  // The stream on which this one depends at present, perhaps itself.
  Key needed(Key key) {
    for (int depth = 0; depth < 64; ++depth) {
      Queue& queue = queues_[key];
      if (queue.pieces.empty() || !queue.pieces.front().awaited || queue.pieces.front().awaited->done) break;
      key = {queue.pieces.front().awaited->device, queue.pieces.front().awaited->stream};
    }
    return key;
  }

  bool advance(std::unique_lock<std::mutex>& lock, Key key) {
    Queue& queue = queues_[key];
    if (queue.pieces.empty()) return false;
    Piece& piece = queue.pieces.front();
    if (piece.awaited && !piece.awaited->done) return false;
    if (piece.work) {
      lock.unlock();
      bool is_over = true;
      std::string error;
      try {
        is_over = piece.work();
      } catch (const std::exception& caught) {
        error = caught.what();
      }
      lock.lock();
      if (!error.empty() && error_.empty()) error_ = error;
      if (!is_over) return false;
    }
    if (piece.recorded) piece.recorded->done = true;
    Piece over = std::move(queue.pieces.front());
    queue.pieces.pop_front();
    ++queue.done;
    --waiting_;
    finished_.notify_all();
    lock.unlock();
    over = {};  // what it held is freed without the lock
    lock.lock();
    return true;
  }

  std::mutex mutex_;
  std::condition_variable to_do_, finished_;
  std::map<Key, Queue> queues_;
  std::map<Key, uint32_t> favours_;
  std::list<Target> demands_;
  std::map<int, int64_t> made_;
  std::mt19937 random_;
  std::string error_;  // of an operation, told where the host next waits
  size_t waiting_ = 0;
  double late_ms_;
  bool is_frugal_ = false, started_ = false;
};

Scheduler& scheduler() {
  static Scheduler* one = new Scheduler();  // never destroyed: its thread outlives main
  return *one;
}

thread_local int device_now = 0;
thread_local std::map<int, int64_t> streams_now;

c10::Stream make(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, device), id);
}

}  // namespace

int device_count() {
  static int count = read("LATE_DEVICES", 8);
  return count;
}
int current_device() { return device_now; }
void set_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "the late device has no number ", device);
  device_now = device;
}
c10::Stream current_stream(int device) {
  if (device < 0) device = device_now;
  auto found = streams_now.find(device);
  return make(device, found == streams_now.end() ? 0 : found->second);
}
c10::Stream exchange_stream(c10::Stream stream) {
  c10::Stream before = current_stream(stream.device_index());
  streams_now[stream.device_index()] = stream.id();
  return before;
}
c10::Stream default_stream(int device) { return make(device < 0 ? device_now : device, 0); }
c10::Stream new_stream(int device) {
  if (device < 0) device = device_now;
  return make(device, scheduler().new_stream(device));
}

void launch(c10::Stream stream, const std::string& name, const Accesses& accesses, Work work) {
  note_launch(stream, name, accesses);
  scheduler().launch(key_of(stream), {std::move(work), nullptr, nullptr});
}
Event record(c10::Stream stream) {
  Event event;
  Clock clock = clock_of(stream);
  scheduler().launch(key_of(stream), {}, &event);
  event->clock = std::move(clock);
  return event;
}
void block(c10::Stream stream, const Event& event) {
  note_wait(stream, event->clock);
  if (!scheduler().happened(event)) scheduler().launch(key_of(stream), {nullptr, event, nullptr});
}
bool has_happened(const Event& event) { return scheduler().happened(event); }
bool query(const Event& event) {
  bool over = scheduler().happened(event);
  if (over) note_host_wait(event->clock);
  return over;
}
bool query_stream(c10::Stream stream) {
  Clock clock = clock_of(stream);
  for (const Target& target : scheduler().everything(stream.device_index()))
    if (target.stream == stream.id() && !scheduler().is_done(target)) return false;
  note_host_wait(clock);
  return true;
}
void synchronize(const Event& event) {
  scheduler().await({{event->device, event->stream, event->sequence}});
  note_host_wait(event->clock);
}
void synchronize_stream(c10::Stream stream) {
  Clock clock = clock_of(stream);
  for (const Target& target : scheduler().everything(stream.device_index()))
    if (target.stream == stream.id()) scheduler().await({target});
  note_host_wait(clock);
}
void synchronize_device(int device) {
  if (device < 0) device = device_now;
  Clock clock = clock_of_device(device);
  scheduler().await(scheduler().everything(device));
  note_host_wait(clock);
}
void drain(int device) { scheduler().await(scheduler().everything(device), false); }
void set_lateness(double milliseconds) { scheduler().set_lateness(milliseconds); }

}  // namespace late
