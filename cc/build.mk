# SPDX-License-Identifier: Apache-2.0
# Builds $(PACKAGE)/_$(PACKAGE).so for the TensorFlow that $(PYTHON) has, out of the sources here (cc/*/*.cc,
# cc/*/*.cu, cc/*/instances/*.cu) and of cc/common beside this file. tf_ops includes it, and so does a package of
# your own, from the tf_ops that is installed; machine.mk comes before. Objects go to $B.
LIBRARY := $(PACKAGE)/_$(PACKAGE).so
ROOT    := $(patsubst %cc/build.mk,%,$(lastword $(MAKEFILE_LIST)))# of cc/common; empty in tf_ops itself
vpath cc/common/%.cc $(ROOT)
vpath cc/common/%.cu $(ROOT)
empty   :=
space   := $(empty) $(empty)
comma   := ,

TF := $(shell $(PYTHON) -c 'import importlib.util as u; print(u.find_spec("tensorflow").submodule_search_locations[0])' 2>/dev/null)
ifeq ($(TF),)
$(error $(PYTHON) has no TensorFlow: $(PYTHON) -m pip install $(if $(TF_VERSION),'tensorflow==$(TF_VERSION).*'$(comma) or leave PYTHON out,tensorflow))
endif
NVCC := $(or $(NVCC),$(wildcard $(TF)/../nvidia/cu13/bin/nvcc))
CUDA ?= $(if $(NVCC),1,0)
ifeq ($(CUDA),1)
CUDA_TOP     := $(shell $(NVCC) --dryrun -x cu -c /dev/null 2>&1 | sed -n 's/^\#\$$ TOP=//p')
CUDA_VERSION := $(shell $(NVCC) --version | sed -nE 's/.*release ([0-9.]+).*/\1/p')
CUDART       := $(firstword $(wildcard $(CUDA_TOP:%=%/lib*/libcudart_static.a) \
                  $(CUDA_TOP:%=%/targets/*/lib/libcudart_static.a)))
ifeq ($(CUDART),)
$(error $(NVCC) is no whole CUDA: no libcudart_static.a under $(CUDA_TOP). Set CUDA_HOME, or CUDA=0)
endif
# 9.0 is built for as 90a: its tensor core instructions are of that architecture alone.
CUDA_ARCHS ?= $(or $(CAPABILITY:90=90a),80+PTX 90a)
ifneq ($(filter 13.%,$(CUDA_VERSION)),)
ifneq ($(DRIVER),)
ifeq ($(shell test $(DRIVER) -ge 580 && echo 1),)
$(warning The NVIDIA driver is $(DRIVER). What CUDA $(CUDA_VERSION) builds needs 580 or later: update it, or set CUDA_HOME to a CUDA 12)
endif
endif
endif
KIND := CPU and CUDA $(CUDA_VERSION) for $(CUDA_ARCHS)
CUDA_BUILD := -DTF_OPS_CUDA_BUILD='"cuda=$(CUDA_VERSION) archs=$(subst $(space),$(comma),$(strip $(CUDA_ARCHS)))"'
else
KIND := CPU only ($(if $(NVCC),CUDA=0,$(if $(CAPABILITY),no nvcc for the GPU: install it$(if $(TF_VERSION),$(comma) or leave PYTHON out),no nvcc)))
endif

# --- Flags ---------------------------------------------------------------------------------------
CXXFLAGS = -std=c++17 -O3 -fPIC -fno-trapping-math -fno-math-errno -Wall -Wno-psabi \
           -DTF_OPS_CUDA=$(CUDA) -I.$(ROOT:%= -I%) $(SANITIZE) $(if $(WERROR),-Werror)
CUFLAGS  = -std=c++17 -O3 -lineinfo --threads 0 -Xcompiler=-fPIC,-Wall -DTF_OPS_CUDA=1 -I.$(ROOT:%= -I%) \
           -DTF_OPS_SM90A=$(if $(filter 90a%,$(CUDA_ARCHS)),1,0) \
           -Xptxas=--warn-on-spills,--warn-on-local-memory-usage,--warn-on-double-precision-use \
           $(foreach a,$(CUDA_ARCHS),-gencode \
             'arch=compute_$(a:+PTX=),code=[sm_$(a:+PTX=)$(if $(findstring +PTX,$a),$(comma)compute_$(a:+PTX=))]')
TF_CXX   = $(subst -I,-isystem ,$(TF_FLAGS)) \
           $(patsubst %,-isystem $(TF)/include/external/%,highwayhash farmhash_archive/src)
TF_LINK  = -L$(TF) -l:libtensorflow_framework.so.2 -l:libtensorflow_cc.so.2
# The static CUDA runtime comes before TensorFlow, which exports a stub of its own.
LINK     = @echo 'LINK  $@'; $(CXX) -shared -o $@ $(filter %.o,$^) $(CUDART) $(1) $(SANITIZE) \
           -lrt -lpthread -ldl -Wl,--no-undefined -Wl,--version-script=$(ROOT)cc/exports.lds

# Everything is built again when what it is built for changes.
CONFIG := $(TF) $(notdir $(wildcard $(TF)/../tensorflow*.dist-info)) $(CXX) $(shell $(CXX) -dumpfullversion) \
          $(KIND) $(CUDA_TOP) $(CXXFLAGS) $(if $(CUDART),$(CUFLAGS))
CONFIG := $(subst ','\'',$(CONFIG))
$B/config: FORCE
	@mkdir -p $(@D); echo '$(CONFIG)' | cmp -s - $@ || echo '$(CONFIG)' >$@
$B/tf.mk: $B/config
	@$(PYTHON) -c 'import tensorflow as tf; print("TF_BUILT_FOR :=", tf.__version__); print("TF_FLAGS :=", *tf.sysconfig.get_compile_flags())' 2>$@.log >$@ || { cat $@.log; exit 1; }
include $B/tf.mk

# --- Sources -------------------------------------------------------------------------------------
OF_COMMON = $(patsubst $(ROOT)%,%,$(wildcard $(ROOT)cc/common/*$(1)))
OBJECTS  := $(patsubst %,$B/%.o,$(sort $(wildcard cc/*/*.cc) $(call OF_COMMON,.cc)))
CU       := $(if $(CUDART),$(patsubst %,$B/%.o,$(sort $(wildcard cc/*/*.cu cc/*/instances/*.cu) $(call OF_COMMON,.cu))))
COMMON   := $(filter $B/cc/common/%,$(OBJECTS) $(CU))
# What speaks to TensorFlow or XLA; the launchers are the rest.
ADAPTERS := $(filter %_op.cc.o,$(OBJECTS)) $(patsubst %,$B/cc/common/%.cc.o,tf xla_ffi xla_lowering)

# Changes when a source comes or goes.
$B/sources: FORCE
	@mkdir -p $(@D); echo '$(OBJECTS) $(CU)' | cmp -s - $@ || echo '$(OBJECTS) $(CU)' >$@
# A hash of each family's sources, which a stored choice of a kernel's configuration goes with.
$B/families.cc: $(wildcard cc/*/*.h cc/*/*.cc cc/*/*.cu cc/*/*.cuh cc/*/instances/*.cu) $B/sources $(ROOT)cc/build.mk
	@(echo 'extern "C" const char* tf_ops_families() { return ""'; for f in $(sort $(wildcard cc/*/)); do \
	  echo "\"$$(basename $$f) $$(find $$f -type f | LC_ALL=C sort | xargs cat | sha256sum | cut -c1-12) \""; done; \
	  echo '; }') >$@
$B/families.cc.o: $B/families.cc $B/config ; $(call CXX_RULE)
$(LIBRARY): $(OBJECTS) $(CU) $B/families.cc.o $B/sources $(ROOT)cc/exports.lds
	$(call LINK,$(TF_LINK))

# No TensorFlow header is in reach of a launcher.
CXX_RULE  = @mkdir -p $(@D); echo 'CXX   $<'; $(CXX) $(CXXFLAGS) $(1) -MMD -MP -c $< -o $@
$B/%.cc.o: %.cc $B/config ; $(call CXX_RULE)
$(ADAPTERS): $B/%.cc.o: %.cc $B/config ; $(call CXX_RULE,$(TF_CXX))
$B/cc/common/build_info.cc.o: cc/common/build_info.cc $B/tf.mk
	$(call CXX_RULE,-DTF_OPS_TENSORFLOW_VERSION='"$(TF_BUILT_FOR)"' $(if $(CUDART),$(CUDA_BUILD)))
$B/%.cu.o: %.cu $B/config
	@mkdir -p $(@D); echo 'NVCC  $<'; $(NVCC) $(CUFLAGS) -MMD -MP -c $< -o $@
-include $(shell find $B -name '*.d' 2>/dev/null)

FORCE:
.PHONY: FORCE
