# SPDX-License-Identifier: Apache-2.0
"""The dropout of attention in NumPy: what cc/attention/attention_dropout.h defines."""

import numpy as np


def philox(counter, key, rounds=7):
    """Philox4x32 (Salmon et al., 2011) of uint64 arrays below 2^32."""
    low = np.uint64(0xFFFFFFFF)
    c, k = [np.uint64(x) for x in counter], [np.uint64(x) for x in key]
    for _ in range(rounds):
        a, b = np.uint64(0xD2511F53) * c[0], np.uint64(0xCD9E8D57) * c[2]
        c = [
            (b >> np.uint64(32)) ^ c[1] ^ k[0],
            b & low,
            (a >> np.uint64(32)) ^ c[3] ^ k[1],
            a & low,
        ]
        k = [(k[0] + np.uint64(0x9E3779B9)) & low, (k[1] + np.uint64(0xBB67AE85)) & low]
    return c


def kept_pairs(seed, rate, shape):
    """bool [batch, heads, seq_q, seq_k]: what the dropout keeps."""
    batch, heads, seq_q, seq_k = shape
    halves = lambda x: [int(x) % 2**32, int(x) % 2**64 // 2**32]
    *key, salt, _ = philox([*halves(seed[1]), 0, 0], halves(seed[0]))
    head = np.arange(batch * heads).reshape(batch, heads, 1, 1)
    query, block = np.arange(seq_q)[:, None], np.arange((seq_k + 3) // 4)
    words = np.stack(np.broadcast_arrays(*philox([block, query, head, salt], key)), 4)
    words = words.reshape(batch, heads, seq_q, -1)[..., :seq_k]
    return words >= round(float(np.float32(rate)) * 2**32)
