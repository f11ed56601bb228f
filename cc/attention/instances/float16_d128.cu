// SPDX-License-Identifier: Apache-2.0
#include "cc/attention/attention_sm80_grad.cuh"

template struct tf_ops::TensorCoreAttention<tf_ops::half, 128>;
