// cuBLAS, cuBLASLt, cuDNN and NVML. Products and plans are kernels by their names; descriptors are kept and never read.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "card.h"

// A handle of cuBLAS or cuDNN begins with its stream. A descriptor has as many bytes.
typedef struct {
  const void *stream;
  char rest[4088];
} Handle;

#define CREATES(name)                  \
  int name(void **made) {              \
    *made = calloc(1, sizeof(Handle)); \
    return 0;                          \
  }
CREATES(cublasCreate_v2)
CREATES(cublasLtMatmulDescCreate)
CREATES(cublasLtMatmulPreferenceCreate)
CREATES(cublasLtMatrixLayoutCreate)
CREATES(cudnnCreate)

#define DESTROYS(name)   \
  int name(void *made) { \
    free(made);          \
    return 0;            \
  }
DESTROYS(cublasLtMatmulDescDestroy)
DESTROYS(cublasLtMatmulPreferenceDestroy)
DESTROYS(cublasLtMatrixLayoutDestroy)
DESTROYS(cudnnBackendDestroyDescriptor)

int cublasSetStream_v2(Handle *handle, const void *stream) {
  handle->stream = stream;
  return 0;
}

int cudnnSetStream(Handle *handle, const void *stream) {
  return cublasSetStream_v2(handle, stream);
}

int cudnnGetStream(Handle *handle, const void **stream) {
  *stream = handle->stream;
  return 0;
}

// ---- cuBLAS. Callers pass more arguments than these functions read.

#define PRODUCT(name)                          \
  int name(Handle *handle) {                   \
    return card_kernel(#name, handle->stream); \
  }
PRODUCT(cublasGemmEx)
PRODUCT(cublasSgemm_v2)
PRODUCT(cublasDgemm_v2)
PRODUCT(cublasGemmStridedBatchedEx)
PRODUCT(cublasSgemmStridedBatched)
PRODUCT(cublasDgemmStridedBatched)
PRODUCT(cublasDotEx)
PRODUCT(cublasSdot_v2)
PRODUCT(cublasDdot_v2)
PRODUCT(cublasSgemv_v2)
PRODUCT(cublasDgemv_v2)

// ---- cuBLASLt
// One algorithm fits every product. cublasLtMatmulHeuristicResult_t begins with an algorithm of 64 bytes and has 96.
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *what, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *results, int *count) {
  memset(results, 0, 96);
  *count = 1;
  return 0;
}

int cublasLtMatmul(void *handle, void *what, const void *alpha, const void *a, void *of_a, const void *b, void *of_b,
                   const void *beta, const void *c, void *of_c, void *d, void *of_d, const void *algorithm,
                   void *workspace, size_t bytes, const void *stream) {
  return card_kernel("cublasLtMatmul", stream);
}

// ---- cuDNN: its graph API, in which every engine fits. Numbers are those of cudnn_graph.h.
enum {
  HEURISTIC_RESULTS = 202,
  CHOICES_OF_KNOBS = 302,
  ENGINE_KNOBS = 1302,
  NUMERICAL_NOTES = 1303,
  BEHAVIOR_NOTES = 1305
};
enum { TYPE_BOOLEAN = 2, TYPE_INT64 = 3, TYPE_INT32 = 23 };

// The version by its parts: 0 the major number, 1 the minor one, 2 the patch.
int cudnnGetProperty(int part, int *value) {
  *value = part == 0 ? 9 : part == 1 ? 20 : 0;
  return 0;
}

int cudnnBackendCreateDescriptor(int kind, void **made) {
  return cudnnCreate(made);
}

int cudnnBackendExecute(Handle *handle, void *plan, void *values) {
  return card_kernel("cudnn", handle->stream);
}

int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t wanted, int64_t *count, void *values) {
  int has_none = name == NUMERICAL_NOTES || name == BEHAVIOR_NOTES || name == ENGINE_KNOBS || name == CHOICES_OF_KNOBS;
  if (count) *count = has_none ? 0 : name == HEURISTIC_RESULTS || wanted > 0;
  if (has_none || !values || wanted < 1) return 0;
  // A workspace, say, has no bytes.
  if (type == TYPE_INT64) *(int64_t *)values = 0;
  if (type == TYPE_INT32) *(int32_t *)values = 0;
  if (type == TYPE_BOOLEAN) *(char *)values = 0;
  return 0;
}

// ---- NVML
int nvmlSystemGetDriverVersion(char *text, unsigned length) {
  snprintf(text, length, "580.95.05");
  return 0;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned number, void **device) {
  *device = (void *)(uintptr_t)(number + 1);
  return 0;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *text, void **device) {
  unsigned bus = 1;
  sscanf(text, "%*x:%x", &bus);
  *device = (void *)(uintptr_t)bus;
  return 0;
}

int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
  snprintf(text, length, "GPU-00000000-0000-0000-0000-%012lu", (uintptr_t)device - 1);
  return 0;
}
