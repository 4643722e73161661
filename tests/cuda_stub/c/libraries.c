// cuBLAS, cuBLASLt, cuDNN and NVML. Products and plans are kernels by their names; descriptors are kept and never read.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "card.h"

// A handle of cuBLAS or cuDNN begins with its stream.
typedef struct {
  const void *stream;
  char rest[4088];
} Handle;

static int create(Handle **handle) {
  *handle = calloc(1, sizeof(Handle));
  return 0;
}

int cublasCreate_v2(Handle **handle) {
  return create(handle);
}
int cublasLtCreate(Handle **handle) {
  return create(handle);
}
int cudnnCreate(Handle **handle) {
  return create(handle);
}
int cublasDestroy_v2(Handle *handle) {
  return 0;
}
int cudnnDestroy(Handle *handle) {
  return 0;
}

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
int cublasSetWorkspace_v2(Handle *handle) {
  return 0;
}
int cublasSetMathMode(Handle *handle) {
  return 0;
}
int cublasSetPointerMode_v2(Handle *handle) {
  return 0;
}
int cublasSetSmCountTarget(Handle *handle) {
  return 0;
}

int cublasGetMathMode(Handle *handle, int *mode) {
  *mode = 0;
  return 0;
}

int cublasGetPointerMode_v2(Handle *handle, int *mode) {
  return cublasGetMathMode(handle, mode);
}

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
size_t cublasLtGetVersion(void) {
  return 130100;
}
int cublasLtMatmulDescInit_internal(void *descriptor) {
  return 0;
}
int cublasLtMatmulDescSetAttribute(void *descriptor) {
  return 0;
}
int cublasLtMatrixLayoutInit_internal(void *layout) {
  return 0;
}
int cublasLtMatrixLayoutSetAttribute(void *layout) {
  return 0;
}
int cublasLtMatmulPreferenceInit_internal(void *preference) {
  return 0;
}
int cublasLtMatmulPreferenceSetAttribute(void *preference) {
  return 0;
}

static int created(void **made) {
  *made = calloc(1, 512);
  return 0;
}

int cublasLtMatmulDescCreate(void **made) {
  return created(made);
}
int cublasLtMatrixLayoutCreate(void **made) {
  return created(made);
}
int cublasLtMatmulPreferenceCreate(void **made) {
  return created(made);
}

static int destroyed(void *made) {
  free(made);
  return 0;
}

int cublasLtMatmulDescDestroy(void *made) {
  return destroyed(made);
}
int cublasLtMatrixLayoutDestroy(void *made) {
  return destroyed(made);
}
int cublasLtMatmulPreferenceDestroy(void *made) {
  return destroyed(made);
}

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

size_t cudnnGetVersion(void) {
  return 92000;
}
size_t cudnnGetCudartVersion(void) {
  return 13000;
}

// The version by its parts: 0 the major number, 1 the minor one, 2 the patch.
int cudnnGetProperty(int part, int *value) {
  *value = part == 0 ? 9 : part == 1 ? 20 : 0;
  return 0;
}

const char *cudnnGetErrorString(int status) {
  return "an error of the stub's cuDNN";
}

int cudnnBackendCreateDescriptor(int kind, void **made) {
  return created(made);
}
int cudnnBackendDestroyDescriptor(void *made) {
  return destroyed(made);
}
int cudnnBackendInitialize(void *descriptor) {
  return 0;
}
int cudnnBackendFinalize(void *descriptor) {
  return 0;
}
int cudnnBackendSetAttribute(void *descriptor) {
  return 0;
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
int nvmlInit_v2(void) {
  return 0;
}
int nvmlInitWithFlags(unsigned flags) {
  return 0;
}
int nvmlShutdown(void) {
  return 0;
}

int nvmlSystemGetDriverVersion(char *text, unsigned length) {
  snprintf(text, length, "580.95.05");
  return 0;
}

int nvmlSystemGetCudaDriverVersion_v2(int *version) {
  *version = 13000;
  return 0;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = (unsigned)card_count();
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

int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, void *processes) {
  *count = 0;
  return 0;
}

// NVML_ERROR_NOT_SUPPORTED: the card has no NVLink.
int nvmlDeviceGetNvLinkRemoteDeviceType(void *device, unsigned link, int *type) {
  return 3;
}
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void *device, unsigned link, void *pci) {
  return 3;
}
int nvmlDeviceGetGpuFabricInfoV(void *device, void *info) {
  return 0;
}
