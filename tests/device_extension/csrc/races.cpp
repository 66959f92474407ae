// Whether operations on the same memory are ordered by streams, events and waits of the host, whatever order they ran in.
//
// Each stream counts its operations, and knows up to which operation of every other stream it is ordered after; so
// does the host, whose threads count as one. An operation that meets another one on the same bytes, one of them
// writing, and is not ordered after it, is reported once: in `races()`, and as a line in the file that LATE_RACES names.

#include "late.h"

#include <c10/util/Exception.h>

#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <map>
#include <mutex>
#include <set>
#include <sstream>

namespace late {
namespace {

constexpr Key kHost{-1, 0};

struct Past {  // an access that later ones have to be ordered after
  uintptr_t begin, end;
  Key stream;
  uint64_t number;
  bool is_write;
  std::string name;
};

std::mutex mutex, reports_mutex;
std::map<Key, uint64_t> counts;
std::map<Key, Clock> clocks;  // of streams
Clock host;
std::map<const void*, std::vector<Past>> memories;  // by where a piece of memory begins
std::set<const void*> shown;  // memory of the host whose pages are closed to it for now
std::vector<std::string> reports;

uint64_t at(const Clock& clock, Key stream) {
  auto found = clock.find(stream);
  return found == clock.end() ? 0 : found->second;
}

void join(Clock& clock, const Clock& other) {
  for (const auto& [stream, number] : other) {
    uint64_t& own = clock[stream];
    own = std::max(own, number);
  }
}

bool is_ordered(const Past& past, Key stream) {
  return past.stream == stream || at(host, past.stream) >= past.number || at(clocks[stream], past.stream) >= past.number;
}

std::string describe(Key stream) {
  if (stream == kHost) return "the host";
  return "stream " + std::to_string(stream.second) + " of device " + std::to_string(stream.first);
}

void check(Key stream, const std::string& name, const Access& access) {
  auto found = memories.find(access.memory);
  if (found == memories.end()) return;
  auto& pasts = found->second;
  size_t kept = 0;
  for (Past& past : pasts) {
    bool overlaps = past.begin < access.end && access.begin < past.end;
    bool is_over = at(host, past.stream) >= past.number;
    if (overlaps && (past.is_write || access.is_write) && !is_ordered(past, stream)) {
      std::ostringstream text;
      text << name << " (" << describe(stream) << ") " << (access.is_write ? "writes" : "reads") << " what " << past.name
           << " (" << describe(past.stream) << ") " << (past.is_write ? "writes" : "reads") << ", and is not ordered after it";
      report(text.str());
    }
    bool is_covered = access.begin <= past.begin && past.end <= access.end && stream != kHost &&
        (access.is_write || (!past.is_write && past.stream == stream));
    if (is_over || is_covered) continue;
    if (&pasts[kept] != &past) pasts[kept] = std::move(past);
    ++kept;
  }
  pasts.resize(kept);
}

// Close the pages of pinned memory that the host may not use now, and open the others.
void show(const void* memory) {
  if (!is_pinned(memory)) return;
  auto found = memories.find(memory);
  std::vector<Closed> parts;
  if (found != memories.end())
    for (const Past& past : found->second)
      if (at(host, past.stream) < past.number) parts.push_back({past.begin, past.end, past.is_write});
  if (parts.empty())
    shown.erase(memory);
  else
    shown.insert(memory);
  close_pages(memory, parts);
}

}  // namespace

void report(const std::string& text) {
  std::unique_lock lock(reports_mutex);
  for (const std::string& known : reports)
    if (known == text) return;
  reports.push_back(text);
  const char* path = std::getenv("LATE_RACES");
  if (path == nullptr || *path == 0) return;
  std::string line = text + "\n";
  int file = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0 || write(file, line.data(), line.size()) < 0) perror("LATE_RACES");
  if (file >= 0) close(file);
}

std::vector<std::string> take_reports() {
  std::unique_lock lock(reports_mutex);
  return std::exchange(reports, {});
}

void note_launch(c10::Stream on, const std::string& name, const Accesses& accesses) {
  std::unique_lock lock(mutex);
  Key stream = key_of(on);
  uint64_t number = ++counts[stream];
  clocks[stream][stream] = number;
  for (const Access& access : accesses) {
    if (access.begin == access.end) continue;
    check(stream, name, access);
    memories[access.memory].push_back({access.begin, access.end, stream, number, access.is_write, name});
    show(access.memory);
  }
}

void note_host(const std::string& name, const Accesses& accesses) {
  std::unique_lock lock(mutex);
  for (const Access& access : accesses)
    if (access.begin != access.end) check(kHost, name, access);
}

Clock clock_of(c10::Stream stream) {
  std::unique_lock lock(mutex);
  Clock clock = clocks[key_of(stream)];
  join(clock, host);
  return clock;
}

Clock clock_of_device(int device) {
  std::unique_lock lock(mutex);
  Clock all;
  for (const auto& [stream, clock] : clocks)
    if (stream.first == device) join(all, clock);
  return all;
}

void note_wait(c10::Stream stream, const Clock& until) {
  std::unique_lock lock(mutex);
  join(clocks[key_of(stream)], until);
}

void note_host_wait(const Clock& until) {
  std::unique_lock lock(mutex);
  join(host, until);
  for (const void* memory : std::set<const void*>(shown)) show(memory);
}

void forget(const void* memory, const Clock& until) {
  std::unique_lock lock(mutex);
  auto found = memories.find(memory);
  if (found != memories.end())
    std::erase_if(found->second, [&](const Past& past) { return at(until, past.stream) >= past.number; });
}

bool is_in_use(const void* memory) {
  std::unique_lock lock(mutex);
  shown.erase(memory);
  auto found = memories.find(memory);
  if (found == memories.end()) return false;
  bool used = false;
  for (const Past& past : found->second) used |= at(host, past.stream) < past.number;
  memories.erase(found);
  return used;
}

}  // namespace late
