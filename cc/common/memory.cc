// SPDX-License-Identifier: Apache-2.0
#include "cc/common/memory.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

namespace tf_ops {

Status Fill(const Cpu&, void* memory, int byte, int64_t bytes) {
  if (bytes > 0) std::memset(memory, byte, bytes);
  return Ok();
}

Status Read(const Cpu&, const void* memory, int64_t bytes, void* host) {
  std::memcpy(host, memory, bytes);
  return Ok();
}

Status CheckGuards(const std::string& op, const Workspace& workspace, const TensorView& memory,
                   const std::function<Status(const void*, int64_t, void*)>& read) {
  const auto& pieces = workspace.pieces();
  if (workspace.bytes() > memory.bytes()) {
    return Internal(op + ": takes " + std::to_string(workspace.bytes()) +
                    " bytes of a workspace of " + std::to_string(memory.bytes()));
  }
  std::vector<unsigned char> guard;
  for (size_t i = 0; i <= pieces.size(); ++i) {
    const int64_t begin = i == 0 ? 0 : pieces[i - 1].end;
    const int64_t end = i == pieces.size() ? memory.bytes() : pieces[i].begin;
    guard.resize(end - begin);
    if (guard.empty()) continue;
    // Also brings what went wrong on the device, of this op or of an earlier one.
    if (Status s = read(memory.as<char>() + begin, end - begin, guard.data()); !s.ok()) {
      return Internal(op + ": " + s.message);
    }
    const auto written = [](unsigned char byte) { return byte != kPoison; };
    const auto first = std::find_if(guard.begin(), guard.end(), written);
    if (first == guard.end()) continue;
    const auto last = std::find_if(guard.rbegin(), guard.rend(), written).base();
    if (pieces.empty()) {
      return Internal(op + ": a workspace was written to of which nothing is taken");
    }
    // Of the piece that is nearer.
    const bool behind = i > 0 && (i == pieces.size() || first - guard.begin() < guard.end() - last);
    const Workspace::Piece& piece = pieces[behind ? i - 1 : i];
    const int64_t offset = begin + (first - guard.begin()) - piece.begin;
    return Internal(
        op + ": a write " + (behind ? "behind" : "in front of") + " the piece \"" + piece.name +
        "\" of the workspace, which has " + std::to_string(piece.end - piece.begin) +
        " bytes: " + std::to_string(last - first) + " bytes from offset " + std::to_string(offset));
  }
  return Ok();
}

namespace {

struct Usage {
  int64_t calls = 0, bytes = 0, peak = 0;
};

std::atomic<bool> records{false};
std::mutex mutex;
std::map<std::pair<std::string, std::string>, Usage> usage;  // by op and device

bool LogsMemory() {
  static const bool logs = [] {
    const char* value = std::getenv("TF_OPS_LOG_MEMORY");
    return value && value[0] == '1';
  }();
  return logs;
}

}  // namespace

bool RecordsMemory() {
  return records.load(std::memory_order_relaxed) || DebugMemory() || LogsMemory();
}

void RecordMemory(const std::string& op, const char* device, int64_t workspace_bytes) {
  if (LogsMemory() && workspace_bytes > 0) {
    std::fprintf(stderr, "tf_ops: %s on %s: a workspace of %lld bytes\n", op.c_str(), device,
                 static_cast<long long>(workspace_bytes));
  }
  std::lock_guard<std::mutex> lock(mutex);
  Usage& u = usage[{op, device}];
  ++u.calls;
  u.bytes += workspace_bytes;
  u.peak = std::max(u.peak, workspace_bytes);
}

// Counts from 0 on, or stops to count.
extern "C" void tf_ops_memory_record(int on) {
  std::lock_guard<std::mutex> lock(mutex);
  if (on) usage.clear();
  records = on;
}

// A line for each op and device: calls, bytes of workspace, the most of them at once. Lives
// until the thread's next call.
extern "C" const char* tf_ops_memory_usage() {
  static thread_local std::string text;
  text.clear();
  std::lock_guard<std::mutex> lock(mutex);
  for (const auto& [key, u] : usage) {
    text += key.first + " " + key.second + " " + std::to_string(u.calls) + " " +
            std::to_string(u.bytes) + " " + std::to_string(u.peak) + "\n";
  }
  return text.c_str();
}

}  // namespace tf_ops
