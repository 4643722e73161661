// Memory: mapped on the host, and backed when it is touched.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <cuda.h>
#include <cuda_runtime_api.h>
#include "card.h"

// Memory of the device and page-locked memory of the host.
typedef enum { NOWHERE, ON_DEVICE, ON_HOST } Place;

typedef struct {
  uintptr_t at;
  size_t bytes;
  Place place;
} Block;

static pthread_mutex_t LOCK = PTHREAD_MUTEX_INITIALIZER;
static Block *BLOCKS;
static size_t COUNT, USED;

static void add(const void *pointer, size_t bytes, Place place) {
  pthread_mutex_lock(&LOCK);
  BLOCKS = card_with_room(BLOCKS, COUNT, sizeof(Block));
  BLOCKS[COUNT++] = (Block){(uintptr_t)pointer, bytes, place};
  pthread_mutex_unlock(&LOCK);
}

static size_t drop(const void *pointer) {
  size_t bytes = 0;
  pthread_mutex_lock(&LOCK);
  for (size_t i = 0; i < COUNT; i++) {
    if (BLOCKS[i].at != (uintptr_t)pointer) continue;
    bytes = BLOCKS[i].bytes;
    BLOCKS[i] = BLOCKS[--COUNT];
    break;
  }
  pthread_mutex_unlock(&LOCK);
  return bytes;
}

static Place place_of(const void *pointer) {
  Place found = NOWHERE;
  pthread_mutex_lock(&LOCK);
  for (size_t i = 0; i < COUNT && found == NOWHERE; i++)
    if ((uintptr_t)pointer - BLOCKS[i].at < BLOCKS[i].bytes) found = BLOCKS[i].place;
  pthread_mutex_unlock(&LOCK);
  return found;
}

// Take bytes of the card. Returns 0 if it has no more.
static int take(size_t bytes) {
  pthread_mutex_lock(&LOCK);
  int fits = USED + bytes <= card_memory();
  if (fits) USED += bytes;
  pthread_mutex_unlock(&LOCK);
  return fits;
}

static void give_back(size_t bytes) {
  pthread_mutex_lock(&LOCK);
  USED -= bytes;
  pthread_mutex_unlock(&LOCK);
}

static void *map(size_t bytes) {
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void *pointer = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  return pointer == MAP_FAILED ? NULL : pointer;
}

// In an order, memory stays: a wait here would hold the lock of torch's allocator, and values need Python's.
static void unmap(void *pointer, size_t bytes) {
  if (card_has_order()) return;
  card_wait_for_all();
  munmap(pointer, bytes);
}

static size_t whole_pages(size_t bytes) {
  return (bytes + 4095) & ~(size_t)4095;
}

// ---- the runtime's
cudaError_t cudaMalloc(void **pointer, size_t bytes) {
  if (card_refused_here()) return cudaErrorStreamCaptureUnsupported;
  card_note(ALLOCATION, "cudaMalloc", NULL, bytes);
  bytes = whole_pages(bytes);
  *pointer = NULL;
  if (!take(bytes)) return card_failed(cudaErrorMemoryAllocation);
  *pointer = map(bytes);
  add(*pointer, bytes, ON_DEVICE);
  return 0;
}

cudaError_t cudaFree(void *pointer) {
  if (card_refused_here()) return cudaErrorStreamCaptureUnsupported;
  card_note(FREE, "cudaFree", NULL, 0);
  if (!pointer) return 0;
  size_t bytes = drop(pointer);
  give_back(bytes);
  unmap(pointer, bytes);
  return 0;
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned flags) {
  if (card_refused_here()) return cudaErrorStreamCaptureUnsupported;
  card_note(ALLOCATION, "cudaHostAlloc", NULL, bytes);
  bytes = whole_pages(bytes);
  *pointer = map(bytes);
  add(*pointer, bytes, ON_HOST);
  return 0;
}

cudaError_t cudaFreeHost(void *pointer) {
  unmap(pointer, drop(pointer));
  return 0;
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
  card_note(ALLOCATION, "cudaHostRegister", NULL, bytes);
  add(pointer, bytes, ON_HOST);
  return 0;
}

cudaError_t cudaHostUnregister(void *pointer) {
  card_wait_for_all();
  drop(pointer);
  return 0;
}

cudaError_t cudaMemGetInfo(size_t *left, size_t *total) {
  *total = card_memory();
  *left = *total - USED;
  return 0;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *found, const void *pointer) {
  Place place = place_of(pointer);
  memset(found, 0, sizeof *found);
  if (place == NOWHERE) return 0;
  found->type = place == ON_HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
  found->devicePointer = (void *)pointer;
  found->hostPointer = place == ON_HOST ? (void *)pointer : NULL;
  return 0;
}

typedef struct {
  char *to;
  const char *from;
  size_t to_pitch, from_pitch, width, height;
  int value;
} Copy;

static int copy(void *task) {
  Copy *it = task;
  for (size_t row = 0; row < it->height; row++) {
    char *to = it->to + row * it->to_pitch;
    if (it->from)
      memmove(to, it->from + row * it->from_pitch, it->width);
    else
      memset(to, it->value, it->width);
  }
  free(it);
  return 1;
}

static void post(Copy what, const void *stream) {
  Copy *task = malloc(sizeof *task);
  *task = what;
  card_queue(stream, copy, task, sizeof *task);
}

// Copy rows, or fill them where there is nothing to copy from, in their stream's turn.
static void move(Copy what, const void *stream) {
  if (!card_inside && card_computes) post(what, stream);
}

// Fill memory that torch's allocator gives to a stream, or gets back from it, with NaN in every float format.
void card_poison(void *at, size_t bytes, const void *stream) {
  if (card_has_order()) post((Copy){at, NULL, 0, 0, bytes, 1, 0xff}, stream);
}

static const char *direction(enum cudaMemcpyKind kind, const void *to, const void *from) {
  static const char *names[] = {"host to host",     "host to device",          "device to host",
                                "device to device", "pageable host to device", "device to pageable host"};
  if (kind == cudaMemcpyDefault) return "default";
  if (kind == cudaMemcpyHostToDevice && place_of(from) != ON_HOST) return names[4];
  if (kind == cudaMemcpyDeviceToHost && place_of(to) != ON_HOST) return names[5];
  return names[kind];
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream) {
  const char *name = direction(kind, to, from);
  if (strstr(name, "pageable") && card_refused(stream)) return cudaErrorStreamCaptureUnsupported;
  card_note(COPY, name, stream, bytes);
  move((Copy){to, from, 0, 0, bytes, 1, 0}, stream);
  // CUDA has read pageable memory, or has written it, before it returns.
  if (strstr(name, "pageable")) {
    card_wait_for_stream(stream);
    card_note(WAIT, name[0] == 'd' ? "copy to pageable memory" : "copy from pageable memory", stream, bytes);
  }
  return 0;
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t bytes, enum cudaMemcpyKind kind) {
  if (card_refused_here()) return cudaErrorStreamCaptureUnsupported;
  card_note(COPY, direction(kind, to, from), NULL, bytes);
  card_note(WAIT, "cudaMemcpy", NULL, bytes);
  move((Copy){to, from, 0, 0, bytes, 1, 0}, NULL);
  card_wait_for_stream(NULL);
  return 0;
}

cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
  card_note(COPY, direction(kind, to, from), stream, width * height);
  move((Copy){to, from, to_pitch, from_pitch, width, height, 0}, stream);
  return 0;
}

cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t bytes, cudaStream_t stream) {
  card_note(COPY, "peer", stream, bytes);
  move((Copy){to, from, 0, 0, bytes, 1, 0}, stream);
  return 0;
}

cudaError_t cudaMemsetAsync(void *to, int value, size_t bytes, cudaStream_t stream) {
  card_note(FILL, "fill", stream, bytes);
  move((Copy){to, NULL, 0, 0, bytes, 1, value}, stream);
  return 0;
}

cudaError_t cudaMemset(void *to, int value, size_t bytes) {
  return cudaMemsetAsync(to, value, bytes, NULL);
}

// ---- the driver's: expandable segments reserve addresses and map memory into them
CUresult cuMemAddressReserve(CUdeviceptr *at, size_t bytes, size_t align, CUdeviceptr hint, unsigned long long flags) {
  *at = (CUdeviceptr)map(bytes);
  return 0;
}

CUresult cuMemAddressFree(CUdeviceptr at, size_t bytes) {
  unmap((void *)at, bytes);
  return 0;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *what,
                     unsigned long long flags) {
  card_note(ALLOCATION, "cuMemCreate", NULL, bytes);
  if (!take(bytes)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = bytes;
  return 0;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  card_note(FREE, "cuMemRelease", NULL, handle);
  give_back(handle);
  return 0;
}

CUresult cuMemMap(CUdeviceptr at, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                  unsigned long long flags) {
  add((void *)at, bytes, ON_DEVICE);
  return 0;
}

CUresult cuMemUnmap(CUdeviceptr at, size_t bytes) {
  drop((void *)at);
  if (card_has_order()) return 0;
  card_wait_for_all();
  madvise((void *)at, bytes, MADV_DONTNEED);
  return 0;
}

CUresult cuPointerGetAttribute(void *value, CUpointer_attribute which, CUdeviceptr at) {
  if (which != CU_POINTER_ATTRIBUTE_DEVICE_POINTER) card_end("no such attribute of a pointer", "cuPointerGetAttribute");
  *(CUdeviceptr *)value = at;
  return 0;
}
