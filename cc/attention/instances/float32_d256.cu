// SPDX-License-Identifier: Apache-2.0
#include "cc/attention/attention_simt.cuh"

template struct tf_ops::Float32Attention<256>;
