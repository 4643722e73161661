// Kernels: those of torch's libraries, registered when they are loaded, and those of modules, which Triton makes.
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include "card.h"

typedef struct {
  const void *host;
  const char *name;
} Function;

static pthread_mutex_t LOCK = PTHREAD_MUTEX_INITIALIZER;
static Function *FUNCTIONS;
static size_t COUNT;
static int IS_SORTED;

void **__cudaRegisterFatBinary(void *binary) {
  static void *handle[1];
  return handle;
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *tid,
                            void *bid, void *block, void *grid, int *warp) {
  pthread_mutex_lock(&LOCK);
  FUNCTIONS = card_with_room(FUNCTIONS, COUNT, sizeof(Function));
  FUNCTIONS[COUNT++] = (Function){host, name};
  IS_SORTED = 0;
  pthread_mutex_unlock(&LOCK);
}

static int compare(const void *one, const void *other) {
  uintptr_t a = (uintptr_t)((const Function *)one)->host, b = (uintptr_t)((const Function *)other)->host;
  return a < b ? -1 : a > b;
}

static const char *name_of(const void *host) {
  Function key = {host, NULL};
  pthread_mutex_lock(&LOCK);
  if (!IS_SORTED) qsort(FUNCTIONS, COUNT, sizeof(Function), compare);
  IS_SORTED = 1;
  Function *found = bsearch(&key, FUNCTIONS, COUNT, sizeof(Function), compare);
  pthread_mutex_unlock(&LOCK);
  return found ? found->name : "a kernel that nobody registered";
}

// Between <<< and >>>, the arguments of a launch lie on a stack of the thread.
static __thread cudaLaunchConfig_t PUSHED[8];
static __thread int DEPTH;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  PUSHED[DEPTH++] = (cudaLaunchConfig_t){grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
  cudaLaunchConfig_t *last = &PUSHED[--DEPTH];
  *grid = last->gridDim;
  *block = last->blockDim;
  *shared = last->dynamicSmemBytes;
  *(cudaStream_t *)stream = last->stream;
  return 0;
}

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                             cudaStream_t stream) {
  if (!grid.x || !grid.y || !grid.z) return card_failed(cudaErrorInvalidConfiguration);
  return card_kernel(name_of(host), stream);
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host) {
  *kernel = (cudaKernel_t)host;
  return 0;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **arguments, size_t shared,
                                        cudaStream_t stream) {
  return cudaLaunchKernel(host, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **arguments) {
  return cudaLaunchKernel(host, config->gridDim, config->blockDim, arguments, config->dynamicSmemBytes, config->stream);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *found, const void *host) {
  memset(found, 0, sizeof *found);
  found->maxThreadsPerBlock = 1024;
  found->numRegs = 32;
  found->binaryVersion = card()->capability;
  found->ptxVersion = card()->capability;
  found->maxDynamicSharedSizeBytes = card()->shared_memory_of_block;
  return 0;
}

// ---- the driver's
CUresult cuDeviceGet(CUdevice *device, int number) {
  *device = number;
  return 0;
}

CUresult cuDeviceGetName(char *text, int length, CUdevice device) {
  snprintf(text, length, "%s", card()->full_name);
  return 0;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *is_active) {
  *flags = 0;
  *is_active = 1;
  return 0;
}

CUresult cuCtxGetDevice(CUdevice *device) {
  return (CUresult)cudaGetDevice(device);
}

CUresult cuGetErrorString(CUresult error, const char **text) {
  *text = "an error of the stub's driver";
  return 0;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) {
  *module = (CUmodule)image;
  return 0;
}

CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
  *function = (CUfunction)strdup(name);
  return 0;
}

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute which, CUfunction function) {
  *value = which == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : which == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
  return 0;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) {
  return (CUresult)card_kernel((const char *)function, config->hStream);
}

CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                        unsigned block_y, unsigned block_z, unsigned shared, CUstream stream, void **arguments,
                        void **extra) {
  return (CUresult)card_kernel((const char *)function, stream);
}

// A tensor map by the driver's rules: a base of 16 bytes, strides in 16 bytes, boxes of 1 to 256.
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *base,
                                const cuuint64_t *sizes, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  int is_legal = ((uintptr_t)base & 15) == 0;
  for (cuuint32_t i = 0; i < rank; i++) is_legal &= box[i] > 0 && box[i] <= 256 && sizes[i] > 0;
  for (cuuint32_t i = 0; i + 1 < rank; i++) is_legal &= (strides[i] & 15) == 0;
  return is_legal ? 0 : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuGetProcAddress(const char *name, void **function, int version, cuuint64_t flags,
                          CUdriverProcAddressQueryResult *result) {
  // A newer version of a function has another name, as the macros of cuda.h have it.
  char newer[256];
  snprintf(newer, sizeof newer, "%s_v2", name);
  *function = dlsym(RTLD_DEFAULT, newer);
  if (!*function) *function = dlsym(RTLD_DEFAULT, name);
  if (!*function) card_end("not implemented", name);
  if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
  return 0;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
  cuGetProcAddress(name, function, (int)version, flags, NULL);
  if (result) *result = cudaDriverEntryPointSuccess;
  return 0;
}
