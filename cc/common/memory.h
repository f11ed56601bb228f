// SPDX-License-Identifier: Apache-2.0
// What a call's memory goes through before and after the launch.
#pragma once

#include "cc/common/workspace.h"

namespace tf_ops {

// Fills memory with `byte`, in stream order.
Status Fill(const Cpu& cpu, void* memory, int byte, int64_t bytes);
Status Fill(const Gpu& gpu, void* memory, int byte, int64_t bytes);

// Copies to the host's memory, and waits for that.
Status Read(const Cpu& cpu, const void* memory, int64_t bytes, void* host);
Status Read(const Gpu& gpu, const void* memory, int64_t bytes, void* host);

// The byte that floats of every type are NaN of.
constexpr int kPoison = 0xff;

// Fails if what lies around the pieces of `memory` is not as poison left it.
Status CheckGuards(const std::string& op, const Workspace& workspace, const TensorView& memory,
                   const std::function<Status(const void*, int64_t, void*)>& read);

// Whether calls are counted or logged: TF_OPS_DEBUG_MEMORY=1, TF_OPS_LOG_MEMORY=1, or
// tf_ops.memory.record().
bool RecordsMemory();
void RecordMemory(const std::string& op, const char* device, int64_t workspace_bytes);

}  // namespace tf_ops
