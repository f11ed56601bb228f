// SPDX-License-Identifier: Apache-2.0
// Serves a SavedModel that maps bytes [1, seq] to logits [1, seq, 256], without Python.
//
//   serve OP_LIBRARY SAVED_MODEL INPUT OUTPUT PROMPT LOGITS COUNT
//
// INPUT and OUTPUT are operations of the signature, such as serving_default_bytes:0. The logits of
// the file PROMPT go to the file LOGITS as float32; then COUNT bytes that continue it, to stdout.
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tensorflow/c/c_api.h"

enum { kVocabulary = 256, kMaxLength = 1 << 20 };

static TF_Status* status;

static void Check(int ok, const char* what, const char* why) {
  if (ok) return;
  fprintf(stderr, "serve: %s: %s\n", what, why);
  exit(1);
}

static void CheckStatus(const char* what) {
  Check(TF_GetCode(status) == TF_OK, what, TF_Message(status));
}

// The output of the graph that a signature calls "name:index".
static TF_Output FindOutput(TF_Graph* graph, char* name) {
  char* colon = strchr(name, ':');
  if (colon) *colon = '\0';
  TF_Output output = {TF_GraphOperationByName(graph, name), colon ? atoi(colon + 1) : 0};
  Check(output.oper != NULL, name, "no such operation in the model");
  return output;
}

// The model's logits [1, length, kVocabulary]; the caller deletes the tensor.
static TF_Tensor* Run(TF_Session* session, TF_Output input, TF_Output output,
                      const unsigned char* text, int64_t length) {
  const int64_t dims[2] = {1, length};
  TF_Tensor* bytes = TF_AllocateTensor(TF_INT32, dims, 2, length * sizeof(int32_t));
  int32_t* data = (int32_t*)TF_TensorData(bytes);
  for (int64_t i = 0; i < length; ++i) data[i] = text[i];
  TF_Tensor* logits = NULL;
  TF_SessionRun(session, NULL, &input, &bytes, 1, &output, &logits, 1, NULL, 0, NULL, status);
  CheckStatus("running the model");
  Check(TF_TensorType(logits) == TF_FLOAT &&
            TF_TensorByteSize(logits) == length * kVocabulary * sizeof(float),
        "running the model", "the output is not float32 [1, seq, 256]");
  TF_DeleteTensor(bytes);
  return logits;
}

// Draws a byte from softmax(logits / temperature), the same ones in every run.
static unsigned char Sample(const float* logits) {
  static uint32_t state = 2463534242u;  // Marsaglia's xorshift
  const double temperature = 0.7;
  double weight[kVocabulary], sum = 0, max = -INFINITY;
  for (int i = 0; i < kVocabulary; ++i) max = logits[i] > max ? logits[i] : max;
  for (int i = 0; i < kVocabulary; ++i) sum += weight[i] = exp((logits[i] - max) / temperature);
  state ^= state << 13, state ^= state >> 17, state ^= state << 5;
  double left = sum * (state / 4294967296.0);
  int byte = 0;
  while (byte < kVocabulary - 1 && (left -= weight[byte]) >= 0) ++byte;
  return (unsigned char)byte;
}

int main(int argc, char** argv) {
  Check(argc == 8, "usage", "serve OP_LIBRARY SAVED_MODEL INPUT OUTPUT PROMPT LOGITS COUNT");
  status = TF_NewStatus();

  // The ops first: the graph does not load without them.
  TF_Library* library = TF_LoadLibrary(argv[1], status);
  CheckStatus(argv[1]);
  TF_Graph* graph = TF_NewGraph();
  TF_SessionOptions* options = TF_NewSessionOptions();
  const char* tag = "serve";
  TF_Session* session =
      TF_LoadSessionFromSavedModel(options, NULL, argv[2], &tag, 1, graph, NULL, status);
  CheckStatus(argv[2]);
  const TF_Output input = FindOutput(graph, argv[3]), output = FindOutput(graph, argv[4]);

  static unsigned char text[kMaxLength];
  FILE* file = fopen(argv[5], "rb");
  Check(file != NULL, argv[5], "cannot be read");
  int64_t length = fread(text, 1, kMaxLength, file);
  fclose(file);
  const int64_t count = atoi(argv[7]);
  Check(length > 0 && length + count <= kMaxLength, argv[5], "is empty or too long");

  TF_Tensor* logits = Run(session, input, output, text, length);
  file = fopen(argv[6], "wb");
  Check(file != NULL && fwrite(TF_TensorData(logits), TF_TensorByteSize(logits), 1, file) == 1 &&
            fclose(file) == 0,
        argv[6], "cannot be written");

  for (int64_t i = 0; i < count; ++i) {
    text[length] = Sample((const float*)TF_TensorData(logits) + (length - 1) * kVocabulary);
    putchar(text[length++]);
    TF_DeleteTensor(logits);
    logits = Run(session, input, output, text, length);
  }

  TF_DeleteTensor(logits);
  TF_CloseSession(session, status);
  TF_DeleteSession(session, status);
  TF_DeleteSessionOptions(options);
  TF_DeleteGraph(graph);
  TF_DeleteLibraryHandle(library);
  TF_DeleteStatus(status);
  return 0;
}
