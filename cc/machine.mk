# SPDX-License-Identifier: Apache-2.0
# What the machine has: GPU, driver, nvcc.
CAPABILITY := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | \
                sed -nE 's/^([0-9]+)\.([0-9])$$/\1\2/p' | sort -u)
DRIVER     := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | \
                sed -nE '1s/^([0-9]+)\..*/\1/p')
NVCC       := $(firstword $(wildcard $(CUDA_HOME:%=%/bin/nvcc)) $(shell command -v nvcc) \
                $(wildcard /usr/local/cuda/bin/nvcc))
