// SPDX-License-Identifier: Apache-2.0
#include "cc/common/tuning.h"

#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

namespace tf_ops {
namespace {

using Table = std::unordered_map<std::string, int64_t>;

// A table that was replaced stays, for a launch may be reading it; they are few and small.
std::atomic<const Table*> table{nullptr};
std::atomic<bool> listening{false};

struct Asked {
  std::mutex mutex;
  std::map<std::string, std::string> values;  // "heuristic value value ..." by key
};
Asked& TheAsked() {
  static auto* asked = new Asked;
  return *asked;
}

std::string Key(const Tunable& tunable, DType dtype, std::initializer_list<int64_t> sizes) {
  constexpr const char* kNames[] = {"",      "float32", "float16", "bfloat16",
                                    "int32", "int64",   "bool",    "uint8"};
  std::string key = tunable.name;
  key.append(" ").append(tunable.device).append(" ").append(kNames[static_cast<int>(dtype)]);
  const char* const* name = tunable.sizes;
  for (int64_t size : sizes) {
    int64_t bucket = size > 0 ? 1 : 0;
    while (bucket < size && bucket < int64_t{1} << 62) bucket *= 2;
    key.append(" ").append(*name++).append("=").append(std::to_string(bucket));
  }
  return key;
}

}  // namespace

int64_t Choose(const Tunable& tunable, DType dtype, std::initializer_list<int64_t> sizes,
               int64_t heuristic, std::initializer_list<int64_t> values,
               const std::function<bool(int64_t)>& legal) {
  const Table* stored = table.load(std::memory_order_acquire);
  const bool listened_to = listening.load(std::memory_order_relaxed);
  if (!stored && !listened_to) return heuristic;
  const std::string key = Key(tunable, dtype, sizes);
  if (listened_to) {
    std::string text = std::to_string(heuristic);
    for (int64_t value : values) {
      if (value != heuristic && legal(value)) text += " " + std::to_string(value);
    }
    Asked& asked = TheAsked();
    std::lock_guard<std::mutex> lock(asked.mutex);
    asked.values[key] = text;
  }
  if (!stored) return heuristic;
  const auto found = stored->find(key);
  return found != stored->end() && legal(found->second) ? found->second : heuristic;
}

}  // namespace tf_ops

// Replaces the table: lines of a key, a tab and a value. An empty text leaves the heuristics.
extern "C" void tf_ops_tuning_set(const char* text) {
  auto* next = new tf_ops::Table;
  for (std::string rest = text; !rest.empty();) {
    const size_t end = rest.find('\n'), tab = rest.find('\t');
    if (tab < end) (*next)[rest.substr(0, tab)] = std::atoll(rest.c_str() + tab + 1);
    rest = end == std::string::npos ? "" : rest.substr(end + 1);
  }
  if (next->empty()) {
    delete next;
    next = nullptr;
  }
  tf_ops::table.store(next, std::memory_order_release);
}

// Starts (1) or ends (0) to note what launchers ask.
extern "C" void tf_ops_tuning_listen(int on) {
  tf_ops::Asked& asked = tf_ops::TheAsked();
  std::lock_guard<std::mutex> lock(asked.mutex);
  if (on) asked.values.clear();
  tf_ops::listening = on != 0;
}

// What was asked: lines of a key, a tab, the heuristic and the other legal values. The text lives
// until the thread's next call.
extern "C" const char* tf_ops_tuning_asked() {
  static thread_local std::string text;
  tf_ops::Asked& asked = tf_ops::TheAsked();
  std::lock_guard<std::mutex> lock(asked.mutex);
  text.clear();
  for (const auto& [key, values] : asked.values) text += key + "\t" + values + "\n";
  return text.c_str();
}
