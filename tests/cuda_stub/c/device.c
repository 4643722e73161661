// Devices: what the runtime and the driver say of the card.
#include <stdio.h>
#include <string.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include "card.h"

static __thread cudaError_t LAST;
static __thread int DEVICE;

int card_failed(int error) {
  return LAST = error;
}

cudaError_t cudaGetLastError(void) {
  cudaError_t error = LAST;
  LAST = 0;
  return error;
}

cudaError_t cudaPeekAtLastError(void) {
  return LAST;
}

const char *cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaError";
}

const char *cudaGetErrorString(cudaError_t error) {
  if (error == cudaErrorMemoryAllocation) return "out of memory";
  if (error == cudaErrorInvalidDevice) return "invalid device ordinal";
  if (error == cudaErrorInvalidConfiguration) return "invalid configuration argument";
  if (error == cudaErrorStreamCaptureUnsupported) return "operation not permitted when stream is capturing";
  if (error == cudaErrorStreamCaptureInvalidated) return "operation failed due to a previous error during capture";
  if (error == cudaErrorStreamCaptureUnjoined) return "capturing stream has unjoined work";
  if (error == cudaErrorStreamCaptureIsolation) return "dependency created on uncaptured work in another stream";
  if (error == cudaErrorCapturedEvent) return "operation not permitted on an event last recorded in a capturing stream";
  return error ? "an error of the stub" : "no error";
}

cudaError_t cudaGetDevice(int *device) {
  *device = DEVICE;
  return 0;
}

cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device >= card_count()) return card_failed(cudaErrorInvalidDevice);
  DEVICE = device;
  return 0;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *found, int device) {
  const Card *kind = card();
  memset(found, 0, sizeof *found);
  strcpy(found->name, kind->full_name);
  found->major = kind->capability / 10;
  found->minor = kind->capability % 10;
  found->multiProcessorCount = kind->processors;
  found->totalGlobalMem = card_memory();
  found->sharedMemPerBlock = 49152;
  found->sharedMemPerBlockOptin = kind->shared_memory_of_block;
  found->sharedMemPerMultiprocessor = kind->shared_memory_of_block + 1024;
  found->regsPerBlock = 65536;
  found->regsPerMultiprocessor = 65536;
  found->warpSize = 32;
  found->maxThreadsPerBlock = 1024;
  found->maxThreadsDim[0] = 1024;
  found->maxThreadsDim[1] = 1024;
  found->maxThreadsDim[2] = 64;
  found->maxGridSize[0] = 2147483647;
  found->maxGridSize[1] = 65535;
  found->maxGridSize[2] = 65535;
  found->maxThreadsPerMultiProcessor = 2048;
  found->maxBlocksPerMultiProcessor = 32;
  found->l2CacheSize = kind->l2_bytes;
  found->memoryBusWidth = 5120;
  found->concurrentKernels = 1;
  found->asyncEngineCount = 3;
  found->unifiedAddressing = 1;
  found->managedMemory = 1;
  found->cooperativeLaunch = 1;
  found->streamPrioritiesSupported = 1;
  found->textureAlignment = 512;
  found->totalConstMem = 65536;
  found->pciBusID = 1 + device;
  for (int i = 0; i < 16; i++) found->uuid.bytes[i] = (char)(7 * i + device);
  return 0;
}

// Attributes have one number in the runtime and in the driver.
static int attribute(int which) {
  struct cudaDeviceProp of;
  cudaGetDeviceProperties(&of, DEVICE);
  switch (which) {
    case cudaDevAttrMaxThreadsPerBlock:
    case cudaDevAttrMaxBlockDimX:
    case cudaDevAttrMaxBlockDimY: return of.maxThreadsPerBlock;
    case cudaDevAttrMaxBlockDimZ: return of.maxThreadsDim[2];
    case cudaDevAttrMaxGridDimX: return of.maxGridSize[0];
    case cudaDevAttrMaxGridDimY:
    case cudaDevAttrMaxGridDimZ: return of.maxGridSize[1];
    case cudaDevAttrMaxSharedMemoryPerBlock: return of.sharedMemPerBlock;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: return of.sharedMemPerBlockOptin;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: return of.sharedMemPerMultiprocessor;
    case cudaDevAttrWarpSize: return of.warpSize;
    case cudaDevAttrMaxRegistersPerBlock:
    case cudaDevAttrMaxRegistersPerMultiprocessor: return of.regsPerBlock;
    case cudaDevAttrMultiProcessorCount: return of.multiProcessorCount;
    case cudaDevAttrMaxThreadsPerMultiProcessor: return of.maxThreadsPerMultiProcessor;
    case cudaDevAttrMaxBlocksPerMultiprocessor: return of.maxBlocksPerMultiProcessor;
    case cudaDevAttrComputeCapabilityMajor: return of.major;
    case cudaDevAttrComputeCapabilityMinor: return of.minor;
    case cudaDevAttrL2CacheSize: return of.l2CacheSize;
    case cudaDevAttrGlobalMemoryBusWidth: return of.memoryBusWidth;
    case cudaDevAttrClockRate: return 1980000;
    case cudaDevAttrMemoryClockRate: return 2619000;
    default: return 1;
  }
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
  *value = attribute(which);
  return 0;
}

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute which, CUdevice device) {
  *value = attribute((int)which);
  return 0;
}

cudaError_t cudaDeviceGetPCIBusId(char *text, int length, int device) {
  snprintf(text, length, "0000:%02x:00.0", device + 1);
  return 0;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
  if (least) *least = 0;
  if (greatest) *greatest = -5;
  return 0;
}
